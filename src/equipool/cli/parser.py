"""The parser of calls: help in the width of a small terminal, errors of one sentence."""

from __future__ import annotations

import argparse
import re
import textwrap
from typing import Any, NoReturn

from equipool.cli.options import COMMANDS, GROUPS, OPTIONS, Command
from equipool.exceptions import did_you_mean
from equipool.version import __version__

WIDTH = 80
WRONG_CALL = 2
START = """\
start here:
  equipool check people.csv                     can these sites be pooled?
  equipool harmonize people.csv --out results   then open results/report.html
"""
EXIT_CODES = """\
exit codes: 0 fine, 1 the data cannot be pooled or some heads failed, 2 the call
or a file is wrong, 3 a defect of equipool, 130 interrupted"""

# What argparse says, as patterns, and how we say it.
SENTENCES = (
    (r"the following arguments are required: (.*)", r"\1 is missing (it goes before the options)."),
    (r"the following arguments are required: (-.*)", r"\1 is missing."),
    (r"argument (.+): invalid int value: (.*)", r"\1 must be a whole number. Got \2."),
    (r"argument (.+): invalid float value: (.*)", r"\1 must be a number. Got \2."),
    (r"argument (.+): expected (?:one|at least one) argument", r"\1 needs a value."),
)


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of calls, and those of its commands by name."""
    parser = Parser(
        prog="equipool",
        description="Pool multi-site datasets so that they can be analysed as one.",
        epilog=START + EXIT_CODES,
        usage="equipool [--help] [--version] COMMAND …",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    version = f"equipool {__version__}"
    parser.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    title = "commands (equipool COMMAND --help says more)"
    named = {"metavar": "COMMAND", "dest": "name"}
    commands = parser.add_subparsers(title=title, prog="equipool", required=True, **named)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.help, description=command.description, epilog=EXIT_CODES)
        one.declare(name, command)
    return parser, commands.choices


def _narrow_help(prog: str) -> argparse.HelpFormatter:
    form = argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=WIDTH)
    form._action_max_length = 14  # argparse measures commands without their indent, and breaks lines
    return form


class Parser(argparse.ArgumentParser):
    """The parser of all calls, or of one command."""

    def __init__(self, *, description: str, **settings: Any) -> None:
        description = textwrap.fill(description, WIDTH)
        super().__init__(formatter_class=_narrow_help, description=description, **settings)

    def declare(self, name: str, command: Command) -> None:
        """Add a command's options; its usage shows those that a call must have."""
        for word in command.options.split():
            inside = GROUPS.get(word)
            group = self.add_argument_group(word, inside["help"]) if inside else self
            for option in inside["options"].split() if inside else [word]:
                settings = OPTIONS.get(f"{name} {option}", OPTIONS[option])
                group.add_argument(*option.split("/"), **settings)
        must = [action for action in self._actions if action.required]
        words = [f"{(*one.option_strings, '')[0]} {one.metavar or one.dest.upper()}".strip() for one in must]
        self.usage = " ".join([self.prog, *words, "[options]"])
        self.set_defaults(go_on=command.go_on, **dict.fromkeys(command.lacks), **command.constants)

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
