"""Preprocess every head of a BIDS folder: in parallel, resumable, one bad image does not stop the others."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.data.bids import find_images
from equipool.exceptions import EquipoolError, InputError
from equipool.files import write_whole
from equipool.parallel import fan_out
from equipool.preprocess.heads import (
    SPACE,
    Brain,
    Steps,
    preprocess_head,
    read_head,
    require_extra,
    template,
)
from equipool.preprocess.mosaic import mosaic
from equipool.progress import duration, say

__all__ = ["Head", "Outcome", "find_heads", "preprocess_folder", "preprocess_one", "seconds_per_head"]

CHAIN = 1  # raised when the same settings begin to give other volumes
PACKAGES = "equipool SimpleITK deepbet picsl-greedy nibabel nilearn numpy scipy torch".split()
OURS = {"space", "res", "desc"}  # parts of a name that the result has its own of
USUAL_SECONDS = 20.0  # a head on one core, before there is one of this folder to go by


@dataclass(frozen=True)
class Head:
    """One image to preprocess, and the names of what becomes of it."""

    name: str
    source: Path
    out: Path
    steps: Steps

    @property
    def folder(self) -> Path:
        """Where the volumes go."""
        parts = [part for part in self.name.split("_") if part.startswith(("sub-", "ses-"))]
        return self.out.joinpath(*parts[:2], "anat")

    def path(self, ending: str) -> Path:
        """Return a file of this head in MNI space, such as ``desc-brain_T1w.nii.gz``."""
        return self.folder / f"{self.name}_space-{SPACE}_res-{self.steps.resolution:g}_{ending}"

    @property
    def brain(self) -> Path:
        """The brain."""
        return self.path("desc-brain_T1w.nii.gz")

    @property
    def facts(self) -> Path:
        """What was done and measured; written last, so that a head with facts is complete."""
        return self.path("desc-brain_T1w.json")

    @property
    def mask(self) -> Path:
        """Where the brain is."""
        return self.path("desc-brain_mask.nii.gz")

    @property
    def transform(self) -> Path:
        """The affine."""
        return self.folder / f"{self.name}_from-T1w_to-{SPACE}_mode-image_xfm.txt"

    @property
    def picture(self) -> Path:
        """The mosaic of the page for quality control."""
        return self.folder.with_name("figures") / f"{self.brain.name.removesuffix('.nii.gz')}.jpg"

    def read_facts(self) -> dict[str, Any] | None:
        """Return the facts if this head was done with these steps from this very file."""
        try:
            facts: dict[str, Any] = json.loads(self.facts.read_text(encoding="utf-8"))
            asked = {"settings_hash": _settings_hash(self.steps), "input_hash": _file_hash(self.source)}
            same = all(facts[key] == value for key, value in asked.items())
        except (OSError, ValueError, KeyError):  # InputError is a ValueError
            return None
        whole = all(path.is_file() for path in (self.brain, self.mask, self.transform, self.picture))
        return facts if same and whole else None


@dataclass(frozen=True)
class Outcome:
    """What became of a folder: facts by head, pictures by head, and the reason of each that failed."""

    facts: dict[str, dict[str, Any]]
    pictures: dict[str, Path]
    failed: dict[str, str]


def preprocess_folder(
    folder: str | Path,
    out: str | Path,
    steps: Steps | None = None,
    *,
    people: pd.DataFrame | None = None,
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
        What to do with each head; default: everything, at 2 mm.
    people
        What :func:`~equipool.data.presets.read_adni` or :func:`~equipool.data.presets.read_adcp` found in the
        folder, where it is no BIDS folder. They are written beside the brains: ``participants.tsv``, or where
        people have several visits, ``people.tsv`` with a path for each.
    jobs
        Heads at a time, each on one thread; default: one for each core, or for each worker of a cluster
        (:func:`equipool.parallel.cluster`), all of which see both folders under the same names.
    fresh
        Do heads again that were done with the same steps from the same files.
    **entities
        Which images to take, as in :func:`equipool.data.bids.find_images`.
    """
    steps = steps or Steps()
    require_extra(steps)
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs must be at least 1; got {jobs}.")
    heads = find_heads(folder, out, steps, people=people, **entities)
    facts = {head.name: found for head in heads if not fresh and (found := head.read_facts())}
    todo = [head for head in heads if head.name not in facts]
    if facts:
        say(f"{len(facts)} of {len(heads)} heads are there already")
    _describe(Path(folder), Path(out))
    if people is not None:
        _write_people(people, heads, Path(out))
    failed: dict[str, str] = {}
    start = time.perf_counter()
    with _swept(heads):
        results = fan_out(preprocess_one, ((head,) for head in todo), jobs=jobs)
        for done, (head, result) in enumerate(results, start=1):
            if isinstance(result, str):
                failed[head.name] = result
            else:
                facts[head.name] = result
            left = (time.perf_counter() - start) / done * (len(todo) - done)
            say(f"[{done}/{len(todo)}] {head.name}: {_summary(result)}; about {duration(left)} left")
    whole = [head for head in heads if head.name in facts]
    return Outcome(
        {head.name: facts[head.name] for head in whole},
        {head.name: head.picture for head in whole},
        {name: failed[name] for name in sorted(failed)},
    )


