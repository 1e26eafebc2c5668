"""Checkpoints of training: a run that was killed goes on, and ends with the bits of one that was not.

A folder holds ``checkpoint.json``, which says what is trained on what and how far each stage is, and for each
stage one safetensors file that it names with its hash. Numbers are written under a new name before the JSON
names them, so at every moment the JSON names a whole file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from equipool import distributed
from equipool.exceptions import InputError
from equipool.files import write_whole

__all__ = ["Checkpoint", "Checkpoints", "held"]

SCHEMA = 1
FACTS = "checkpoint.json"
SECONDS = 30.0  # between two checkpoints


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder to one fit: two at once would take each other's numbers away.

    The lock is on the folder itself and is the system's, so it goes with the process, however that ends.
    """
    free, lock = _lock(folder) if distributed.leads() else (True, None)
    try:
        if not distributed.agree(free):
            raise InputError(
                f"Another run is training with the checkpoint {folder}, on the same data with the same "
                "settings; wait for it, or give another folder."
            )
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> tuple[bool, int | None]:
    """Return whether nobody else has the folder, and the lock on it; none where folders cannot be locked."""
    lock = None
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, lock
    except (ImportError, OSError):  # should nothing be writable there, the first checkpoint says so
        return True, lock
    return True, lock


@dataclass
class Checkpoints:
    """The checkpoints of one fit, a stage each.

    Parameters
    ----------
    folder
        Where they are kept; files of others in it are left alone.
    manifest
        What is trained: settings and hashes of the data, by name. A folder of another fit is refused.
    """

    folder: Path
    manifest: dict[str, dict[str, Any]]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        content = distributed.share(_read(self.folder / FACTS) if distributed.leads() else None)
        if content is None:
            return
        try:
            facts = json.loads(content)
            schema, known, stages = facts["schema"], facts["manifest"], facts["stages"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.folder / FACTS} is damaged or no checkpoint; remove it to start anew."
            ) from error
        if schema != SCHEMA:
            raise InputError(
                f"{self.folder} holds a checkpoint of schema {schema!r}; this release goes on from schema "
                f"{SCHEMA}. Use the release that wrote it, or start anew: give another folder, remove "
                "this one, or say --fresh on the command line."
            )
        _require_same(self.folder, known, json.loads(json.dumps(self.manifest)))
        self.stages = stages
        self._sweep()

    def stage(self, name: str) -> Checkpoint:
        """Return the checkpoint of one stage."""
        return Checkpoint(self, name)

    def read(self, stage: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return numbers and facts of a stage, if there are any."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        facts = self.stages.get(stage)
        if facts is None:
            return None
        path = self.folder / str(facts.get("file"))
        content = distributed.share(_read(path) if distributed.leads() else None)
        if content is None or hashlib.sha256(content).hexdigest() != facts.get("sha256"):
            raise InputError(
                f"The checkpoint {path} is damaged: it is not the file that {FACTS} names. Remove the folder "
                "to start anew."
            )
        try:
            return load(content), facts
        except SafetensorError as error:
            raise InputError(f"The checkpoint {path} is damaged: {error}. Remove the folder.") from error

    def write(self, stage: str, numbers: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write numbers under a name of their own, then the JSON that names them; then the old ones go."""
        from safetensors.torch import save

        content = save({name: tensor.cpu().contiguous().clone() for name, tensor in numbers.items()})
        digest = hashlib.sha256(content).hexdigest()
        name = f"{stage.replace(' ', '-')}-{digest[:16]}.safetensors"
        write_whole(self.folder / name, content)
        self.stages[stage] = {**facts, "file": name, "sha256": digest}
        record = {"schema": SCHEMA, "manifest": self.manifest, "stages": self.stages}
        write_whole(self.folder / FACTS, json.dumps(record, indent=1, ensure_ascii=False))
        self._sweep()

    def _sweep(self) -> None:
        """Remove our files that are not named any more: those before, and those of a run killed between."""
        named = {FACTS, *(facts["file"] for facts in self.stages.values())}
        numbers = "*-" + "[0-9a-f]" * 16 + ".safetensors"
        for pattern in (numbers, f".{numbers}.*", f".{FACTS}.*"):
            for path in self.folder.glob(pattern):
                if distributed.leads() and path.name not in named:
                    with suppress(OSError):
                        path.unlink()


@dataclass
class Checkpoint:
    """The checkpoint of one stage, and when the next one is due."""

    whole: Checkpoints
    stage: str
    last: float = field(default_factory=time.monotonic)

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return numbers and facts, if this stage was begun before."""
        return self.whole.read(self.stage)

    def write(self, numbers: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write; in one process of several."""
        if distributed.leads():
            self.whole.write(self.stage, numbers, facts)
        self.last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() - self.last >= SECONDS


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"The checkpoint {path} cannot be read: {error.strerror}.") from error


def _require_same(folder: Path, known: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse the checkpoint of another fit, and say what is other."""
    for kind in dict.fromkeys([*known, *now]):
        before, after = known.get(kind, {}), now.get(kind, {})
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) == after.get(name):
                continue
            what = f"other {kind}: {name} was {before.get(name)!r} and is {after.get(name)!r}"
            if kind == "data":
                what = f"other data: {name} is not the same"
            raise InputError(
                f"{folder} holds a checkpoint with {what}. Go on with the same, or start anew: give another "
                "folder, remove this one, or say --fresh on the command line."
            )
