"""Folders that commands write: new ones, or earlier ones of the same command, and nobody else's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from equipool.exceptions import InputError
from equipool.files import write_whole

__all__ = ["add_json", "announce", "check_out", "claim_out", "whole_or_nothing"]


def add_json(command: argparse.ArgumentParser) -> None:
    """Add the option for scripts."""
    command.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def check_out(out: Path, command: str, facts: dict[str, Any] | None = None) -> bool:
    """Return whether ``out`` holds an earlier result of the command; refuse a folder with anything else.

    With ``facts``, the earlier result must be of the same: its marker holds them.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give the name of a folder.")
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


def claim_out(out: Path, command: str, facts: dict[str, Any], own: tuple[str, ...]) -> None:
    """Make the folder, take away what an earlier run left (by patterns), and mark it as the command's."""
    out.mkdir(parents=True, exist_ok=True)
    if _marker(out, command).is_file():
        for pattern in own:  # in their order
            for path in list(out.glob(pattern)):
                path.unlink()
    write_whole(_marker(out, command), json.dumps(facts, ensure_ascii=False))


@contextmanager
def whole_or_nothing(out: Path, command: str, facts: dict[str, Any], own: tuple[str, ...]) -> Iterator[None]:
    """Claim the folder; where what follows fails or is interrupted, take away all that was written."""
    existed = out.is_dir()
    claim_out(out, command, facts, own)
    try:
        yield
    except BaseException:
        for pattern in (*own, "model/*", "dataset_description.json", _marker(out, command).name):
            for path in list(out.glob(pattern)):
                path.unlink()
        for folder in sorted((path for path in out.rglob("*") if path.is_dir()), reverse=True):
            with suppress(OSError):  # not empty: somebody else's
                folder.rmdir()
        if not existed:
            with suppress(OSError):
                out.rmdir()
        raise


def announce(as_json: bool, written: dict[str, Any], **more: Any) -> None:
    """Say what was written, or what is; as one JSON object, with ``more``, for scripts."""
    if as_json:
        plain = {name: str(what) if isinstance(what, Path) else what for name, what in written.items()}
        print(json.dumps({**plain, **more}, ensure_ascii=False))
        return
    width = max(map(len, written)) + 2
    for name, what in written.items():
        print(f"{name.capitalize() + ':':<{width}}{what}")


def _marker(out: Path, command: str) -> Path:
    return out / f".equipool-{command}"
