"""NIfTI files: read on one grid, with every file that cannot be used named at once; and written."""

from __future__ import annotations

import gzip
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import listed, plural
from equipool.exceptions import EquipoolWarning, InputError, first_line
from equipool.files import write_whole
from equipool.progress import counted

FloatArray = NDArray[np.float32]
Mask = NDArray[np.bool_]
Each = Callable[[int, FloatArray], None]

SHOWN = 100  # files that an error names before it only counts the rest
TOLERANCE = 1e-3  # mm: affines that differ by less are the same
MAX_VOXELS = 2**31
MAX_DEFLATE = 1032  # gzip cannot shrink by more, so a header that claims more is wrong
REGIONS = 10  # along each axis, to see changes in
UNLIKE = 1000.0  # times brighter or darker than the others: probably another unit or scaling
LEVEL = 3  # of compression
MNI = 4  # NIfTI's code of MNI space
CORNER, EXTENT = (-90.0, -126.0, -72.0), (180.0, 216.0, 180.0)  # mm: the paper's box, 91 × 109 × 91 at 2 mm


class Frame(NamedTuple):
    """The grid of an image: voxels along each axis, and the affine from voxels to mm."""

    shape: tuple[int, int, int]
    affine: NDArray[np.float64]

    @property
    def orientation(self) -> str:
        """The directions of the axes, such as RAS."""
        import nibabel

        return "".join(map(str, nibabel.aff2axcodes(self.affine)))

    @property
    def sizes(self) -> NDArray[np.float64]:
        """The edges of a voxel in mm."""
        return np.linalg.norm(self.affine[:3, :3], axis=0)


class ReadMask(NamedTuple):
    """The voxels of a mask, (x, y, z), and the affine of its file; an array has none."""

    inside: Mask
    affine: NDArray[np.float64] | None


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid that all images share, and what was counted on it."""

    shape: tuple[int, int, int]
    affine: NDArray[np.float64]
    present: NDArray[np.int32]  # in how many images each voxel is finite and not zero
    brightness: tuple[float, ...]  # of each image, the median magnitude of the voxels that are not zero

    def __str__(self) -> str:
        """Return "40 × 48 × 40 voxels of 4 × 4 × 4 mm, RAS"."""
        frame = Frame(self.shape, self.affine)
        return f"{_times(self.shape)} voxels of {_times(frame.sizes.round(3))} mm, {frame.orientation}"


def check_volumes(
    paths: Iterable[str | Path],
    *,
    mask: ArrayLike | str | Path | ReadMask | None = None,
    jobs: int = 1,
    progress: bool = False,
    each: Each | None = None,
) -> Grid:
    """Read every image once and raise one error that names all files that cannot be pooled with the rest.

    Checked are: that the file is there, whole and a NIfTI; that it is one three-dimensional volume of
    plausible size in mm; that shape, affine and orientation are those of most files; that values are finite
    (within the mask, if one is given) and not constant. Intensities 1 000 times those of the others give
    an :class:`~equipool.exceptions.EquipoolWarning`. No more than a few images are in memory at a time.

    Parameters
    ----------
    paths
        The files, ``.nii`` or ``.nii.gz``.
    mask
        The voxels that count, as an array (x, y, z) or a NIfTI file; values elsewhere may be anything.
    jobs
        How many files to read at a time.
    progress
        Whether to show progress on the terminal.
    each
        Called with the position and the values (x, y, z) of every image, in order.
    """
    files = tuple(map(Path, paths))
    if not files:
        raise InputError("No images were given; give at least one NIfTI file.")
    if jobs < 1:
        raise InputError(f"jobs must be at least 1. Got {jobs}.")
    headers, problems = _read_headers(files)
    shape, affine = _majority(headers, problems, files)
    inside, mask_affine = (None, None) if mask is None else read_mask(mask)
    if inside is not None and inside.shape != shape:
        raise InputError(
            f"The mask has {_times(inside.shape)} voxels, the images have {_times(shape)}; resample it."
        )
    if mask_affine is not None and not _same(mask_affine, affine):
        raise InputError("The affine of the mask is not that of the images; resample it to their grid.")
    usable = [k for k in range(len(files)) if k not in problems]
    images = _in_order(lambda k: _read_checked(files[k], shape, inside), usable, jobs)
    present = np.zeros(shape, dtype=np.int32)
    brightness: dict[int, float] = {}
    for k, values in zip(usable, counted(images, "Images", len(usable)) if progress else images, strict=True):
        if isinstance(values, str):
            problems[k] = values
            continue
        nonzero = np.isfinite(values) & (values != 0)
        present += nonzero
        brightness[k] = float(np.median(np.abs(values[nonzero if inside is None else nonzero & inside])))
        if each is not None and not problems:
            each(k, values)
    _raise_problems(files, problems)
    _warn_of_brightness(files, brightness)
    return Grid(shape, affine, present, tuple(brightness.values()))


def region_means(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the means over boxes, ten along each axis; values that are not finite count as 0."""
    total = np.nan_to_num(values, posinf=0.0, neginf=0.0).astype(np.float64)
    for axis in range(3):
        length = total.shape[axis]
        starts = np.unique(np.linspace(0, length, min(REGIONS, length), endpoint=False).astype(int))
        sizes = np.diff(np.append(starts, length))
        total = np.add.reduceat(total, starts, axis=axis)
        total /= sizes.reshape([-1 if k == axis else 1 for k in range(3)])
    return total.ravel()