def find_heads(
    folder: str | Path, out: str | Path, steps: Steps, *, people: pd.DataFrame | None = None, **entities: Any
) -> list[Head]:
    """Return the heads of a BIDS folder, or of people whose images are known, with names of their results."""
    folder, out = Path(folder), Path(out)
    if folder.resolve() == out.resolve():
        raise InputError(f"{out} is the folder that is read; write to another one.")
    # Whole paths: a worker of a cluster may have been started in another folder.
    if people is None:
        named = [(_name(path), path) for path in find_images(folder, **entities)["path"]]
    else:
        named = list(zip(_names(people), people["path"], strict=True))
    heads = [Head(name, path.absolute(), out.absolute(), steps) for name, path in named]
    by_name: dict[str, Head] = {}
    for head in heads:
        if head.name in by_name:
            raise InputError(
                f"{head.source} and {by_name[head.name].source} would both become {head.name}; "
                "choose one by a part of its name, such as --desc."
            )
        by_name[head.name] = head
    return heads


def preprocess_one(head: Head) -> tuple[Head, dict[str, Any] | str]:
    """Preprocess one head and write it; return its facts, or the reason why there are none."""
    try:
        start = time.perf_counter()
        input_hash = _file_hash(head.source)
        brain = preprocess_head(*read_head(head.source), head.steps)
        facts = _facts(head, brain, input_hash)
        _write(head, brain)
        facts["seconds"]["all"] = round(time.perf_counter() - start, 3)
        write_whole(head.facts, json.dumps(facts, indent=2, ensure_ascii=False))
        return head, facts
    except EquipoolError as error:
        return head, str(error)
    except Exception as error:  # a library's own failure on one image must not stop the others
        return head, f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"


def seconds_per_head(facts: Iterable[dict[str, Any]]) -> float:
    """Return the median time of heads done before, or what is usual."""
    known = [found["seconds"]["all"] for found in facts]
    return float(np.median(known)) if known else USUAL_SECONDS


def _write(head: Head, brain: Brain) -> None:
    # The facts are written after all these: without them a head counts as not done.
    with suppress(FileNotFoundError):
        head.facts.unlink()
    write_whole(head.brain, _nifti(brain.image, brain.grid))
    write_whole(head.mask, _nifti(brain.mask.astype(np.uint8), brain.grid))
    rows = (" ".join(f"{number:.9g}" for number in row) for row in brain.to_head)
    write_whole(head.transform, "\n".join(rows) + "\n")
    write_whole(
        head.picture, mosaic(brain.head, brain.mask, template(head.steps.resolution).mask, brain.grid)
    )


