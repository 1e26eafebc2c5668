"""Options, declared in options.toml: the parser of calls, and config files, over which flags of a call win.

Help is for a small terminal, errors are one sentence. Imports are light, so that --help is instant.
"""

import argparse
import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from equipool.exceptions import InputError, did_you_mean
from equipool.files import packaged, write_whole
from equipool.version import __version__

WIDTH = 80
WRONG_CALL = 2

# Options that belong to one call, not to the data, and are in no config file.
OF_A_CALL = "h config write-config no-guess json figure out dry-run force fresh".split()

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


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of calls, and those of its commands by name."""
    declared = packaged("cli", "options.toml")
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


# -- config files, written by `equipool check --write-config` ----------------------------------------------


def read_config(path: Path, command: str) -> dict[str, Any]:
    """Return what a file says of a command's options, by their names in the parsed arguments."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror})"
        raise InputError(f"{what}; `equipool check TABLE --write-config FILE` makes one.") from error
    except (ValueError, RecursionError) as error:  # broken TOML or UTF-8, integers of thousands of digits
        what = f"{path} is no TOML file: {error}"
        raise InputError(f"{what}. Mend that line, or write the file anew.") from error
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