def mni_grid(resolution: float) -> tuple[tuple[int, int, int], NDArray[np.float64]]:
    """Return shape and affine (RAS) of the standard MNI152 box at a voxel size in mm.

    Examples
    --------
    >>> mni_grid(2)[0], mni_grid(4)[0]
    ((91, 109, 91), (46, 55, 46))
    """
    x, y, z = (int(extent / resolution + 1e-6) + 1 for extent in EXTENT)
    affine = np.diag([resolution, resolution, resolution, 1.0])
    affine[:3, 3] = CORNER
    return (x, y, z), affine


def read_grid(path: Path) -> Frame | None:
    """Return shape and affine of an image; ``None`` where its header cannot be used."""
    header = _read_header(path)
    return None if isinstance(header, str) else header


def read_volume(path: Path) -> FloatArray:
    """Return the values of one image, (x, y, z)."""
    values = np.asarray(_load(path).dataobj, dtype=np.float32)
    return values.reshape(values.shape[:3])


def read_mask(mask: ArrayLike | str | Path | ReadMask) -> ReadMask:
    """Return a mask from an array (x, y, z) or a NIfTI file, with the file's affine."""
    if isinstance(mask, ReadMask):
        return mask
    affine, name = None, ""
    if isinstance(mask, str | Path):
        path, name = Path(mask), f" {mask}"
        header = _read_header(path)
        if isinstance(header, str):
            raise InputError(f"The mask {path} {header}; give a NIfTI file on the grid of the images.")
        values = _read_checked(path, header.shape, None, may_be_constant=True)
        if isinstance(values, str):
            raise InputError(f"The mask {path} {values}; give one with ones in the brain.")
        mask, affine = values, header.affine
    inside = np.ascontiguousarray(np.asarray(mask) > 0)
    if inside.ndim != 3:
        raise InputError(f"A mask has three axes. Got shape {inside.shape}.")
    if not inside.any():
        raise InputError(f"The mask{name} is empty; it must hold at least one voxel that is not 0.")
    return ReadMask(inside, affine)


