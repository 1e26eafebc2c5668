"""The command line: ``main`` reads a call and runs the module of its command in ``equipool.cli.commands``."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from equipool.cli.config import read_config
from equipool.cli.parser import WRONG_CALL, build_parser
from equipool.exceptions import EquipoolError, EquipoolWarning
from equipool.parallel import cluster

OUR_FAULT, INTERRUPTED, PIPE_CLOSED = 3, 130, 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a sign (η, ✗) shows a question mark rather than failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = argparse.Namespace(go_on="")
    try:
        arguments = parse(argv)
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # closed by head or less: not a verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (EquipoolError, OSError) as error:
        return _fail(WRONG_CALL, _sentence(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _fail(INTERRUPTED, f"interrupted. {arguments.go_on}".rstrip())
    except Exception as error:
        if os.environ.get("EQUIPOOL_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {error}"
        remedy = "Run it again with EQUIPOOL_TRACEBACK=1 and report what it prints."
        return _fail(OUR_FAULT, f"this should not have happened ({what}). {remedy}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return a call's arguments: its flags, then what a config file says, then defaults."""
    parser, commands = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if getattr(arguments, "config", None) is not None:
        commands[arguments.name].set_defaults(**read_config(arguments.config, arguments.name))
        arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[arguments.name].refuse_unknown(unknown)
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    """Run a command; warnings of equipool are printed as sentences, without their line of code."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, EquipoolWarning):
            print(f"equipool: {message}", file=sys.stderr)
        else:
            usual(message, category, *where, **more)

    command = importlib.import_module(f"equipool.cli.commands.{arguments.name}")
    with warnings.catch_warnings(), cluster(getattr(arguments, "scheduler", None)):
        warnings.showwarning = show
        status: int = command.run(arguments)
        return status


def _fail(code: int, sentence: str) -> int:
    print(f"equipool: {sentence}", file=sys.stderr)
    return code


def _sentence(error: Exception) -> str:
    """Return an error's words; of an error of the system, the file and what is wrong with it."""
    if isinstance(error, OSError) and not isinstance(error, EquipoolError) and error.filename:
        return (
            f"{error.filename} cannot be used ({error.strerror}); choose another path, or change its rights."
        )
    return str(error)
