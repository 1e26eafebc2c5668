"""Files written atomically, JSON, hashes, data that come with the package, and the cache folder."""

import hashlib
import json
import os
import tomllib
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from equipool.exceptions import EquipoolError


def cache_folder() -> Path:
    """Return the folder of the environment variable ``EQUIPOOL_CACHE``, or one in the user's cache folder."""
    chosen = os.environ.get("EQUIPOOL_CACHE")
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "equipool")


def file_sha256(path: Path) -> str:
    """Return the hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write to a temporary file and rename it; a failure leaves nothing new and keeps an earlier file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut after the rename could leave an empty file
        partial.replace(path)
    except BaseException as error:  # of interruptions too
        with suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        what = f"{path} could not be written: {error.strerror}"
        raise EquipoolError(f"{what}. Make room there, or choose another folder.") from error
    return path


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> Path:
    """Write a value as JSON, atomically."""
    return write_whole(path, json.dumps(value, indent=indent, ensure_ascii=False))


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; ``None`` if it does not exist or cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def packaged(folder: str, name: str) -> dict[str, Any]:
    """Return the content of a TOML file in a folder of the package."""
    return tomllib.loads(files(f"equipool.{folder}").joinpath(name).read_text(encoding="utf-8"))