def write_volume(
    path: str | Path, values: ArrayLike, like: Any, *, mni: bool = False, intent: Sequence[Any] = ()
) -> Path:
    """Write a NIfTI file of float32, or of bytes for a mask; the same values give the same bytes.

    Parameters
    ----------
    path
        The new file, ``.nii`` or ``.nii.gz``; it appears whole or not at all.
    values
        (x, y, z).
    like
        The image (a path or a nibabel image) whose affine, its codes, units and description are kept; it is
        never overwritten. Or an affine (4, 4) to mm, for a new image.
    mni
        Whether the affine leads to MNI space; the header then records it.
    intent
        What the values are, as nibabel's ``set_intent`` takes it: ``("t test", (degrees_of_freedom,))``.
    """
    import nibabel

    path, data = Path(path), np.asarray(values)
    data = data.astype(np.uint8 if data.dtype == bool else np.float32)
    if not path.name.endswith((".nii", ".nii.gz")):
        raise InputError(f"{path} is no name for a NIfTI file; let it end in .nii or .nii.gz.")
    if isinstance(like, str | Path):
        if path.exists() and path.samefile(like):
            raise InputError(f"{path} is the image that was read; write the new one elsewhere.")
        like = _load(Path(like))
    if not hasattr(like, "header"):
        like = nibabel.Nifti1Image(data, np.asarray(like, dtype=np.float64))
        like.header.set_xyzt_units("mm")
    if data.shape != like.shape[:3]:
        raise InputError(
            f"The values have {_times(data.shape)} voxels, {path.name} needs {_times(like.shape[:3])}."
        )
    header = like.header.copy()
    header.set_data_dtype(data.dtype)
    kind: Any = nibabel.Nifti2Image if isinstance(like, nibabel.Nifti2Image) else nibabel.Nifti1Image
    image = kind(data, like.affine, header)
    image.header.set_slope_inter(1.0, 0.0)
    if mni:
        image.set_sform(like.affine, code=MNI)
        image.set_qform(like.affine, code=MNI)
    if intent:
        image.header.set_intent(*intent)
    content = image.to_bytes()
    return write_whole(path, gzip.compress(content, LEVEL, mtime=0) if path.suffix == ".gz" else content)


def _load(path: Path) -> Any:
    import nibabel

    return nibabel.load(path)


def _read_headers(paths: Sequence[Path]) -> tuple[dict[int, Frame], dict[int, str]]:
    """Return the headers that can be used, and what is wrong with the rest, by position."""
    headers: dict[int, Frame] = {}
    problems: dict[int, str] = {}
    first: dict[Path, int] = {}
    for k, path in enumerate(paths):
        before = first.setdefault(path.resolve(), k)
        header = _read_header(path) if before == k else f"is given twice, in rows {before + 1} and {k + 1}"
        if isinstance(header, str):
            problems[k] = header
        else:
            headers[k] = header
    return headers, problems


def _read_header(path: Path) -> Frame | str:
    """Return the header, or what is wrong with it or with the file."""
    import nibabel

    if path.is_dir():
        return "is a folder, not an image"
    if not path.is_file():
        return (
            "is a link to a file that is not here (datalad get?)" if path.is_symlink() else "does not exist"
        )
    try:
        image = _load(path)
        if not isinstance(image, nibabel.Nifti1Image):
            return "is not a NIfTI file"
        return _checked_header(image, path.stat().st_size, packed=path.suffix == ".gz")
    except nibabel.filebasedimages.ImageFileError:
        return "is not a NIfTI file, or broken at its beginning"
    except Exception as error:  # whatever the reader meets in a damaged file
        return f"cannot be read as NIfTI ({first_line(error)})"


