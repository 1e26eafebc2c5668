"""Simulated scans of several scanners with known truth: a BIDS folder to try methods on.

Brains are the MNI152 tissue maps, deformed, aged, and thinned by Alzheimer's disease. A scanner changes them
by its contrast, blur, gamma, bias field, noise and gain, each with small random deviations from scan to scan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.stats import truncnorm
from torch import Tensor
from torch.nn.functional import avg_pool3d, grid_sample, interpolate

from equipool.data.bids import image_path, write_description
from equipool.data.nifti import CORNER, mni_grid, write_volume
from equipool.data.tables import write_table
from equipool.exceptions import InputError
from equipool.files import packaged

FloatArray = NDArray[np.float64]
Volume = NDArray[np.float32]

BRAINS_VERSION = 1  # raise it when a simulated brain changes: cached cohorts are then simulated again
CLEAN_CONTRAST = (62.0, 100.0, 18.0)  # grey matter, white matter, fluid
WAVES = [(i, j, k) for i in range(3) for j in range(3) for k in range(3) if 0 < i + j + k <= 3]
AFFECTED, UNAFFECTED = 0.10, 0.01  # bounds of the effect of the disease, relative to the strongest
TABLES = packaged("simulate", "brains.toml")


@dataclass(frozen=True)
class Scanner:
    """The effects of a scanner, before the deviations of single scans."""

    name: str
    contrast: tuple[float, float, float] = CLEAN_CONTRAST  # of grey matter, white matter, fluid
    gamma: float = 1.0  # exponent on intensities relative to white matter
    blur: float = 1.0  # standard deviation in mm
    noise: float = 0.02  # as a share of white matter
    gain: float = 1.0
    bias: float = 0.06  # size of the bias field (logarithmic)


@dataclass(frozen=True)
class Cohort:
    """Numbers of patients and controls of each scanner, ages, and the overlap of the scanners' ages."""

    scanners: tuple[Scanner, ...]
    patients: tuple[int, ...]
    controls: tuple[int, ...]
    ages: tuple[float, float] = (50.0, 95.0)
    mean_age: float = 74.0
    age_sd: float = 9.0
    overlap: float = 0.95


def _cohort(scanners: dict[str, Any], **numbers: Any) -> Cohort:
    """Return a cohort as its table in ``brains.toml`` describes it."""
    numbers = {name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()}
    made = (Scanner(name, **{**one, "contrast": tuple(one["contrast"])}) for name, one in scanners.items())
    return Cohort(tuple(made), **numbers)


COHORTS = {name: _cohort(**table) for name, table in TABLES["cohorts"].items()}


