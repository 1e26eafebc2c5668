"""Volumes: images × brain voxels of one grid, read once from NIfTI files into a memory-mapped cache."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import joblib
import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import plural, rows_text
from equipool.data.nifti import Frame, check_volumes, fitting_mask, read_mask, read_volume, write_volume
from equipool.data.pooled import PooledDataset
from equipool.exceptions import EquipoolError, InputError
from equipool.files import cache_folder, read_json, write_json

FloatArray = NDArray[np.float32]
Mask = NDArray[np.bool_]
Rows = Any  # positions, a mask or a slice

SCHEMA = 2  # raised when the same files are cached otherwise
LEVELS = 65534  # steps between the least and the greatest value of an image; int16 has one more for rounding
CHANGED = "Some images changed while they were read; try again when nothing writes to them."
AT_ONCE = 16  # volumes in memory, for means over blocks
BLOCK_SIZE, BLOCK_VOXELS = 4, 8  # voxels along an axis of a block; fewest brain voxels that make one
VALUES, SCALES, MASK, FACTS = "values.i16", "scales.npy", "mask.npy", "facts.json"


@dataclass(frozen=True, eq=False, repr=False)
class Volumes:
    """Brain voxels of several images on one grid; ``volumes[rows]`` selects images without reading them.

    Make one with :meth:`build` from files or :meth:`from_array` from memory.

    Examples
    --------
    >>> images = np.arange(24.0).reshape(2, 3, 2, 2)
    >>> volumes = Volumes.from_array(images, np.eye(4), mask=images[0] > 3)
    >>> volumes
    Volumes: 2 images, 8 of 3 × 2 × 2 voxels
    >>> volumes[[1]].read().tolist()
    [[16.0, 17.0, 18.0, 19.0, 20.0, 21.0, 22.0, 23.0]]
    >>> volumes.unmask(volumes.read()).shape
    (2, 3, 2, 2)
    """

    mask: Mask  #: (x, y, z): which voxels of the grid are kept, in C order
    affine: NDArray[np.float64]  #: (4, 4): from voxels to mm
    paths: tuple[Path, ...]  #: where each image came from; empty for arrays
    store: NDArray[Any] = field(repr=False)  # all int16 or float32 values; selections share it
    rows: NDArray[np.intp] = field(repr=False)  # the images of this selection, as rows of the store
    scales: NDArray[np.float32] | None = field(repr=False)  # (images, 2): value = scale · q + offset

    ndim = 2

    def __post_init__(self) -> None:
        for array in (self.mask, self.affine, self.rows):
            array.setflags(write=False)

    @classmethod
    def from_array(
        cls, data: ArrayLike, affine: ArrayLike, mask: ArrayLike | str | Path | None = None
    ) -> Self:
        """Take images (n, x, y, z) that are in memory; without a mask, as for :meth:`build`."""
        images = np.asarray(data, dtype=np.float32)
        if images.ndim != 4 or 0 in images.shape:
            raise InputError(f"Images in memory have the axes (images, x, y, z). Got shape {images.shape}.")
        if mask is None:
            inside = _derived_mask((np.isfinite(images) & (images != 0)).sum(axis=0), len(images))
        else:
            x, y, z = images.shape[1:]
            inside = fitting_mask(mask, Frame((x, y, z), np.array(affine, dtype=np.float64)))
        values = images[:, inside]
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            raise InputError(f"Images are NaN or infinite within the mask in {rows_text(bad.tolist())}.")
        rows = np.arange(len(images))
        return cls(inside, np.array(affine, dtype=np.float64), (), values, rows, None)

    @classmethod
    def build(
        cls,
        paths: Iterable[str | Path],
        *,
        mask: ArrayLike | str | Path | None = None,
        cache: str | Path | None = None,
        jobs: int = 1,
        progress: bool = False,
    ) -> Self:
        """Check NIfTI files and read them once into the cache; later calls open the cache.

        Values are kept as 16-bit numbers with a scale for each image: exact for whole numbers that span no
        more than 65 534, else to 1e-5 of the image's range. A file that changed is noticed, and the cache
        built anew.

        Parameters
        ----------
        paths
            One ``.nii`` or ``.nii.gz`` file an image, all on one grid; see :func:`check_volumes`.
        mask
            Voxels to keep: an array (x, y, z) or a NIfTI file on the same grid. By default those that are
            not zero in at least half of the images.
        cache
            Folder that holds caches; by default ``images`` in :func:`equipool.files.cache_folder`.
        jobs, progress
            How many files to read at a time, and whether to show progress on the terminal.
        """
        files = tuple(Path(path) for path in paths)
        chosen = None if mask is None else read_mask(mask)
        key = joblib.hash((SCHEMA, [os.path.abspath(path) for path in files], tuple(chosen or ())))
        folder = Path(cache or cache_folder() / "images") / key
        volumes = cls._open(folder, files)
        if volumes is None:
            try:
                _build_cache(folder, files, chosen, jobs=jobs, progress=progress)
            except OSError as error:
                what = f"The cache {folder} could not be written: {error.strerror or error}"
                remedy = "Make room, or name another folder in the environment variable EQUIPOOL_CACHE"
                raise EquipoolError(f"{what}. {remedy}.") from error
            volumes = cls._open(folder, files)
        if volumes is None:
            raise EquipoolError(CHANGED)
        return volumes

    @classmethod
    def _open(cls, folder: Path, files: tuple[Path, ...]) -> Self | None:
        """Open a cache; ``None`` where there is none, it is not whole, or an image has changed."""
        try:
            facts = read_json(folder / FACTS)
            if facts["files"] != _stamps(files):
                return None
            mask, scales = (np.load(folder / name, allow_pickle=False) for name in (MASK, SCALES))
            shape = len(files), int(mask.sum())
            store = np.memmap(folder / VALUES, dtype=np.int16, mode="r", shape=shape)
            affine = np.array(facts["affine"], dtype=np.float64)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            return None
        return cls(mask, affine, files, store, np.arange(len(files)), scales)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        grid = " × ".join(str(size) for size in self.mask.shape)
        return f"Volumes: {plural(len(self), 'image')}, {self.shape[1]} of {grid} voxels"

    @property
    def shape(self) -> tuple[int, int]:
        """Images and voxels."""
        return len(self.rows), int(self.store.shape[1])

    def __getitem__(self, rows: Rows) -> Self:
        """Select images by a mask, positions or a slice; nothing is read."""
        positions = np.arange(len(self))[rows]
        if positions.ndim != 1:
            raise InputError("Select images with a mask, positions or a slice, not a single number.")
        paths = tuple(self.paths[k] for k in positions) if self.paths else ()
        return replace(self, rows=self.rows[positions], paths=paths)

    def read(self, rows: Rows = None) -> FloatArray:
        """Return the values of some images of this selection (default: all), (images, voxels)."""
        chosen = self.rows if rows is None else np.atleast_1d(self.rows[rows])
        return self._numbers(np.take(self.store, chosen, axis=0), chosen)

    def blocks(self, size: int = 64) -> Iterator[FloatArray]:
        """Yield all values in order, ``size`` images at a time."""
        for start in range(0, len(self), size):
            yield self.read(slice(start, start + size))

    def columns(self, start: int, stop: int) -> FloatArray:
        """Return the values of some voxels in all images, (images, stop − start)."""
        return self._numbers(self.store[:, start:stop][self.rows], self.rows)

    def _numbers(self, stored: NDArray[Any], rows: NDArray[np.intp]) -> FloatArray:
        values = np.array(stored, dtype=np.float32)
        if self.scales is not None:
            values *= self.scales[rows, :1]
            values += self.scales[rows, 1:]
        return values

    def unmask(self, values: ArrayLike, fill: float = 0.0) -> FloatArray:
        """Put voxels back in their places: (n, voxels) → (n, x, y, z), (voxels,) → (x, y, z)."""
        given = np.asarray(values, dtype=np.float32)
        if given.ndim not in (1, 2) or given.shape[-1] != self.shape[1]:
            raise InputError(f"Expected {self.shape[1]} voxels on the last axis. Got shape {given.shape}.")
        images = np.full((*given.shape[:-1], *self.mask.shape), fill, dtype=np.float32)
        images[..., self.mask] = given
        return images

    def with_values(self, values: ArrayLike) -> Self:
        """Return the same images with other values (images, voxels), in memory."""
        given = np.asarray(values, dtype=np.float32)
        if given.shape != self.shape:
            raise InputError(f"Expected values of shape {self.shape}. Got {given.shape}.")
        return replace(self, store=given, rows=np.arange(len(given)), scales=None)

    def write(self, values: ArrayLike, index: int, path: str | Path) -> Path:
        """Write the voxels (voxels,) of one image as NIfTI with the header of that image.

        Outside of the mask the values are those of the original; no image of this selection is ever
        overwritten. Volumes from arrays are written with 0 outside of the mask.
        """
        path = Path(path)
        if path.exists() and any(path.samefile(source) for source in self.paths if source.exists()):
            raise InputError(f"{path} is one of the images that were read; write the new one elsewhere.")
        image = self.unmask(values)
        if not self.paths:
            return write_volume(path, image, self.affine)
        source = self.paths[index]
        if not source.is_file():
            raise InputError(f"{source} is not there any more; its header is needed to write {path.name}.")
        return write_volume(path, np.where(self.mask, image, read_volume(source)), source)


def _stamps(files: tuple[Path, ...]) -> list[list[Any]]:
    """Return path, size and date of the files, by which a change is noticed."""
    stats = {path: path.stat() for path in files if path.exists()}
    return [[os.path.abspath(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()]


def _build_cache(folder: Path, files: tuple[Path, ...], mask: Any, *, jobs: int, progress: bool) -> None:
    """Fill a new folder and rename it at the end, so that no half of a cache is ever taken for one."""
    inside: Mask | None = None if mask is None else mask.inside
    scales, stamps = np.zeros((len(files), 2), dtype=np.float32), _stamps(files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    options: Any = {"prefix": f".{folder.name}.", "dir": folder.parent, "ignore_cleanup_errors": True}
    with tempfile.TemporaryDirectory(**options) as work:
        new = Path(work) / "new"
        new.mkdir()
        with (new / VALUES).open("wb") as stream:

            def keep(k: int, image: FloatArray) -> None:
                quantised, scales[k] = _quantised(image.ravel() if inside is None else image[inside])
                stream.write(quantised.tobytes())

            grid = check_volumes(files, mask=mask, jobs=jobs, progress=progress, each=keep)
        if inside is None:
            inside = _derived_mask(grid.present, len(files))
            with (new / VALUES).open("rb") as whole, (new / "compact").open("wb") as compact:
                for _ in files:  # the mask's voxels, one image at a time
                    compact.write(np.fromfile(whole, np.int16, inside.size)[inside.ravel()].tobytes())
            (new / "compact").replace(new / VALUES)
        np.save(new / SCALES, scales, allow_pickle=False)
        np.save(new / MASK, inside, allow_pickle=False)
        if _stamps(files) != stamps:
            raise EquipoolError(CHANGED)
        write_json(new / FACTS, {"affine": grid.affine.tolist(), "files": stamps})
        with suppress(FileNotFoundError):
            folder.rename(Path(work) / "old")  # a cache of images that have changed
        new.rename(folder)


def _quantised(values: FloatArray) -> tuple[NDArray[np.int16], tuple[np.float32, np.float32]]:
    """Return 16-bit numbers with their scale and offset: value = scale · q + offset.

    Zero comes back as exactly zero, since background and constant voxels are recognised by it.
    """
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.zeros(values.shape, dtype=np.int16), (np.float32(1), np.float32(low))
    whole = high - low <= LEVELS and bool((values == np.rint(values)).all())
    scale = np.float32(1.0 if whole else max((high - low) / LEVELS, float(np.finfo(np.float32).tiny)))
    lowest = np.float32(-(LEVELS // 2))
    offset = np.float32(low - float(scale) * float(lowest))
    if low <= 0 <= high:  # rounded as in reading, so that the two cancel
        offset = -(scale * np.float32(np.rint(-low / scale) + lowest))
    steps = np.rint((values.astype(np.float64) - float(offset)) / float(scale))
    limits = np.iinfo(np.int16)
    return np.clip(steps, limits.min, limits.max).astype(np.int16), (scale, offset)


def _derived_mask(present: NDArray[Any], images: int) -> Mask:
    mask: Mask = 2 * present >= images
    if not mask.any():
        raise InputError("No voxel is nonzero in half of the images; are they aligned? Else give a mask.")
    return mask


# -- means over blocks of the brain, made a few volumes at a time ------------------------------------------


def means_of_volumes(volumes: Volumes, pool: PooledDataset, harmonizer: Any = None) -> NDArray[np.float64]:
    """Return block means of all volumes, (rows, blocks): as measured, or by a fitted ImageHarmonizer."""
    means, covariates = [], pool.labelled_covariates
    for start in range(0, len(volumes), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        part = volumes[rows]
        if harmonizer is not None:
            part = harmonizer.transform(part, site=pool.site_labels[rows], covariates=covariates.iloc[rows])
        means.append(block_means(part.read(), volumes.mask))
    return np.vstack(means)


def block_means(values: NDArray[np.floating], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return means over blocks of the box that hold enough of the brain, (rows, blocks)."""
    _, block = np.unique(np.argwhere(mask) // BLOCK_SIZE, axis=0, return_inverse=True)
    counts = np.bincount(block)
    means = np.stack([np.bincount(block, weights=row, minlength=len(counts)) for row in values]) / counts
    return means[:, counts >= BLOCK_VOXELS]


def block_size(volumes: Volumes) -> str:
    """Return the edge lengths of a block in mm."""
    edges = np.linalg.norm(volumes.affine[:3, :3], axis=0) * BLOCK_SIZE
    return " × ".join(f"{edge:.3g}" for edge in edges) + " mm"


def block_names(volumes: Volumes) -> list[str]:
    """Return where the centre of each block is, in mm."""
    mm = np.argwhere(volumes.mask) @ volumes.affine[:3, :3].T + volumes.affine[:3, 3]
    return [
        "block at {:.0f} {:.0f} {:.0f} mm".format(*place).replace("-", "−")
        for place in block_means(mm.T, volumes.mask).T
    ]