def _checked_header(image: Any, file_size: int, *, packed: bool) -> Frame | str:
    sizes, kind = [int(size) for size in image.shape], image.header.get_data_dtype()
    if kind.kind not in "iufb":
        return f"holds values of the kind {kind}, not plain numbers"
    if len(sizes) < 3 or any(size != 1 for size in sizes[3:]) or min(sizes) < 1:
        return f"has the shape {_times(sizes)}, not one three-dimensional volume"
    room = file_size * MAX_DEFLATE if packed else file_size - int(image.dataobj.offset)
    if math.prod(sizes) > MAX_VOXELS or math.prod(sizes) * kind.itemsize > room:
        return (
            f"claims {_times(sizes)} voxels, more than its {plural(file_size, 'byte')} can hold; is it whole?"
        )
    affine = np.asarray(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
        return "has an affine that is not a place in space"
    unit = image.header.get_xyzt_units()[0]
    if unit not in ("mm", "unknown"):
        return f"is in units of {unit}, not mm"
    return Frame((sizes[0], sizes[1], sizes[2]), affine)


def _majority(headers: Mapping[int, Frame], problems: dict[int, str], paths: Sequence[Path]) -> Frame:
    """Return the shape and affine of most images, and note the others as problems."""
    if not headers:
        _raise_problems(paths, problems)
    total = plural(len(headers), "file")
    shape, count = Counter(header.shape for header in headers.values()).most_common(1)[0]
    alike: dict[int, list[int]] = {}  # positions of the images with one affine, by the first of them
    for k, header in headers.items():
        if header.shape != shape:
            expected = f"expected {_times(shape)} as in {count} of {total}"
            problems[k] = f"has {_times(header.shape)} voxels, {expected}"
        else:
            first = next((f for f in alike if _same(header.affine, headers[f].affine)), k)
            alike.setdefault(first, []).append(k)
    most = max(alike, key=lambda first: len(alike[first]))
    for first in alike.keys() - {most}:
        difference = _affine_difference(headers[first], headers[most])
        problems |= dict.fromkeys(alike[first], f"{difference} as in {len(alike[most])} of {total}")
    return headers[most]


def _same(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    return bool(np.abs(one - other).max() <= TOLERANCE)


def _affine_difference(header: Frame, usual: Frame) -> str:
    if header.orientation != usual.orientation:
        return f"has the orientation {header.orientation} against {usual.orientation}"
    if not _same(header.sizes, usual.sizes):
        return f"has voxels of {_times(header.sizes)} mm, expected {_times(usual.sizes)} mm"
    if not _same(header.affine[:3, :3], usual.affine[:3, :3]):
        return "is rotated against the affine"
    shift = np.linalg.norm(header.affine[:3, 3] - usual.affine[:3, 3])
    return f"is shifted by {shift:.3g} mm against the affine"


def _read_checked(
    path: Path, shape: tuple[int, ...], mask: Mask | None, *, may_be_constant: bool = False
) -> FloatArray | str:
    """Return the values, or what is wrong with them."""
    try:
        with np.errstate(over="ignore"):  # a number beyond float32 is named as infinite below
            values = read_volume(path)
    except Exception as error:  # whatever the reader meets in a damaged file
        return f"cannot be read to its end ({first_line(error)}); is it whole?"
    if values.shape != shape:
        return "has changed while it was read"
    within = values if mask is None else values[mask]
    finite = np.isfinite(within)
    if not finite.all():
        where = "; give a mask without them" if mask is None else " within the mask"
        return f"is NaN or infinite in {plural(int((~finite).sum()), 'voxel')}{where}"
    low, high = within.min(), within.max()
    if low == high and not may_be_constant:
        return "is 0 everywhere" if low == 0 else f"is constant ({low:g} everywhere)"
    return values


def _in_order(
    function: Callable[[int], FloatArray | str], items: Sequence[int], jobs: int
) -> Iterator[FloatArray | str]:
    """Apply a function in threads, a few items at a time, so that memory does not grow with their number."""
    size = 1 if jobs == 1 else 2 * jobs
    with ThreadPoolExecutor(jobs) as pool:
        for start in range(0, len(items), size):
            yield from pool.map(function, items[start : start + size])


def _warn_of_brightness(paths: Sequence[Path], brightness: Mapping[int, float]) -> None:
    usual = float(np.median(list(brightness.values())))
    odd = [paths[k] for k, value in brightness.items() if not usual / UNLIKE <= value <= usual * UNLIKE]
    if odd:
        warnings.warn(
            f"The intensities of {listed(odd, shown=SHOWN)} are more than {UNLIKE:g} times above or below "
            "those of the other images; were they scaled differently?",
            EquipoolWarning,
            stacklevel=2,
        )


def _raise_problems(paths: Sequence[Path], problems: Mapping[int, str]) -> None:
    if not problems:
        return
    lines = [f"{paths[k]} {problems[k]}" for k in sorted(problems)]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN} more"]
    raise InputError(
        f"{len(problems)} of {plural(len(paths), 'image')} cannot be used; repair them or leave them out:\n  "
        + "\n  ".join(lines)
    )


def _times(sizes: Iterable[Any]) -> str:
    return " × ".join(f"{size:g}" for size in sizes)