class Anatomy:
    """The template and its displacement fields, on a grid with voxels of ``resolution`` mm.

    From 3 mm on, brains are made at half the voxel size and averaged, for partial volumes at tissue borders.
    """

    def __init__(self, resolution: float = 4.0) -> None:
        if not 1 <= resolution <= 8:
            raise InputError(f"resolution must lie between 1 and 8 mm. Got {resolution}.")
        self.shape, self.affine = mni_grid(resolution)
        self.finer = 2 if resolution >= 3 else 1
        self.step = resolution / self.finer
        self.fine = tuple(n * self.finer for n in self.shape)
        self.corner = np.array(CORNER) - (self.finer - 1) * self.step / 2
        tissues, self.source_corner, self.source_step = _tissues(self.finer if self.step >= 2 else 1)
        self.tissues = torch.from_numpy(tissues)
        axes = [torch.arange(n) * self.step + c for n, c in zip(self.fine, self.corner, strict=True)]
        self.points = torch.stack(torch.meshgrid(*axes, indexing="ij"))
        template = self._sample(self.points)
        self.mask = avg_pool3d(template[None], self.finer)[0].sum(dim=0).numpy() > 0.5
        # Maps of ventricular growth, of widening sulci and of the disease's atrophy.
        x, y, z = self.points
        csf = template[2] * (template.sum(dim=0) > 0.9)
        deep = torch.exp(-((x / 24) ** 2 + ((y + 8) / 40) ** 2 + ((z - 12) / 18) ** 2))
        ventricles = self._smooth(csf * (deep > 0.37), 4.0)
        self.push = self._gradient(ventricles / ventricles.max())
        self.sulci = 0.35 + self._smooth(csf * (deep < 0.2), 5.0).clamp_max(0.5) * 1.5
        self.disease = torch.zeros_like(x)
        for region in TABLES["disease"].values():
            cx, cy, cz = region["centre"]
            for side in (-1, 1):
                squared = (x - side * cx) ** 2 + (y - cy) ** 2 + (z - cz) ** 2
                self.disease += region["strength"] * torch.exp(-squared / (2 * region["width"] ** 2))
        self.disease.clamp_max_(1.0)
        self.horns = self._gradient(self._smooth(self.disease * (csf > 0.3), 4.0))

    def brain(self, seed: tuple[int, ...], age: float, atrophy: float = 0.0, size: float = 0.0) -> Tensor:
        """Return the shares of grey matter, white matter and fluid of one brain, (3, x, y, z).

        The seed determines its shape; ``age`` is the brain age. ``atrophy`` is 0 for a healthy participant,
        about 1 for one with Alzheimer's disease; ``size`` the share by which the head exceeds the template's.
        """
        rng = np.random.default_rng(seed)
        displacement = torch.zeros_like(self.points)
        for each in TABLES["deformations"]:
            draws = torch.from_numpy(rng.normal(0, each["size"], (1, 3, *each["knots"])).astype(np.float32))
            displacement += interpolate(draws, size=self.fine, mode="trilinear", align_corners=True)[0]
        displacement -= size * (self.points - self.points.mean(dim=(1, 2, 3), keepdim=True))
        years = (age - 50.0) / 45.0
        moved = self.points + displacement
        moved = moved + (0.3 + 3.2 * years + 0.7 * atrophy) * self.push + atrophy * self.horns
        grey, white, fluid = self._sample(moved)
        loss = 0.32 * years * self.sulci + 0.26 * atrophy * self.disease
        lost = grey * loss.clamp(0, 0.9)
        return avg_pool3d(torch.stack([grey - lost, white, fluid + lost])[None], self.finer)[0]

    def _sample(self, points: Tensor) -> Tensor:
        """Return the tissues at points (3, …) in mm."""
        corner = torch.tensor(self.source_corner, dtype=torch.float32).view(3, 1, 1, 1)
        size = torch.tensor(self.tissues.shape[1:], dtype=torch.float32).view(3, 1, 1, 1)
        unit = 2 * (points - corner) / self.source_step / (size - 1) - 1
        grid = unit.flip(0).permute(1, 2, 3, 0)[None]  # grid_sample counts z, y, x
        return grid_sample(self.tissues[None], grid, mode="bilinear", align_corners=True)[0]

    def _smooth(self, volume: Tensor, width: float) -> Tensor:
        """Return a volume smoothed by a Gaussian of a width (standard deviation) in mm."""
        return torch.from_numpy(gaussian_filter(volume.numpy(), width / self.step))

    def _gradient(self, volume: Tensor) -> Tensor:
        """Return the gradient, scaled to a greatest length of 1."""
        field = torch.stack(torch.gradient(volume))
        return field / field.norm(dim=0).max().clamp_min(1e-12)


