"""Every command's help and options, declared in options.toml. Imports are light: --help is instant."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any


class Several(argparse.Action):
    """Names that may be given in one go or one by one; those of a config file are replaced, not added to."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """Take the names."""
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if earlier is self.default else earlier), *values])


KINDS: dict[str, dict[str, Any]] = {  # what argparse takes, by the `kind` of an option
    "flag": {"action": "store_true"},
    "column": {"metavar": "COLUMN"},
    "columns": {"metavar": "COLUMN", "nargs": "+"},
    "repeated columns": {"metavar": "COLUMN", "nargs": "+", "action": Several},
    "names": {"metavar": "NAME", "nargs": "+"},
    "path": {"type": Path},
    "file": {"type": Path, "metavar": "FILE"},
    "number": {"type": float},
    "count": {"type": int, "metavar": "N"},
    "counts": {"type": int, "metavar": "N", "nargs": "+"},
}


@dataclass(frozen=True)
class Command:
    """A command; ``run(arguments)`` in the module of its name in ``equipool.cli.commands`` does it."""

    help: str
    options: str  # names of OPTIONS and GROUPS
    description: str
    go_on: str = "Nothing half done was left; the same command starts anew."  # after an interruption
    lacks: Sequence[str] = ()  # attributes that are None in place of options of other commands
    constants: Mapping[str, Any] = field(default_factory=dict)  # those that have a value


def _option(help: str, kind: str = "", **settings: Any) -> dict[str, Any]:
    """Return what argparse takes; a help ends with the default, if there is one."""
    default = settings.get("default")
    if default not in (None, []) and default != ["all"]:
        help += f" (default: {default})"
    return {"help": help, **KINDS.get(kind, {}), **settings}


_DECLARED = tomllib.loads(files("equipool.cli").joinpath("options.toml").read_text(encoding="utf-8"))
OPTIONS = {name: _option(**settings) for name, settings in _DECLARED["options"].items()}
GROUPS: dict[str, dict[str, str]] = _DECLARED["groups"]
COMMANDS = {name: Command(**settings) for name, settings in _DECLARED["commands"].items()}
