"""Preprocess every head of a BIDS folder: in parallel, resumable, one bad image does not stop the others."""

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.data.bids import as_label, find_images, format_name, image_path, parse_name, write_description
from equipool.data.nifti import write_volume
from equipool.data.tables import write_table
from equipool.exceptions import EquipoolError, InputError, first_line
from equipool.files import file_sha256, read_json, write_json, write_whole
from equipool.parallel import fan_out
from equipool.preprocess.heads import (
    SPACE,
    Brain,
    Steps,
    mosaic,
    preprocess_head,
    read_head,
    require_extra,
    template,
)
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

    @property
    def settings_hash(self) -> str:
        """The hash of the steps."""
        return hashlib.sha256(json.dumps({"chain": CHAIN, **asdict(self.steps)}).encode()).hexdigest()

    def read_facts(self) -> dict[str, Any] | None:
        """Return the facts if this head was done with these steps from an identical file."""
        facts = read_json(self.files["facts"])
        with suppress(OSError, KeyError, TypeError):
            same = facts["settings_hash"] == self.settings_hash
            if same and facts["input_hash"] == file_sha256(self.source):
                return facts if all(path.is_file() for path in self.files.values()) else None
        return None


def preprocess_folder(
    folder: Path,
    out: Path,
    steps: Steps,
    *,
    participants: pd.DataFrame | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    **entities: Any,
) -> tuple[dict[str, dict[str, Any]], dict[str, Path], dict[str, str]]:
    """Preprocess the T1-weighted images of a BIDS folder into a BIDS derivative.

    Returns facts and pictures by head, and the reason of each failure. ``participants`` is the table of
    :func:`~equipool.data.presets.read_adni` or ``read_adcp``, where the folder is not in BIDS; it is written
    beside the brains: as ``participants.tsv``, or where participants have several visits, as ``people.tsv``
    with the paths. Heads are done on one thread each, ``jobs`` at a time (:func:`equipool.parallel.fan_out`;
    workers of a cluster need the same paths of both folders). With ``fresh``, heads are done again that were
    done with the same steps from the same files. ``entities`` select images, as in
    :func:`equipool.data.bids.find_images`.
    """
    require_extra(steps)
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs must be at least 1; got {jobs}.")
    heads = find_heads(folder, out, steps, participants=participants, **entities)
    facts = {head.name: earlier for head in heads if not fresh and (earlier := head.read_facts())}
    todo = [head for head in heads if head.name not in facts]
    if facts:
        say(f"{len(facts)} of {len(heads)} heads are there already")
    _describe(folder, out, heads, participants)
    failed: dict[str, str] = {}
    progress = Progress("Heads", len(todo))
    try:
        results = fan_out(preprocess_one, ((head,) for head in todo), jobs=jobs)
        for done, (head, result) in enumerate(results, start=1):
            if isinstance(result, str):
                failed[head.name], text = result, f"FAILED: {result}"
            else:
                facts[head.name] = result
                correlation, seconds = result["quality"]["correlation"], result["seconds"]["all"]
                text = f"correlation with the template {correlation:.2f}, {seconds:.0f} s"
            remaining = duration(progress.remaining(done))
            say(f"[{done}/{len(todo)}] {head.name}: {text}; about {remaining} left")
    finally:
        for partial in out.glob("sub-*/**/.sub-*"):  # of workers that were stopped while writing
            with suppress(OSError):
                partial.unlink()
    complete = {head.name: head for head in heads if head.name in facts}
    pictures = {name: head.files["picture"] for name, head in complete.items()}
    return {name: facts[name] for name in complete}, pictures, dict(sorted(failed.items()))


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
            what = f"{head.source} and {other.source} would both become {head.name}"
            raise InputError(f"{what}; choose one by a part of its name, such as --desc.")
    return list(by_name.values())


def _entities_of_table(participants: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return BIDS entities of heads; visits are labelled by the first column that is unique, or numbered."""
    table = pd.DataFrame({"sub": participants["participant_id"].map(as_label)})
    if table["sub"].is_unique:
        return table.to_dict("records")
    for column in [name for name in ("visit", "image_id") if name in participants]:
        table["ses"] = participants[column].map(as_label)
        if not table.duplicated().any() and (table["ses"] != "").all():
            return table.to_dict("records")
    table["ses"] = table.groupby("sub").cumcount().add(1).astype(str)
    return table.to_dict("records")


def preprocess_one(head: Head) -> tuple[Head, dict[str, Any] | str]:
    """Preprocess one head and write it; return its facts, or the reason of its failure."""
    try:
        start = time.perf_counter()
        image = read_head(head.source)
        input_hash = file_sha256(head.source)
        brain = preprocess_head(*image, head.steps)
        _write(head, brain)
        versions = dict.fromkeys(PACKAGES, "not installed")
        for package in PACKAGES:
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        facts = {
            "Sources": [head.source.name],
            "SpatialReference": SPACE,
            "SkullStripped": True,
            "Resolution": f"{head.steps.resolution:g} mm",
            "settings": asdict(head.steps),
            "settings_hash": head.settings_hash,
            "input_hash": input_hash,
            "quality": {name: round(value, 5) for name, value in brain.quality.items()},
            "seconds": {**brain.seconds, "all": round(time.perf_counter() - start, 3)},
            "versions": versions,
        }
        write_json(head.files["facts"], facts)
        return head, facts
    except Exception as error:  # a library's failure on one image must not stop the others
        known = isinstance(error, EquipoolError)
        return head, str(error) if known else f"{type(error).__name__}: {first_line(error)}"


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
