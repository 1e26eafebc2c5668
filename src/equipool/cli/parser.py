"""The parser of calls, declared in options.toml: help for a small terminal, errors of one sentence.

Imports are light, so that --help is instant.
"""

from __future__ import annotations

import argparse
import re
import textwrap
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from equipool.exceptions import did_you_mean
from equipool.version import __version__

WIDTH = 80
WRONG_CALL = 2

# What argparse says, as patterns, and how we say it.
SENTENCES = (
    (r"the following arguments are required: (.*)", r"\1 is missing (it goes before the options)."),
    (r"the following arguments are required: (-.*)", r"\1 is missing."),
    (r"argument (.+): invalid int value: (.*)", r"\1 must be a whole number. Got \2."),
    (r"argument (.+): invalid float value: (.*)", r"\1 must be a number. Got \2."),
    (r"argument (.+): expected (?:one|at least one) argument", r"\1 needs a value."),
)


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


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of calls, and those of its commands by name."""
    declared = tomllib.loads(files("equipool.cli").joinpath("options.toml").read_text(encoding="utf-8"))
    program = declared["program"]
    parser = Parser(
        prog="equipool",
        description=program["description"],
        epilog=program["start"] + program["exit_codes"],
        usage="equipool [--help] [--version] COMMAND …",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    version = f"equipool {__version__}"
    parser.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    title = "commands (equipool COMMAND --help says more)"
    named = {"metavar": "COMMAND", "dest": "name"}
    commands = parser.add_subparsers(title=title, prog="equipool", required=True, **named)
    for name, command in declared["commands"].items():
        texts = {"help": command["help"], "description": command["description"]}
        one = commands.add_parser(name, **texts, epilog=program["exit_codes"])
        one.declare(name, command["options"], declared)
        lacking = dict.fromkeys(command.get("lacks", ()))
        go_on = command.get("go_on", program["go_on"])
        one.set_defaults(go_on=go_on, **lacking, **command.get("constants", {}))
    return parser, commands.choices


def _narrow_help(prog: str) -> argparse.HelpFormatter:
    form = argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=WIDTH)
    form._action_max_length = 14  # argparse measures commands without their indent, and breaks lines
    return form


def _settings(help: str, kind: str = "", **settings: Any) -> dict[str, Any]:
    """Return what argparse takes for an option; a help ends with the default, if there is one."""
    default = settings.get("default")
    if default not in (None, []) and default != ["all"]:
        help += f" (default: {default})"
    return {"help": help, **KINDS.get(kind, {}), **settings}


class Parser(argparse.ArgumentParser):
    """The parser of all calls, or of one command."""

    def __init__(self, *, description: str, **settings: Any) -> None:
        description = textwrap.fill(description, WIDTH)
        super().__init__(formatter_class=_narrow_help, description=description, **settings)

    def declare(self, name: str, options: str, declared: dict[str, Any]) -> None:
        """Add a command's options and groups of them; its usage shows those that a call must have."""
        for word in options.split():
            inside = declared["groups"].get(word)
            group = self.add_argument_group(word, inside["help"]) if inside else self
            for option in inside["options"].split() if inside else [word]:
                settings = declared["options"].get(f"{name} {option}", declared["options"][option])
                group.add_argument(*option.split("/"), **_settings(**settings))
        must = [action for action in self._actions if action.required]
        words = [f"{(*one.option_strings, '')[0]} {one.metavar or one.dest.upper()}".strip() for one in must]
        self.usage = " ".join([self.prog, *words, "[options]"])

    def error(self, message: str) -> NoReturn:
        """End with what is wrong and where help is."""
        said = f"{message}."
        for pattern, sentence in SENTENCES:
            if match := re.fullmatch(pattern, message):
                said = match.expand(sentence)
        if match := re.fullmatch(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            choices = match[3].replace("'", "").split(", ")
            hint = did_you_mean(match[2], choices, f"choose from {', '.join(choices)}.")
            said = f"{match[1]} cannot be {match[2]!r}; {hint}"
        elif unknown := re.fullmatch(r"unrecognized arguments: (.*)", message):
            hint = did_you_mean(re.split("[ =]", unknown[1])[0], self._option_string_actions)
            said = f"{unknown[1]} means nothing here{f'; {hint}' if hint else '.'}"
        self.exit(WRONG_CALL, f"equipool: {said} See: {self.prog} --help\n")
