"""Folders that commands write: new ones, or earlier ones of the same command, and no others."""

import glob
import hashlib
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.exceptions import EquipoolError, InputError
from equipool.files import read_json, write_json

# Options that do not change a result.
BESIDE = "name go_on config no_guess table out jobs dry_run fresh json no_report".split()


def check_out(arguments: Namespace, facts: dict[str, Any] | None = None) -> None:
    """Refuse a folder that holds anything but an earlier result of the command.

    That must be of the same ``facts``, which its marker holds; a command without facts needs --force.
    """
    out, command = arguments.out, arguments.name
    for one in (out, *out.parents):
        if one.exists() and not one.is_dir():
            raise InputError(f"{out} cannot be made: {one} is a file. Choose another folder.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    marker = out / f".equipool-{command}"
    if not marker.is_file():
        raise InputError(f"{out} is not empty; choose another folder.")
    if facts is not None and read_json(marker) != json.loads(json.dumps(facts)):
        what = f"{out} holds an earlier `equipool {command}` of other data or options"
        raise InputError(f"{what}; choose another folder.")
    if facts is None and not arguments.force:
        raise InputError(f"{out} holds an earlier `equipool {command}`; overwrite it with --force.")


@contextmanager
def whole_or_nothing(
    arguments: Namespace, facts: dict[str, Any], earlier: Sequence[str] = ()
) -> Iterator[Path]:
    """Give a folder to write into, whose files take their places in --out when all of them are there.

    Where anything fails or is interrupted, --out is as it was. Files of an ``earlier`` run, by their
    patterns, are deleted if this one does not write them again.
    """
    out = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    for folder in out.parent.glob(f".{glob.escape(out.name)}.equipool-*"):  # of runs that were killed
        with suppress(OSError, ValueError):
            try:
                os.kill(int(folder.name.rpartition("-")[2]), 0)
            except ProcessLookupError:
                shutil.rmtree(folder)
    work = out.with_name(f".{out.name}.equipool-{os.getpid()}")
    try:
        work.mkdir()
        yield work
        marker = write_json(work / f".equipool-{arguments.name}", facts).name
        stale = {path for name in earlier if (out / marker).is_file() for path in out.glob(name)}
        files = [path for path in work.rglob("*") if path.is_file()]
        # The marker first: should this be killed half-way, the same command may go on here. The participants
        # last: a folder that has them is whole.
        for path in sorted(files, key=lambda path: (path.name != marker, path.name == "participants.tsv")):
            place = out / path.relative_to(work)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
            stale.discard(place)
        for path in stale:
            path.unlink()
    except EquipoolError as error:
        # The user knows the folder that they named, not this one.
        raise type(error)(str(error).replace(str(work), str(out))) from error
    except OSError as error:
        if error.filename is not None:
            error.filename = str(error.filename).replace(str(work), str(out))
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def announce(arguments: Namespace, written: dict[str, Any], **more: Any) -> None:
    """Say what was written, or would be; with --json as one JSON object with ``more``, for scripts."""
    if getattr(arguments, "json", False):
        print(json.dumps({**written, **more}, ensure_ascii=False, default=str))
        return
    width = max(map(len, written)) + 2
    for name, what in written.items():
        print(f"{name.capitalize() + ':':<{width}}{what}")


def facts_of(arguments: Namespace, frame: pd.DataFrame) -> dict[str, Any]:
    """Return what decides a result, so that it is never taken for one of other data or options."""
    call = {name: value for name, value in vars(arguments).items() if name not in BESIDE}
    call = {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in call.items()}
    content = hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest()
    return {"source": str(arguments.table.resolve()), **call, "content": content}
