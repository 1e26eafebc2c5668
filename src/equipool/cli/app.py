"""The command line: ``main`` reads a call and runs the module of its command in ``equipool.cli.commands``."""

import importlib
import io
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from equipool.cli.options import WRONG_CALL, build_parser, read_config
from equipool.exceptions import EquipoolError, EquipoolWarning, InputError
from equipool.parallel import cluster

OUR_FAULT, INTERRUPTED, PIPE_CLOSED = 3, 130, 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a sign (η, ✗) shows a question mark rather than failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = Namespace(go_on="")
    try:
        arguments = parse(argv)
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # closed by head or less: not a verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        code, said = INTERRUPTED, f"interrupted. {arguments.go_on}".rstrip()
        print(file=sys.stderr)
    except EquipoolError as error:
        code, said = WRONG_CALL, str(error)
    except OSError as error:
        code, said = WRONG_CALL, str(error)
        if error.filename:
            said = f"{error.filename} cannot be used ({error.strerror})"
            said += "; choose another path, or change its rights."
    except Exception as error:
        if os.environ.get("EQUIPOOL_TRACEBACK"):
            raise
        code, said = OUR_FAULT, f"this should not have happened ({type(error).__name__}: {error})."
        said += " Run it again with EQUIPOOL_TRACEBACK=1 and report what it prints."
    print(f"equipool: {said}", file=sys.stderr)
    return code


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Return a call's arguments: its flags, then what a config file says, then defaults."""
    parser, commands = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if getattr(arguments, "config", None) is not None:
        commands[arguments.name].set_defaults(**read_config(arguments.config, arguments.name))
        arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[arguments.name].error(f"unrecognized arguments: {' '.join(unknown)}")
    for name, least in {"seed": 0, "jobs": 1, "steps": 1, "seeds": 1}.items():
        value = getattr(arguments, name, None)
        if value is not None and value < least:
            raise InputError(f"--{name} must be at least {least}. Got {value}.")
    return arguments


def _run(arguments: Namespace) -> int:
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
        return int(command.run(arguments))