@cache
def _tissues(average: int) -> tuple[NDArray[np.float32], FloatArray, float]:
    """Return grey matter, white matter and fluid of the template, their corner and voxel size in mm."""
    from nilearn import datasets

    head = datasets.load_mni152_template(resolution=1)
    grey, white = (
        np.asarray(load(resolution=1).dataobj, dtype=np.float32)
        for load in (datasets.load_mni152_gm_template, datasets.load_mni152_wm_template)
    )
    inside = np.asarray(head.dataobj) > 0.05
    grey, white = np.clip(grey, 0, 1) * inside, np.clip(white, 0, 1) * inside
    total = np.maximum(grey + white, 1.0)
    grey, white = grey / total, white / total
    maps = np.stack([grey, white, inside - grey - white]).astype(np.float32)
    corner = head.affine[:3, 3].astype(np.float64)
    x, y, z = (n // average * average for n in maps.shape[1:])
    cut = maps[:, :x, :y, :z].reshape(3, x // average, average, y // average, average, z // average, average)
    return cut.mean(axis=(2, 4, 6)), corner + (average - 1) / 2, float(average)


@dataclass(frozen=True, eq=False)
class SimulatedBrains:
    """A simulated cohort: its table, and scans, clean volumes and true effects, computed on demand."""

    cohort: Cohort
    people: pd.DataFrame  # participant_id, site, age, sex, dx
    anatomy: Anatomy  # grid, mask and template
    seed: int
    hidden: pd.DataFrame = field(repr=False)  # site index, brain-age gap, atrophy, head size

    def __len__(self) -> int:
        return len(self.people)

    def tissues(self, participant: int, *, age: float | None = None, atrophy: float | None = None) -> Tensor:
        """Return the tissues of a participant's brain (3, x, y, z), at another age or atrophy if given."""
        row = self.hidden.iloc[participant]
        age = self.people["age"].iloc[participant] if age is None else age
        atrophy = row["atrophy"] if atrophy is None else atrophy
        seed = self.seed, 1, participant
        return self.anatomy.brain(seed, age + row["brain_age_gap"], atrophy, row["size"])

    def clean(self, participant: int, **changes: float) -> Volume:
        """Return a participant's volume without scanner effects."""
        return _contrasted(self.tissues(participant, **changes), CLEAN_CONTRAST)

    def scan(self, participant: int) -> Volume:
        """Return a participant's volume as measured by the scanner of their site."""
        return self.both(participant)[0]

    def both(self, participant: int) -> tuple[Volume, Volume]:
        """Return a participant's scan and clean volume."""
        tissues = self.tissues(participant)
        scanner = self.cohort.scanners[int(self.hidden["site"].iloc[participant])]
        return self.image(tissues, scanner, participant), _contrasted(tissues, CLEAN_CONTRAST)

    def image(self, tissues: Tensor, scanner: Scanner, participant: int | None = None) -> Volume:
        """Return a scanner's scan of a brain; without a participant, free of noise and deviations."""
        rng = np.random.default_rng(0 if participant is None else (self.seed, 2, participant))
        vary = 0.0 if participant is None else 1.0
        contrast = tuple(c * (1 + vary * 0.01 * rng.normal()) for c in scanner.contrast)
        step = float(self.anatomy.affine[0, 0])
        volume = gaussian_filter(_contrasted(tissues, contrast), scanner.blur / step)
        volume = 100 * (np.maximum(volume, 0) / 100) ** (scanner.gamma * (1 + vary * 0.01 * rng.normal()))
        jitter = vary * 0.25 * scanner.bias * rng.normal(size=len(WAVES)) / np.sqrt(len(WAVES))
        volume = volume * self.bias_field(scanner, jitter)
        noise = vary * 100 * scanner.noise * rng.normal(size=(2, *volume.shape))
        volume = np.hypot(volume + noise[0], noise[1])
        inside = tissues.sum(dim=0).numpy() > 0.02
        gain = 5.0 * scanner.gain * np.exp(vary * 0.05 * rng.normal())
        return (gain * volume * inside).astype(np.float32)

    def bias_field(self, scanner: Scanner, jitter: FloatArray | float = 0.0) -> FloatArray:
        """Return a scanner's multiplicative bias field: a sum of slow cosines over the box, exponentiated."""
        names = [one.name for one in self.cohort.scanners]
        rng = np.random.default_rng((self.seed, 3, names.index(scanner.name)))
        weights = scanner.bias * rng.normal(size=len(WAVES)) / np.sqrt(len(WAVES)) * 1.5 + jitter
        axes = [np.cos(np.pi * np.outer(range(3), (np.arange(n) + 0.5) / n)) for n in self.anatomy.shape]
        waves = (np.einsum("x,y,z->xyz", axes[0][i], axes[1][j], axes[2][k]) for i, j, k in WAVES)
        return np.exp(sum(w * wave for w, wave in zip(weights, waves, strict=True)))

    def site_effect(self, scanner: Scanner) -> Volume:
        """Return the difference of a scanner's noise-free scan of one brain from its clean volume."""
        tissues = self.anatomy.brain((self.seed, 1, 0), self.cohort.mean_age)
        return self.image(tissues, scanner) - _contrasted(tissues, CLEAN_CONTRAST)

    @cached_property
    def disease_effect(self) -> Volume:
        """The mean effect of the disease on a clean volume, over twelve participants."""
        return self._mean_change(lambda k: self.clean(k, atrophy=1.0) - self.clean(k, atrophy=0.0))

    @cached_property
    def age_effect(self) -> Volume:
        """The mean change of a clean volume in ten years, from 65 to 75, over twelve participants."""
        return self._mean_change(lambda k: self.clean(k, age=75.0) - self.clean(k, age=65.0))

    def affected(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the voxels that the disease changes, and those that it does not, (x, y, z) each.

        Voxels with a change between 1 % and 10 % of the strongest are neither.
        """
        share = np.abs(self.disease_effect) / np.abs(self.disease_effect).max()
        return (share > AFFECTED) & self.anatomy.mask, (share < UNAFFECTED) & self.anatomy.mask

    def _mean_change(self, change: Callable[[int], Volume]) -> Volume:
        some = np.linspace(0, len(self) - 1, min(12, len(self))).astype(int)
        return np.mean([change(int(k)) for k in some], axis=0, dtype=np.float32)

    def write(self, out: Path, *, jobs: int = 1) -> Iterator[int]:
        """Write the BIDS folder with its truth, scan by scan; yield the number of scans written.

        ``participants.tsv`` is written last: a folder that has it is complete.
        """
        truth = out / "derivatives" / "truth"
        affected, unaffected = self.affected()
        maps: dict[str, Any] = {
            "mask": self.anatomy.mask,
            "disease_effect": self.disease_effect,
            "age_effect_10_years": self.age_effect,
            "affected": affected,
            "unaffected": unaffected,
            **{f"site-{scanner.name}_field": self.bias_field(scanner) for scanner in self.cohort.scanners},
            **{f"site-{scanner.name}_effect": self.site_effect(scanner) for scanner in self.cohort.scanners},
        }
        for name, volume in maps.items():
            write_volume(truth / f"{name}.nii.gz", volume, self.anatomy.affine, mni=True)
        write_table(truth / "traits.tsv", pd.concat([self.people["participant_id"], self.hidden], axis=1))
        # Threads: torch and numpy release the interpreter's lock, and the template is not copied.
        parallel = Parallel(n_jobs=jobs, prefer="threads", return_as="generator_unordered")
        tasks = (delayed(self._write_participant)(out, k) for k in range(len(self)))
        yield from (done for done, _ in enumerate(parallel(tasks), start=1))
        write_description(out, "Simulated brains of equipool", "simulate", License="CC0")
        write_table(out / "participants.tsv", self.people)

    def _write_participant(self, out: Path, participant: int) -> None:
        label = self.people["participant_id"].iloc[participant].removeprefix("sub-")
        entities = {"sub": label, "space": "MNI152NLin2009cAsym", "res": f"{self.anatomy.affine[0, 0]:g}"}
        folders = {"brain": out, "clean": out / "derivatives" / "truth"}
        for (desc, folder), volume in zip(folders.items(), self.both(participant), strict=True):
            path = image_path({**entities, "desc": desc, "suffix": "T1w"})
            write_volume(folder / path, volume, self.anatomy.affine, mni=True)


def simulate_brains(
    like: str | Cohort = "adni",
    *,
    overlap: float | None = None,
    resolution: float = 4.0,
    random_state: int = 0,
) -> SimulatedBrains:
    """Simulate a cohort of brains from several scanners.

    Parameters
    ----------
    like
        ``"adni"`` or ``"adcp"`` for the paper's scanners and sample counts, or a :class:`Cohort`.
    overlap
        Of the scanners' ages, from 0 (none) to 1; default: the cohort's.
    resolution
        Voxel size in mm.
    random_state
        The same number gives the same participants and scans.
    """
    if isinstance(like, str) and like not in COHORTS:
        raise InputError(f"There is no cohort {like!r}; there are {', '.join(COHORTS)}.")
    cohort = COHORTS[like] if isinstance(like, str) else like
    overlap = cohort.overlap if overlap is None else overlap
    if not 0 <= overlap <= 1:
        raise InputError(f"overlap must lie between 0 and 1. Got {overlap}.")
    people, hidden = _draw_people(cohort, overlap, random_state)
    return SimulatedBrains(cohort, people, Anatomy(resolution), random_state, hidden)


def custom_cohort(people: Sequence[int], patients: Sequence[int] | None = None) -> Cohort:
    """Return a cohort of several sites with invented scanners.

    Each site has ``people`` participants, of whom ``patients`` are ill (default: two fifths).

    Examples
    --------
    >>> cohort = custom_cohort([10, 20], [5, 5])
    >>> [scanner.name for scanner in cohort.scanners], cohort.patients, cohort.controls
    (['site1', 'site2'], (5, 5), (5, 15))
    """
    ill = [round(0.4 * n) for n in people] if patients is None else list(patients)
    if len(ill) != len(people):
        what = f"There are {len(people)} sites with participants, {len(ill)} with patients"
        raise InputError(f"{what}; give both for each.")
    for k, (n, m) in enumerate(zip(people, ill, strict=True), start=1):
        if not 0 <= m <= n or n < 1:
            what = f"site{k} cannot have {m} patients among {n} participants"
            raise InputError(f"{what}; give fewer patients, or more participants.")
    # Scanners within the range of the three manufacturers; the same number gives the same one.
    least = np.array([60.0, 15.0, 0.93, 1.0, 0.02, 0.7, 0.06])  # grey matter, fluid, gamma, …, bias
    reach = np.array([6.0, 7.0, 0.19, 0.8, 0.01, 0.9, 0.04])
    scanners = []
    for k in range(len(people)):
        grey, fluid, *others = least + reach * np.random.default_rng((4, k)).random(7)
        scanners.append(Scanner(f"site{k + 1}", (grey, 100.0, fluid), *others))
    healthy = tuple(n - m for n, m in zip(people, ill, strict=True))
    return Cohort(tuple(scanners), tuple(ill), healthy)


def _draw_people(cohort: Cohort, overlap: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Draw the participants' table, and the variables that are not in it (``SimulatedBrains.hidden``).

    Ages are normally distributed within their range; each site has its window of the quantiles.
    """
    rng = np.random.default_rng((seed, 0))
    counts = list(zip(cohort.patients, cohort.controls, strict=True))
    site = np.repeat(np.arange(len(counts)), [sum(pair) for pair in counts])
    ill = np.concatenate([np.arange(sum(pair)) < pair[0] for pair in counts])
    low, high = ((end - cohort.mean_age) / cohort.age_sd for end in cohort.ages)
    start, width = (1 - overlap) * site / len(counts), (1 - overlap) / len(counts) + overlap
    quantiles = start + width * rng.random(len(site))
    age = truncnorm.ppf(quantiles, low, high, loc=cohort.mean_age, scale=cohort.age_sd)
    order = rng.permutation(len(site))
    site, ill, age = site[order], ill[order], age[order]
    n, names = len(site), np.array([scanner.name for scanner in cohort.scanners], dtype=object)
    people = pd.DataFrame(
        {
            "participant_id": [f"sub-{k + 1:04d}" for k in range(n)],
            "site": names[site],
            "age": age.round(1),
            "sex": np.where(rng.random(n) < 0.5, "F", "M"),
            "dx": np.where(ill, "AD", "CN"),
        }
    )
    # Some controls have incipient atrophy, and patients differ in theirs.
    atrophy = np.where(ill, rng.gamma(3.0, 1 / 3.0, n), rng.exponential(0.15, n))
    size = rng.normal(0, 0.02, n) + np.where(people["sex"] == "M", 0.015, -0.015)
    hidden = pd.DataFrame(
        {"site": site, "brain_age_gap": rng.normal(0, 4.0, n), "atrophy": atrophy, "size": size}
    )
    return people, hidden


def _contrasted(tissues: Tensor, contrast: tuple[float, ...]) -> Volume:
    return np.tensordot(np.asarray(contrast, dtype=np.float32), tissues.numpy(), axes=1)
