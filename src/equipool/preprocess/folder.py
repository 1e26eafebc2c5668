"""Preprocess every head of a BIDS folder: in parallel, resumable, one bad image does not stop the others."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.data.bids import as_label, find_images, format_name, image_path, parse_name, write_description
from equipool.data.nifti import write_volume
from equipool.data.tables import write_table
from equipool.exceptions import EquipoolError, InputError, first_line
from equipool.files import file_sha256, read_json, write_json, write_whole
from equipool.parallel import fan_out
from equipool.preprocess.heads import SPACE, Brain, Steps, preprocess_head, read_head, require_extra, template
from equipool.preprocess.mosaic import mosaic
from equipool.progress import Progress, duration, say

CHAIN = 1  # raise it when the same settings give other volumes
PACKAGES = "equipool SimpleITK deepbet picsl-greedy nibabel nilearn numpy scipy torch".split()
USUAL_SECONDS = 20.0  # a head on one core, before one of this folder has been timed


@dataclass(frozen=True)
class Head:
    """One image to preprocess, and the files that result."""

    entities: dict[str, str]
    source: Path
    out: Path
    steps: Steps

    @property
    def name(self) -> str:
        """The BIDS name, such as ``sub-1_ses-2_run-1``."""
        return format_name(self.entities)

    @cached_property
    def files(self) -> dict[str, Path]:
        """Brain, mask, transform, picture, and the facts, which are written last."""
        place = {**self.entities, "space": SPACE, "res": f"{self.steps.resolution:g}", "desc": "brain"}
        brain, mask = (self.out / image_path({**place, "suffix": suffix}) for suffix in ("T1w", "mask"))
        stem = brain.name.removesuffix(".nii.gz")
        return {
            "brain": brain,
            "mask": mask,
            "transform": brain.with_name(f"{self.name}_from-T1w_to-{SPACE}_mode-image_xfm.txt"),
            "picture": brain.parent.with_name("figures") / f"{stem}.jpg",
            "facts": brain.with_name(f"{stem}.json"),
        }

    def read_facts(self) -> dict[str, Any] | None:
        """Return the facts if this head was done with these steps from an identical file."""
        facts = read_json(self.files["facts"])
        try:
            key = {"settings_hash": _settings_hash(self.steps), "input_hash": _file_hash(self.source)}
            same = all(facts[name] == value for name, value in key.items())
        except (InputError, KeyError, TypeError):
            return None
        return facts if same and all(path.is_file() for path in self.files.values()) else None


@dataclass(frozen=True)
class Outcome:
    """The result for a folder: facts and pictures by head, and the reason of each failure."""

    facts: dict[str, dict[str, Any]]
    pictures: dict[str, Path]
    failed: dict[str, str]


def preprocess_folder(
    folder: str | Path,
    out: str | Path,
    steps: Steps | None = None,
    *,
    participants: pd.DataFrame | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    **entities: Any,
) -> Outcome:
    """Preprocess the T1-weighted images of a BIDS folder into a BIDS derivative.

    Parameters
    ----------
    folder, out
        The BIDS folder to read and the one to write.
    steps
        Default: all, at 2 mm.
    participants
        The table of :func:`~equipool.data.presets.read_adni` or :func:`~equipool.data.presets.read_adcp`,
        where the folder is not in BIDS. It is written beside the brains: as ``participants.tsv``, or where
        participants have several visits, as ``people.tsv`` with the paths.
    jobs
        Heads at a time, each on one thread; default: one for each core, or for each worker of a cluster
        (:func:`equipool.parallel.cluster`), all of which need the same paths of both folders.
    fresh
        Do heads again that were done with the same steps from the same files.
    **entities
        A selection of images, as in :func:`equipool.data.bids.find_images`.
    """
    steps = steps or Steps()
    require_extra(steps)
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs must be at least 1; got {jobs}.")
    folder, out = Path(folder), Path(out)
    heads = find_heads(folder, out, steps, participants=participants, **entities)
    facts = {head.name: earlier for head in heads if not fresh and (earlier := head.read_facts())}
    todo = [head for head in heads if head.name not in facts]
    if facts:
        say(f"{len(facts)} of {len(heads)} heads are there already")
    _describe(folder, out, heads, participants)
    failed: dict[str, str] = {}
    progress = Progress("Heads", len(todo))
    with _swept(heads):
        results = fan_out(preprocess_one, ((head,) for head in todo), jobs=jobs)
        for done, (head, result) in enumerate(results, start=1):
            if isinstance(result, str):
                failed[head.name] = result
            else:
                facts[head.name] = result
            remaining = duration(progress.remaining(done))
            say(f"[{done}/{len(todo)}] {head.name}: {_summary(result)}; about {remaining} left")
    complete = [head for head in heads if head.name in facts]
    return Outcome(
        {head.name: facts[head.name] for head in complete},
        {head.name: head.files["picture"] for head in complete},
        dict(sorted(failed.items())),
    )


def find_heads(
    folder: Path, out: Path, steps: Steps, *, participants: pd.DataFrame | None = None, **entities: Any
) -> list[Head]:
    """Return the heads of a BIDS folder, or of a table with their paths, with the names of their results."""
    if folder.resolve() == out.resolve():
        raise InputError(f"{out} is the folder that is read; write to another one.")
    if participants is None:
        paths = list(find_images(folder, **entities)["path"])
        of_result = {"space", "res", "desc", "suffix"}
        named = [{k: v for k, v in parse_name(path).items() if k not in of_result} for path in paths]
    else:
        paths, named = list(participants["path"]), _entities_of_table(participants)
    by_name: dict[str, Head] = {}
    for path, entities in zip(paths, named, strict=True):
        # Absolute paths: a worker of a cluster may have been started in another folder.
        head = Head(entities, path.absolute(), out.absolute(), steps)
        other = by_name.setdefault(head.name, head)
        if other is not head:
            raise InputError(
                f"{head.source} and {other.source} would both become {head.name}; choose one by a part of "
                "its name, such as --desc."
            )
    return list(by_name.values())


def _entities_of_table(participants: pd.DataFrame) -> list[dict[str, str]]:
    """Return BIDS entities of heads; visits are labelled by the first column that is unique, or numbered."""
    labels = participants["participant_id"].map(as_label)
    if labels.is_unique:
        return [{"sub": label} for label in labels]
    visits = participants.groupby(labels.to_numpy()).cumcount().add(1).astype(str)
    for column in ("visit", "image_id"):
        if column in participants:
            names = participants[column].map(as_label)
            if not pd.concat([labels, names], axis=1).duplicated().any() and (names != "").all():
                visits = names
                break
    return [{"sub": label, "ses": visit} for label, visit in zip(labels, visits, strict=True)]


def preprocess_one(head: Head) -> tuple[Head, dict[str, Any] | str]:
    """Preprocess one head and write it; return its facts, or the reason of its failure."""
    try:
        start = time.perf_counter()
        input_hash = _file_hash(head.source)
        brain = preprocess_head(*read_head(head.source), head.steps)
        _write(head, brain)
        facts = {
            "Sources": [head.source.name],
            "SpatialReference": SPACE,
            "SkullStripped": True,
            "Resolution": f"{head.steps.resolution:g} mm",
            "settings": asdict(head.steps),
            "settings_hash": _settings_hash(head.steps),
            "input_hash": input_hash,
            "quality": {name: round(value, 5) for name, value in brain.quality.items()},
            "seconds": {**brain.seconds, "all": round(time.perf_counter() - start, 3)},
            "versions": _versions(),
        }
        write_json(head.files["facts"], facts)
        return head, facts
    except EquipoolError as error:
        return head, str(error)
    except Exception as error:  # a library's failure on one image must not stop the others
        return head, f"{type(error).__name__}: {first_line(error)}"


def seconds_per_head(facts: Iterable[dict[str, Any]]) -> float:
    """Return the median time of heads done before, by default :data:`USUAL_SECONDS`."""
    seconds = [one["seconds"]["all"] for one in facts]
    return float(np.median(seconds)) if seconds else USUAL_SECONDS


def _write(head: Head, brain: Brain) -> None:
    files = head.files
    files["facts"].unlink(missing_ok=True)
    write_volume(files["brain"], brain.image, brain.grid, mni=True)
    write_volume(files["mask"], brain.mask, brain.grid, mni=True)
    rows = (" ".join(f"{number:.9g}" for number in row) for row in brain.to_head)
    write_whole(files["transform"], "\n".join(rows) + "\n")
    mni = template(head.steps.resolution).mask
    write_whole(files["picture"], mosaic(brain.head, brain.mask, mni, brain.grid))


def _describe(folder: Path, out: Path, heads: list[Head], participants: pd.DataFrame | None) -> None:
    """Write the description of the derivative and its participants."""
    source = read_json(folder / "dataset_description.json")
    name = source.get("Name") if isinstance(source, dict) else None
    write_description(out, f"{name or folder.resolve().name}: brains in {SPACE}", "preprocess")
    table = folder / "participants.tsv"
    if table.is_file():
        write_whole(out / "participants.tsv", table.read_bytes())
    if participants is None:
        return
    listed = participants.drop(columns=["path", "participant_id"]).reset_index(drop=True)
    listed.insert(0, "participant_id", [f"sub-{head.entities['sub']}" for head in heads])
    visits = listed["participant_id"].duplicated().any()
    if visits:
        listed.insert(1, "path", [str(head.files["brain"].relative_to(head.out)) for head in heads])
    write_table(out / ("people.tsv" if visits else "participants.tsv"), listed, missing="n/a")


@contextmanager
def _swept(heads: list[Head]) -> Iterator[None]:
    """Delete the temporary files of workers that were stopped while writing."""
    try:
        yield
    finally:
        for folder in {path.parent for head in heads for path in head.files.values()}:
            for partial in folder.glob(".sub-*"):
                with suppress(OSError):
                    partial.unlink()


def _settings_hash(steps: Steps) -> str:
    return hashlib.sha256(json.dumps({"chain": CHAIN, **asdict(steps)}).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error


def _versions() -> dict[str, str]:
    versions = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _summary(result: dict[str, Any] | str) -> str:
    if isinstance(result, str):
        return f"FAILED: {result}"
    correlation, seconds = result["quality"]["correlation"], result["seconds"]["all"]
    return f"correlation with the template {correlation:.2f}, {seconds:.0f} s"
