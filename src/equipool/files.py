"""Writing files in one go: a reader sees the old one or the new one, never half of one."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from equipool.exceptions import EquipoolError

__all__ = ["cache_folder", "file_sha256", "write_whole"]


def cache_folder() -> Path:
    """Return where raw files are kept: ``EQUIPOOL_CACHE``, or the user's cache folder."""
    own = os.environ.get("EQUIPOOL_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(own) if own else base / "equipool"


def file_sha256(path: Path) -> str:
    """Return the hash of a file's content, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write beside the target and rename; on failure nothing is left behind and what was there stays."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # or a power cut after the rename could leave an empty file
        partial.replace(path)
    except BaseException as error:  # an interruption too leaves nothing behind
        with suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        raise EquipoolError(
            f"{path} could not be written: {error.strerror}. Make room there, or choose another folder."
        ) from error
    return path
