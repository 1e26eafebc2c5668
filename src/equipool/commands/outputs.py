"""Folders that commands write: new ones, or earlier ones of the same command, and nobody else's."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from equipool.exceptions import InputError
from equipool.files import write_whole

__all__ = ["check_out", "claim_out"]


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
            f"{out} holds an earlier `equipool {command}` of something else; choose another folder."
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


def _marker(out: Path, command: str) -> Path:
    return out / f".equipool-{command}"