def _facts(head: Head, brain: Brain, input_hash: str) -> dict[str, Any]:
    return {
        "Sources": [head.source.name],
        "SpatialReference": SPACE,
        "SkullStripped": True,
        "Resolution": f"{head.steps.resolution:g} mm",
        "settings": asdict(head.steps),
        "settings_hash": _settings_hash(head.steps),
        "input_hash": input_hash,
        "quality": {name: round(value, 5) for name, value in brain.quality.items()},
        "seconds": dict(brain.seconds),
        "versions": _versions(),
    }


def _describe(folder: Path, out: Path) -> None:
    """Make the result a BIDS derivative of its own."""
    source = {}
    with suppress(OSError, ValueError):
        source = json.loads((folder / "dataset_description.json").read_text(encoding="utf-8"))
    name = source.get("Name", folder.resolve().name) if isinstance(source, dict) else folder.resolve().name
    description = {
        "Name": f"{name}: brains in {SPACE}",
        "BIDSVersion": "1.9.0",
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": "equipool preprocess", "Version": _versions()["equipool"]}],
    }
    write_whole(out / "dataset_description.json", json.dumps(description, indent=2, ensure_ascii=False))
    people = folder / "participants.tsv"
    if people.is_file():
        write_whole(out / "participants.tsv", people.read_bytes())


def _names(people: pd.DataFrame) -> list[str]:
    """Name heads as BIDS has them; visits by what tells them apart, or else by their order."""
    ids = "sub-" + people["participant_id"].astype(str).map(_label)
    if ids.is_unique:
        return list(ids)
    visits = people.groupby(ids.to_numpy()).cumcount().add(1).astype(str)
    for column in ("visit", "image_id"):
        if column in people:
            told = people[column].astype(str).map(_label)
            if not pd.concat([ids, told], axis=1).duplicated().any() and (told != "").all():
                visits = told
                break
    return [f"{who}_ses-{visit}" for who, visit in zip(ids, visits, strict=True)]


def _label(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", text)


def _write_people(people: pd.DataFrame, heads: list[Head], out: Path) -> None:
    ids = [head.name.split("_")[0] for head in heads]
    table = people.drop(columns=["path", "participant_id"]).reset_index(drop=True)
    table.insert(0, "participant_id", ids)
    name = "participants.tsv"
    if len(set(ids)) < len(ids):
        name = "people.tsv"
        table.insert(1, "path", [str(head.brain.relative_to(head.out)) for head in heads])
    write_whole(out / name, table.to_csv(sep="\t", index=False, na_rep="n/a", lineterminator="\n"))


@contextmanager
def _swept(heads: list[Head]) -> Iterator[None]:
    """Take away what workers that were stopped in the middle of a file left under temporary names."""
    try:
        yield
    finally:
        for folder in {place for head in heads for place in (head.folder, head.picture.parent)}:
            for partial in folder.glob(".sub-*"):
                with suppress(OSError):
                    partial.unlink()


def _name(path: Path) -> str:
    """Return the parts of a file name that say whose image it is: ``sub-1_ses-2_run-1``."""
    parts = re.sub(r"\.nii(\.gz)?$", "", path.name).split("_")[:-1]
    return "_".join(part for part in parts if part.split("-")[0] not in OURS)


def _nifti(values: Any, affine: Any) -> bytes:
    import nibabel

    image: Any = nibabel.Nifti1Image(values, affine)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code="mni")
    image.set_qform(affine, code="mni")
    return gzip.compress(image.to_bytes(), compresslevel=6, mtime=0)  # the same head gives the same bytes


def _settings_hash(steps: Steps) -> str:
    return hashlib.sha256(json.dumps({"chain": CHAIN, **asdict(steps)}).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _summary(result: dict[str, Any] | str) -> str:
    if isinstance(result, str):
        return f"FAILED: {result}"
    correlation, seconds = result["quality"]["correlation"], result["seconds"]["all"]
    return f"correlation with the template {correlation:.2f}, {seconds:.0f} s"
