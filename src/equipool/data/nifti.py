"""NIfTI files: read on one grid, with every file that cannot be used named at once; and written."""

import gzip
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nibabel
import numpy as np
from nibabel.affines import voxel_sizes
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


@dataclass(frozen=True, eq=False)
class Frame:
    """The grid of an image: voxels along each axis, and the affine from voxels to mm."""

    shape: tuple[int, int, int]
    affine: NDArray[np.float64]

    def __str__(self) -> str:
        """Return "40 × 48 × 40 voxels of 4 × 4 × 4 mm, RAS"."""
        sizes, axes = voxel_sizes(self.affine).round(3), nibabel.aff2axcodes(self.affine)
        return f"{_times(self.shape)} voxels of {_times(sizes)} mm, {''.join(map(str, axes))}"


class ReadMask(NamedTuple):
    """The voxels of a mask, (x, y, z), and the affine of its file; an array has none."""

    inside: Mask
    affine: NDArray[np.float64] | None


@dataclass(frozen=True, eq=False)
class Grid(Frame):
    """The grid that all images share, and what was counted on it."""

    present: NDArray[np.int32]  # in how many images each voxel is finite and not zero
    brightness: tuple[float, ...]  # of each image, the median magnitude of the voxels that are not zero


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
    jobs, progress
        How many files to read at a time, and whether to show progress on the terminal.
    each
        Called with the position and the values (x, y, z) of every image, in order.
    """
    files = tuple(map(Path, paths))
    if not files or jobs < 1:
        jobs_wrong = f"jobs must be at least 1. Got {jobs}."
        raise InputError(jobs_wrong if files else "No images were given; give at least one NIfTI file.")
    frame, problems = _common_grid(files)
    inside = None if mask is None else fitting_mask(mask, frame)
    usable = [k for k in range(len(files)) if k not in problems]
    present = np.zeros(frame.shape, dtype=np.int32)
    brightness: dict[int, float] = {}
    with ThreadPoolExecutor(jobs) as pool:
        # A few at a time, so that memory does not grow with their number.
        batches = (usable[start : start + 2 * jobs] for start in range(0, len(usable), 2 * jobs))
        read = partial(_read_checked, shape=frame.shape, mask=inside)
        images = (image for batch in batches for image in pool.map(read, (files[k] for k in batch)))
        positions = counted(usable, "Images", len(usable)) if progress else usable
        for k, values in zip(positions, images, strict=True):
            if isinstance(values, str):
                problems[k] = values
                continue
            nonzero = np.isfinite(values) & (values != 0)
            present += nonzero
            brightness[k] = float(np.median(np.abs(values[nonzero if inside is None else nonzero & inside])))
            if each is not None and not problems:
                each(k, values)
    _raise_problems(files, problems)
    usual = float(np.median(list(brightness.values())))
    odd = [files[k] for k, value in brightness.items() if not usual / UNLIKE <= value <= usual * UNLIKE]
    if odd:
        what = f"The intensities of {listed(odd, shown=SHOWN)} are more than {UNLIKE:g} times above or below"
        text = f"{what} those of the other images; were they scaled differently?"
        warnings.warn(text, EquipoolWarning, stacklevel=2)
    return Grid(frame.shape, frame.affine, present, tuple(brightness.values()))


def region_means(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the means over boxes, ten along each axis; values that are not finite count as 0."""
    import torch  # here, since tables need none of it

    finite = torch.from_numpy(np.nan_to_num(values, posinf=0.0, neginf=0.0).astype(np.float64))
    x, y, z = (min(REGIONS, length) for length in values.shape)
    return torch.nn.functional.adaptive_avg_pool3d(finite[None], (x, y, z)).numpy().ravel()


def mni_grid(resolution: float) -> tuple[tuple[int, int, int], NDArray[np.float64]]:
    """Return shape and affine (RAS) of the standard MNI152 box at a voxel size in mm."""
    x, y, z = (int(extent / resolution + 1e-6) + 1 for extent in EXTENT)
    affine = np.diag([resolution, resolution, resolution, 1.0])
    affine[:3, 3] = CORNER
    return (x, y, z), affine


def read_volume(path: Path) -> FloatArray:
    """Return the values of one image, (x, y, z)."""
    image: Any = nibabel.load(path)
    values = np.asarray(image.dataobj, dtype=np.float32)
    return values.reshape(values.shape[:3])


def read_mask(mask: ArrayLike | str | Path | ReadMask) -> ReadMask:
    """Return a mask from an array (x, y, z) or a NIfTI file, with the file's affine."""
    if isinstance(mask, ReadMask):
        return mask
    affine, name = None, ""
    if isinstance(mask, str | Path):
        path, name = Path(mask), f" {mask}"
        header = read_header(path)
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


