"""Folders that commands write: new ones, or earlier ones of the same command, and nobody else's."""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.exceptions import EquipoolError, InputError
from equipool.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["add_json", "announce", "check_out", "content_hash", "whole_or_nothing"]


def add_json(command: argparse.ArgumentParser) -> None:
    """Add the option for scripts."""
    command.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def check_out(out: Path, command: str, facts: dict[str, Any] | None = None) -> bool:
    """Return whether ``out`` holds an earlier result of the command; refuse a folder with anything else.

    With ``facts``, the earlier result must be of the same: its marker holds them.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give the name of a folder.")
    above = next((one for one in out.parents if one.is_file()), None)
    if above is not None:
        raise InputError(f"{out} cannot be made: {above} is a file. Choose another folder.")
    if not out.is_dir() or not any(out.iterdir()):
        return False
    marker = _marker(out, command)
    if not marker.is_file():
        raise InputError(f"{out} is not empty; choose another folder.")
    known = None
    with suppress(OSError, ValueError):
        known = json.loads(marker.read_text(encoding="utf-8"))
    if facts is not None and known != json.loads(json.dumps(facts)):
        raise InputError(
            f"{out} holds an earlier `equipool {command}` of other data or options; choose another folder."
        )
    return True


@contextmanager
def whole_or_nothing(out: Path, command: str, facts: dict[str, Any], own: tuple[str, ...]) -> Iterator[Path]:
    """Give a folder to write into, whose files take their places in ``out`` when all of them are there.

    Where anything fails or is interrupted, ``out`` is as it was. Of an earlier run those files go, by
    patterns, that this one did not write again.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    work = out.with_name(f".{out.name}.equipool-{os.getpid()}")
    try:
        work.mkdir()
        yield work
        write_whole(_marker(work, command), json.dumps(facts, ensure_ascii=False))
        _take_places(work, out, command, own)
    except EquipoolError as error:
        # The folder is nobody's business: people know the one that they named.
        raise type(error)(str(error).replace(str(work), str(out))) from error
    except OSError as error:
        if error.filename is not None:
            error.filename = str(error.filename).replace(str(work), str(out))
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _take_places(work: Path, out: Path, command: str, own: tuple[str, ...]) -> None:
    earlier = (
        {path for pattern in own for path in out.glob(pattern)} if _marker(out, command).is_file() else set()
    )
    out.mkdir(exist_ok=True)
    files = [path for path in work.rglob("*") if path.is_file()]
    # The marker first: should this be killed half-way, the same command may go on here. The list of people
    # last: a folder that has it is whole.
    marker = _marker(out, command).name
    for path in sorted(files, key=lambda path: (path.name != marker, path.name == "participants.tsv")):
        place = out / path.relative_to(work)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
        earlier.discard(place)
    for path in earlier:
        path.unlink(missing_ok=True)


def _sweep(out: Path) -> None:
    """Take away what killed runs left beside the folder."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.equipool-*"):
        pid = left.name.rpartition("-")[2]
        if pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def announce(as_json: bool, written: dict[str, Any], **more: Any) -> None:
    """Say what was written, or what is; as one JSON object, with ``more``, for scripts."""
    if as_json:
        plain = {name: str(what) if isinstance(what, Path) else what for name, what in written.items()}
        print(json.dumps({**plain, **more}, ensure_ascii=False))
        return
    width = max(map(len, written)) + 2
    for name, what in written.items():
        print(f"{name.capitalize() + ':':<{width}}{what}")


def content_hash(frame: pd.DataFrame) -> str:
    """Return a hash of a table's content, so that a result is never taken for one of other data."""
    return hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest()


def _marker(out: Path, command: str) -> Path:
    return out / f".equipool-{command}"
