"""Options from a TOML file, which `equipool check --write-config` writes; flags of the call win over it."""

import argparse
import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from equipool.cli.parser import build_parser
from equipool.exceptions import InputError, did_you_mean
from equipool.files import write_whole

# Options that belong to one call, not to the data.
OF_A_CALL = "h config write-config no-guess json figure out dry-run force fresh".split()


def read_config(path: Path, command: str) -> dict[str, Any]:
    """Return what a file says of a command's options, by their names in the parsed arguments."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); `equipool check TABLE --write-config FILE` makes one."
        ) from error
    except (ValueError, RecursionError) as error:  # broken TOML or UTF-8, integers of thousands of digits
        raise InputError(
            f"{path} is no TOML file: {error}. Mend that line, or write the file anew."
        ) from error
    options = _options()
    keys = sorted(set().union(*options.values()))
    for key in content:
        if key not in keys:
            hint = did_you_mean(key, keys, f"choose from {', '.join(keys)}.")
            raise InputError(f"{path} has the unknown key {key!r}; {hint}")
    given = {key: action for key, action in options[command].items() if key in content}
    return {action.dest: _value(action, content[key], key, path) for key, action in given.items()}


def check_config_path(path: Path) -> None:
    """Refuse a path that no file can or should be written to."""
    if path.suffix != ".toml":
        raise InputError(f"A config file is TOML: end its name in .toml. Got {path.name}.")
    if path.exists():
        raise InputError(f"{path} exists already; choose another name, or delete it first.")
    if not path.parent.is_dir():
        raise InputError(f"The folder {path.parent} does not exist; make it first.")


def write_config(path: Path, arguments: argparse.Namespace) -> Path:
    """Write the options of a call, with what was guessed, and the others as comments."""
    lines = [
        "# Options of equipool for one table or folder; flags of a call win over these.",
        f"# Use it:  equipool harmonize {arguments.table} --config {path} --out DIR",
    ]
    unset = ["", "# Not set; take the first # away to set one."]
    options = _options()
    for key, action in {**options["check"], **options["harmonize"]}.items():
        value = getattr(arguments, action.dest, action.default)
        if key in ("covariate", "target", "id") and not value and not (key == "id" and arguments.subject):
            value = ["none"] if key == "covariate" else "none"
        help = (action.help or "").replace("%%", "%")
        text = textwrap.wrap(help, 98, initial_indent="# ", subsequent_indent="# ")
        # JSON's text, numbers, lists of text, true and false are TOML's.
        line = f"{key} = {json.dumps('' if value is None else value, default=str, ensure_ascii=False)}"
        if value != action.default:
            lines += ["", *text, line]
        else:
            unset += ["", *text, f"# {line}"]
    return write_whole(path, "\n".join([*lines, *unset, ""]))


def _options() -> dict[str, dict[str, argparse.Action]]:
    """Return the options that a file may set, by command and name."""
    options = {}
    for name, parser in build_parser()[1].items():
        by_key = {a.option_strings[0].lstrip("-"): a for a in parser._actions if a.option_strings}
        if "config" in by_key:
            options[name] = {key: action for key, action in by_key.items() if key not in OF_A_CALL}
    return options


def _value(action: argparse.Action, value: Any, key: str, path: Path) -> Any:
    """Return a value as the parser would have it; say what it must be where it is something else."""
    each = value if action.nargs == "+" and isinstance(value, list) else [value]
    if action.nargs == 0:
        fits, wanted = isinstance(value, bool), "true or false"
    elif action.type is int:
        fits, wanted = type(value) is int, "a whole number"
    elif action.choices is not None:
        fits, wanted = value in action.choices, "one of " + ", ".join(map(str, action.choices))
    else:
        fits = all(isinstance(one, str) for one in each)
        wanted = "text in quotes, or a list of it" if action.nargs == "+" else "text in quotes"
    if not fits:
        raise InputError(f"{path}: {key} must be {wanted}. Got {value!r}.")
    if action.nargs == "+":
        return each
    return Path(value) if action.type is Path else value