def fitting_mask(mask: ArrayLike | str | Path | ReadMask, frame: Frame) -> Mask:
    """Return the voxels of a mask; raise an error where it is not on the grid."""
    inside, affine = read_mask(mask)
    if inside.shape != frame.shape:
        what = f"The mask has {_times(inside.shape)} voxels, the images have {_times(frame.shape)}"
        raise InputError(f"{what}; resample it.")
    if affine is not None and not _same(affine, frame.affine):
        raise InputError("The affine of the mask is not that of the images; resample it to their grid.")
    return inside


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
        As nibabel's ``set_intent`` takes it: ``("t test", (degrees_of_freedom,))``.
    """
    path, data = Path(path), np.asarray(values)
    data = data.astype(np.uint8 if data.dtype == bool else np.float32)
    if not path.name.endswith((".nii", ".nii.gz")):
        raise InputError(f"{path} is no name for a NIfTI file; let it end in .nii or .nii.gz.")
    if isinstance(like, str | Path):
        if path.exists() and path.samefile(like):
            raise InputError(f"{path} is the image that was read; write the new one elsewhere.")
        like = nibabel.load(like)
    if not hasattr(like, "header"):
        like = nibabel.Nifti1Image(data, np.asarray(like, dtype=np.float64))
        like.header.set_xyzt_units("mm")
    if data.shape != like.shape[:3]:
        what = f"The values have {_times(data.shape)} voxels"
        raise InputError(f"{what}, {path.name} needs {_times(like.shape[:3])}.")
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


def _common_grid(files: Sequence[Path]) -> tuple[Frame, dict[int, str]]:
    """Return the grid of most images, and what is wrong with files by their headers, by position."""
    first: dict[Path, int] = {}
    read: dict[int, Frame | str] = {}
    for k, path in enumerate(files):
        before = first.setdefault(path.resolve(), k)
        twice = f"is given twice, in rows {before + 1} and {k + 1}"
        read[k] = read_header(path) if before == k else twice
    problems = {k: header for k, header in read.items() if isinstance(header, str)}
    headers = {k: header for k, header in read.items() if isinstance(header, Frame)}
    if not headers:
        _raise_problems(files, problems)
    keys = {k: (header.shape, tuple(header.affine.round(2).ravel())) for k, header in headers.items()}
    most = Counter(keys.values()).most_common(1)[0][0]
    usual = next(header for k, header in headers.items() if keys[k] == most)
    unlike = {k: text for k, header in headers.items() if (text := _difference(header, usual))}
    as_in = f"as in {len(headers) - len(unlike)} of {plural(len(headers), 'file')}"
    return usual, problems | {k: f"{text} {as_in}" for k, text in unlike.items()}


def read_header(path: Path) -> Frame | str:
    """Return the header, or what is wrong with it or with the file."""
    if path.is_dir():
        return "is a folder, not an image"
    if path.is_symlink() and not path.exists():
        return "is a link to a file that is not here (datalad get?)"
    if not path.exists():
        return "does not exist"
    try:
        image = nibabel.load(path)
        if not isinstance(image, nibabel.Nifti1Image):
            return "is not a NIfTI file"
        return _checked_header(image, path)
    except nibabel.filebasedimages.ImageFileError:
        return "is not a NIfTI file, or broken at its beginning"
    except Exception as error:  # whatever the reader meets in a damaged file
        return f"cannot be read as NIfTI ({first_line(error)})"


def _checked_header(image: Any, path: Path) -> Frame | str:
    sizes, kind, space = [int(size) for size in image.shape], image.get_data_dtype(), path.stat().st_size
    if kind.kind not in "iufb":
        return f"holds values of the kind {kind}, not plain numbers"
    if len(sizes) < 3 or any(size != 1 for size in sizes[3:]) or min(sizes) < 1:
        return f"has the shape {_times(sizes)}, not one three-dimensional volume"
    room = space * MAX_DEFLATE if path.suffix == ".gz" else space - int(image.dataobj.offset)
    if math.prod(sizes) > MAX_VOXELS or math.prod(sizes) * kind.itemsize > room:
        return f"claims {_times(sizes)} voxels, more than its {plural(space, 'byte')} can hold; is it whole?"
    affine = np.asarray(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
        return "has an affine that is not a place in space"
    unit = image.header.get_xyzt_units()[0]
    if unit not in ("mm", "unknown"):
        return f"is in units of {unit}, not mm"
    return Frame((sizes[0], sizes[1], sizes[2]), affine)


def _same(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    return bool(np.abs(one - other).max() <= TOLERANCE)


def _difference(frame: Frame, usual: Frame) -> str:
    """Return how a grid differs from the usual one, "" if it does not."""
    if str(frame) != str(usual):
        return f"has {frame}, expected {usual}"
    if not _same(frame.affine[:3, :3], usual.affine[:3, :3]):
        return "is rotated against the affine"
    shift = np.linalg.norm(frame.affine[:3, 3] - usual.affine[:3, 3])
    return "" if _same(frame.affine, usual.affine) else f"is shifted by {shift:.3g} mm against the affine"


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


def _raise_problems(paths: Sequence[Path], problems: Mapping[int, str]) -> None:
    lines = [f"{paths[k]} {problems[k]}" for k in sorted(problems)]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN} more"]
    if problems:
        what = f"{len(problems)} of {plural(len(paths), 'image')} cannot be used"
        raise InputError("\n  ".join([f"{what}; repair them or leave them out:", *lines]))


def _times(sizes: Iterable[Any]) -> str:
    return " × ".join(f"{size:g}" for size in sizes)
