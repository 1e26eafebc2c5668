"""The command line: thin functions over the Python interface. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from equipool.cli import (
    apply,
    benchmark,
    check,
    completion,
    datasets,
    demo,
    harmonize,
    preprocess,
    report,
    select,
    simulate,
)
from equipool.cli.config import read_config
from equipool.exceptions import EquipoolError, EquipoolWarning
from equipool.parallel import cluster
from equipool.version import __version__

WIDTH = 80
WRONG_CALL, OUR_FAULT, INTERRUPTED, PIPE_CLOSED = 2, 3, 130, 128 + 13

COMMANDS = (
    demo,
    check,
    harmonize,
    apply,
    report,
    benchmark,
    simulate,
    preprocess,
    select,
    datasets,
    completion,
)

START = """\
start here:
  equipool check people.csv                     can these sites be pooled?
  equipool harmonize people.csv --out results   then open results/report.html
"""
EXIT_CODES = """\
exit codes: 0 fine, 1 the data cannot be pooled, 2 the call or a file is wrong,
3 a defect of equipool, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a sign (η, ✗) shows a question mark rather than failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = argparse.Namespace(go_on="")
    try:
        arguments = parse(argv)
        status = _run(arguments.command, arguments)
        sys.stdout.flush()
    except (EquipoolError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _pipe_closed()
        print(f"equipool: {_sentence(error)}", file=sys.stderr)
        return WRONG_CALL
    except KeyboardInterrupt:
        print(f"\nequipool: interrupted. {arguments.go_on}".rstrip(), file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("EQUIPOOL_TRACEBACK"):
            raise
        kind = type(error).__name__
        print(
            f"equipool: this should not have happened ({kind}: {error}). Run it again with "
            "EQUIPOOL_TRACEBACK=1 and report what it prints.",
            file=sys.stderr,
        )
        return OUR_FAULT
    return int(status)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return a call's arguments: its flags, then what a config file says, then defaults."""
    parser, commands = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if getattr(arguments, "config", None) is not None:
        commands[arguments.name].set_defaults(**read_config(arguments.config, arguments.name))
        arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[arguments.name].refuse_unknown(unknown)
    return arguments


class Help(argparse.RawDescriptionHelpFormatter):
    """Help in the width of a small terminal, short names beside their text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=24, width=WIDTH)
        self._action_max_length = 14  # argparse measures commands without their indent, and breaks lines


class Parser(argparse.ArgumentParser):
    """A parser whose help ends with the exit codes and whose errors are one sentence."""

    def __init__(self, **settings: Any) -> None:
        settings = {
            "epilog": EXIT_CODES,
            "formatter_class": Help,
            **settings,
            "description": textwrap.fill(settings.get("description") or "", WIDTH),
        }
        super().__init__(**settings)

    def shorten_usage(self) -> None:
        """Say in the usage what a call must have, and leave the options to the list below."""
        must = [action for action in self._actions if action.required]
        words = [f"{(*action.option_strings, '')[0]} {action.metavar or ''}".strip() for action in must]
        self.usage = " ".join([self.prog, *words, "[options]"])

    def error(self, message: str) -> NoReturn:
        """End with what is wrong and where help is."""
        wrong = re.fullmatch(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        lacking = re.fullmatch(r"the following arguments are required: (.*)", message)
        if wrong:
            name, value, choices = wrong[1], wrong[2], wrong[3].replace("'", "").split(", ")
            near = difflib.get_close_matches(value, choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}."
            message = f"{name} cannot be {value!r}; {hint}"
        elif lacking:
            first = " (it goes before the options)" if lacking[1][0] != "-" else ""
            message = f"{lacking[1]} is missing{first}."
        elif number := re.fullmatch(r"argument (.+): invalid (int|float) value: (.*)", message):
            kind = "a whole number" if number[2] == "int" else "a number"
            message = f"{number[1]} must be {kind}. Got {number[3]}."
        elif bare := re.fullmatch(r"argument (.+): expected (?:one|at least one) argument", message):
            message = f"{bare[1]} needs a value."
        else:
            message += "."
        self.exit(WRONG_CALL, f"equipool: {message} See: {self.prog} --help\n")

    def refuse_unknown(self, arguments: Sequence[str]) -> NoReturn:
        """End with the nearest option that there is."""
        options = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(arguments[0].partition("=")[0], options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.exit(
            WRONG_CALL,
            f"equipool: {' '.join(arguments)} means nothing here{hint or '.'} See: {self.prog} --help\n",
        )


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of calls, and those of its commands by name."""
    parser = Parser(
        prog="equipool",
        description="Pool multi-site datasets so that they can be analysed as one.",
        epilog=START + EXIT_CODES,
        usage="equipool [--help] [--version] COMMAND …",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument(
        "--version", action="version", version=f"equipool {__version__}", help=argparse.SUPPRESS
    )
    commands = parser.add_subparsers(
        title="commands (equipool COMMAND --help says more)",
        prog="equipool",
        required=True,
        metavar="COMMAND",
        dest="name",
    )
    for command in COMMANDS:
        command.add(commands)
    for command_parser in commands.choices.values():
        command_parser.shorten_usage()
    return parser, commands.choices


def _run(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command; warnings of equipool are printed as sentences, without their line of code."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, EquipoolWarning):
            print(f"equipool: {message}", file=sys.stderr)
        else:
            usual(message, category, *where, **more)

    with warnings.catch_warnings(), cluster(getattr(arguments, "scheduler", None)):
        warnings.showwarning = show
        return command(arguments)


def _sentence(error: Exception) -> str:
    """Return an error's words; of an error of the system, the file and what is wrong with it."""
    if isinstance(error, OSError) and not isinstance(error, EquipoolError) and error.filename:
        return (
            f"{error.filename} cannot be used ({error.strerror}); choose another path, or change its rights."
        )
    return str(error)


def _pipe_closed() -> int:
    """Return the exit code of a command whose pipe was closed, by head or less: not a verdict."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
