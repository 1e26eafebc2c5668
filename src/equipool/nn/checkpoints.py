"""Checkpoints of training: a killed run resumes, and ends with the bits of one that was not killed.

A folder holds ``checkpoint.json``, with the settings and hashes of the data, and for each stage a safetensors
file with its numbers, its progress and a checksum. Files are replaced in one go, so each is always whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipool import distributed
from equipool.exceptions import InputError
from equipool.files import write_whole

SCHEMA = 2
MANIFEST, ENDING = "checkpoint.json", ".checkpoint.safetensors"
SECONDS = 30.0  # between two checkpoints
ANEW = "start anew: give another folder, remove this one, or say --fresh on the command line"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one fit at a time use a folder, by a lock of the operating system, which ends with the process."""
    with ExitStack() as lock:
        if not distributed.share(not distributed.leads() or _take_lock(folder, lock)):
            raise InputError(
                f"Another run is training with the checkpoint {folder}, on the same data with the same "
                "settings; wait for it, or give another folder."
            )
        yield


def _take_lock(folder: Path, lock: ExitStack) -> bool:
    """Return whether no other process holds the lock; its release is left to ``lock``."""
    with suppress(
        ImportError, OSError
    ):  # no locks there, or nothing can be written, which a checkpoint reports
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        lock.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class Checkpoints:
    """The checkpoints of one fit in a folder, one for each stage; a folder of another fit is refused.

    ``manifest`` says what is trained: settings and hashes of the data, by name. Other files there stay.
    """

    def __init__(self, folder: Path, manifest: dict[str, dict[str, Any]]) -> None:
        self.folder = folder
        self.record = json.dumps({"schema": SCHEMA, "manifest": manifest}, indent=1, ensure_ascii=False)
        for pattern in (f".{MANIFEST}.*", f".*{ENDING}.*"):  # of a run killed while it wrote
            for partial in folder.glob(pattern) if distributed.leads() else ():
                with suppress(OSError):
                    partial.unlink()
        content = _read(folder / MANIFEST)
        self.begun = content is not None
        if content is None:
            return
        try:
            schema, earlier = (json.loads(content)[name] for name in ("schema", "manifest"))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder / MANIFEST} is damaged or no checkpoint; remove it to start anew."
            ) from error
        if schema != SCHEMA:
            raise InputError(
                f"{folder} holds a checkpoint of schema {schema!r}; this release resumes schema {SCHEMA}. "
                f"Use the release that wrote it, or {ANEW}."
            )
        _require_same(folder, earlier, json.loads(self.record)["manifest"])

    def stage(self, name: str) -> Checkpoint:
        """Return the checkpoint of one stage."""
        return Checkpoint(self, self.folder / f"{name.replace(' ', '-')}{ENDING}")

    def begin(self) -> None:
        """Write the manifest, before the first checkpoint."""
        if not self.begun:
            write_whole(self.folder / MANIFEST, self.record)
            self.begun = True


@dataclass
class Checkpoint:
    """The checkpoint of one stage, and when it was written last."""

    fit: Checkpoints
    path: Path
    written: float = field(default_factory=time.monotonic)

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return numbers and facts, if this stage was begun before."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        content = _read(self.path) if self.fit.begun else None
        if content is None:
            return None
        try:
            numbers = load(content)
            facts = json.loads(bytes(numbers.pop("facts").tolist()))
            if facts["sha256"] != _checksum(numbers):
                raise ValueError("another checksum")
        except (SafetensorError, LookupError, ValueError, TypeError) as error:
            raise InputError(
                f"The checkpoint {self.path} is damaged ({error}). Remove the folder to start anew."
            ) from error
        return numbers, facts

    def write(self, numbers: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write; in one process of several."""
        from safetensors.torch import save

        if distributed.leads():
            self.fit.begin()
            numbers = {name: tensor.cpu().contiguous().clone() for name, tensor in numbers.items()}
            record = json.dumps({**facts, "sha256": _checksum(numbers)}).encode()
            write_whole(self.path, save({**numbers, "facts": torch.tensor(list(record), dtype=torch.uint8)}))
        self.written = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() - self.written >= SECONDS


def _checksum(numbers: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(numbers):
        digest.update(name.encode())
        digest.update(numbers[name].numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """Return a file's content as the leading process reads it; ``None`` where there is no file."""
    try:
        return distributed.share(path.read_bytes() if distributed.leads() else None)
    except FileNotFoundError:
        return distributed.share(None)
    except OSError as error:
        raise InputError(f"The checkpoint {path} cannot be read: {error.strerror}.") from error


def _require_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse the checkpoint of another fit, and say what differs."""
    for kind, name, value in ((kind, *item) for kind, values in now.items() for item in values.items()):
        earlier = before.get(kind, {}).get(name)
        if earlier != value:
            what = "is not the same" if kind == "data" else f"was {earlier!r} and is {value!r}"
            raise InputError(
                f"{folder} holds a checkpoint with other {kind}: {name} {what}. Go on with the same, or "
                f"{ANEW}."
            )
