"""NIfTI files: one grid for all of them, every file that cannot be used named at once, and writing one."""

from __future__ import annotations

import gzip
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import listed, plural
from equipool.exceptions import EquipoolWarning, InputError
from equipool.files import write_whole
from equipool.progress import Progress

__all__ = [
    "Grid",
    "check_volumes",
    "read_grid",
    "read_mask",
    "read_volume",
    "region_means",
    "require_same_place",
    "survey",
    "write_volume",
]

FloatArray = NDArray[np.float32]
Mask = NDArray[np.bool_]
Each = Callable[[int, FloatArray], None]

SHOWN = 100  # files that an error names before it only counts the rest
TOLERANCE = 1e-3  # mm: affines that differ by less are the same
MOST_VOXELS = 2**31
DEFLATE = 1032  # gzip cannot shrink by more, so a header that claims more lies
REGIONS = 10  # along each axis, to see changes in
UNLIKE = 1000.0  # times brighter or darker than the others: probably another unit or scaling


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid that all images share.

    Attributes
    ----------
    shape, affine
        Voxels along each axis, and where they are in mm.
    present
        In how many images each voxel is finite and not zero.
    brightness
        The median of the magnitudes of each image that are not zero.
    """

    shape: tuple[int, int, int]
    affine: NDArray[np.float64]
    present: NDArray[np.int32]
    brightness: tuple[float, ...]

    def __str__(self) -> str:
        """Return "40 × 48 × 40 voxels of 4 × 4 × 4 mm, RAS"."""
        sides = np.linalg.norm(self.affine[:3, :3], axis=0).round(3)
        return (
            f"{_size(self.shape)} voxels of {_size(sides)} mm, {_Header(self.shape, self.affine).orientation}"
        )


@dataclass(frozen=True, eq=False)
class _Header:
    shape: tuple[int, int, int]
    affine: NDArray[np.float64]

    @property
    def orientation(self) -> str:
        import nibabel

        return "".join(str(code) for code in nibabel.aff2axcodes(self.affine))


def check_volumes(
    paths: Iterable[str | Path],
    *,
    mask: ArrayLike | str | Path | None = None,
    jobs: int = 1,
    progress: bool = False,
    each: Each | None = None,
) -> Grid:
    """Read every image once and raise one error that names all files that cannot be pooled with the rest.

    Checked are: that the file is there, whole and a NIfTI; that it is one three-dimensional volume of
    plausible size in mm; that shape, affine and orientation are those of most files; that values are finite
    (within the mask, if one is given) and not constant. Intensities 1 000 times those of the others give
    an :class:`~equipool.exceptions.EquipoolWarning`.

    Parameters
    ----------
    paths
        The files, ``.nii`` or ``.nii.gz``.
    mask
        The voxels that count, as an array (x, y, z) or a NIfTI file; values elsewhere may be anything.
    jobs
        How many files to read at a time.
    progress
        Whether to say on the terminal how far it is.
    each
        Called with the position and the values (x, y, z) of every image, in order.
    """
    inside, affine = (None, None) if mask is None else read_mask(mask)
    grid = survey(tuple(Path(path) for path in paths), mask=inside, jobs=jobs, progress=progress, each=each)
    require_same_place(affine, grid)
    return grid


def survey(
    paths: Sequence[Path],
    *,
    mask: Mask | None = None,
    jobs: int = 1,
    progress: bool = False,
    each: Each | None = None,
) -> Grid:
    """Do what :func:`check_volumes` does, and call ``each(position, values)`` for every image in order.

    No more than a few images are in memory at a time.
    """
    if not paths:
        raise InputError("No images were given; give at least one NIfTI file.")
    if jobs < 1:
        raise InputError(f"jobs must be at least 1. Got {jobs}.")
    headers, problems = _read_headers(paths)
    shape, affine = _majority(headers, problems, paths)
    if mask is not None and mask.shape != shape:
        raise InputError(
            f"The mask has {_size(mask.shape)} voxels, the images have {_size(shape)}; resample it."
        )
    good = [k for k in range(len(paths)) if k not in problems]
    present = np.zeros(shape, dtype=np.int32)
    brightness: dict[int, float] = {}

    def look(k: int) -> FloatArray | str:
        return _read_checked(paths[k], shape, mask)

    for k, values in zip(good, _in_order(look, good, jobs, progress), strict=True):
        if isinstance(values, str):
            problems[k] = values
            continue
        inside = np.isfinite(values) & (values != 0)
        present += inside
        brightness[k] = float(np.median(np.abs(values[inside if mask is None else inside & mask])))
        if each is not None and not problems:
            each(k, values)
    _raise_problems(paths, problems)
    _warn_of_brightness(paths, brightness)
    return Grid(shape, affine, present, tuple(brightness.values()))


def region_means(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the means over boxes, ten along each axis; what is no number counts as 0."""
    total = np.nan_to_num(values, posinf=0.0, neginf=0.0).astype(np.float64)
    for axis in range(3):
        length = total.shape[axis]
        starts = np.unique(np.linspace(0, length, min(REGIONS, length), endpoint=False).astype(int))
        sizes = np.diff(np.append(starts, length))
        total = np.add.reduceat(total, starts, axis=axis)
        total /= sizes.reshape([-1 if k == axis else 1 for k in range(3)])
    return total.ravel()


def read_grid(path: Path) -> tuple[tuple[int, int, int], NDArray[np.float64]] | None:
    """Return shape and affine of an image; ``None`` where its header cannot be used."""
    header = _read_header(path)
    return None if isinstance(header, str) else (header.shape, header.affine)


def read_volume(path: Path) -> FloatArray:
    """Return the values of one image, (x, y, z)."""
    values = np.asarray(_load(path).dataobj, dtype=np.float32)
    return values.reshape(values.shape[:3])


def read_mask(mask: ArrayLike | str | Path) -> tuple[Mask, NDArray[np.float64] | None]:
    """Return a mask (x, y, z) from an array or a NIfTI file, and the file's affine."""
    if isinstance(mask, str | Path):
        path = Path(mask)
        header = _read_header(path)
        if isinstance(header, str):
            raise InputError(f"The mask {path} {header}; give a NIfTI file on the grid of the images.")
        values = _read_checked(path, header.shape, None, flat=True)
        if isinstance(values, str):
            raise InputError(f"The mask {path} {values}; give one with ones in the brain.")
        inside, affine = np.ascontiguousarray(values > 0), header.affine
    else:
        inside, affine = np.asarray(mask) > 0, None
    if inside.ndim != 3:
        raise InputError(f"A mask has three axes. Got shape {inside.shape}.")
    if not inside.any():
        name = f" {mask}" if isinstance(mask, str | Path) else ""
        raise InputError(f"The mask{name} is empty; it must hold at least one voxel that is not 0.")
    return inside, affine


def require_same_place(affine: NDArray[np.float64] | None, grid: Grid) -> None:
    """Raise an error where a mask's affine is not that of the images."""
    if affine is not None and np.abs(affine - grid.affine).max() > TOLERANCE:
        raise InputError(
            "The mask lies elsewhere than the images (another affine); resample it to their grid."
        )


def write_volume(path: str | Path, values: ArrayLike, like: Any) -> Path:
    """Write a float32 NIfTI on the grid and with the header of another image.

    Parameters
    ----------
    path
        The new file, ``.nii`` or ``.nii.gz``; it appears whole or not at all.
    values
        (x, y, z).
    like
        The image (a path or a nibabel image) whose affine, its codes, units and description are kept. It is
        never overwritten.
    """
    import nibabel

    path = Path(path)
    if not path.name.endswith((".nii", ".nii.gz")):
        raise InputError(f"{path} is no name for a NIfTI file; let it end in .nii or .nii.gz.")
    if isinstance(like, str | Path):
        if path.exists() and path.samefile(like):
            raise InputError(f"{path} is the image that was read; write the new one elsewhere.")
        like = _load(Path(like))
    data = np.asarray(values, dtype=np.float32)
    shape = tuple(like.shape[:3])
    if data.shape != shape:
        raise InputError(f"The values have {_size(data.shape)} voxels, {path.name} needs {_size(shape)}.")
    header = like.header.copy()
    header.set_data_dtype(np.float32)
    kind: Any = nibabel.Nifti2Image if isinstance(like, nibabel.Nifti2Image) else nibabel.Nifti1Image
    image = kind(data, like.affine, header)
    image.header.set_slope_inter(1.0, 0.0)
    content = image.to_bytes()
    # No time stamp, so that the same values give the same file.
    return write_whole(path, gzip.compress(content, 1, mtime=0) if path.suffix == ".gz" else content)


# -- headers -----------------------------------------------------------------------------------------------


def _load(path: Path) -> Any:
    import nibabel

    return nibabel.load(path)


def _read_headers(paths: Sequence[Path]) -> tuple[dict[int, _Header], dict[int, str]]:
    """Return the headers that can be used, and what is wrong with the rest, by position."""
    headers: dict[int, _Header] = {}
    problems: dict[int, str] = {}
    first: dict[Path, int] = {}
    for k, path in enumerate(paths):
        before = first.setdefault(path.resolve(), k)
        if before != k:
            problems[k] = f"is given twice, in rows {before + 1} and {k + 1}"
            continue
        header = _read_header(path)
        if isinstance(header, str):
            problems[k] = header
        else:
            headers[k] = header
    return headers, problems


def _read_header(path: Path) -> _Header | str:
    """Return the header, or what is wrong with it or with the file."""
    if path.is_dir():
        return "is a folder, not an image"
    if not path.is_file():
        linked = path.is_symlink()
        return "is a link to a file that is not here (datalad get?)" if linked else "does not exist"
    import nibabel

    try:
        image = _load(path)
        if not isinstance(image, nibabel.Nifti1Image):
            return "is not a NIfTI file"
        return _checked_header(image, path.stat().st_size, packed=path.suffix == ".gz")
    except nibabel.filebasedimages.ImageFileError:
        return "is not a NIfTI file, or broken at its beginning"
    except Exception as error:  # whatever the reader meets in a damaged file
        return f"cannot be read as NIfTI ({_first_line(error)})"


def _checked_header(image: Any, file_size: int, *, packed: bool) -> _Header | str:
    header, sizes = image.header, [int(size) for size in image.shape]
    kind = header.get_data_dtype()
    if kind.kind not in "iufb":
        return f"holds values of the kind {kind}, not plain numbers"
    if len(sizes) < 3 or any(size != 1 for size in sizes[3:]) or min(sizes) < 1:
        return f"has the shape {_size(sizes)}, not one three-dimensional volume"
    voxels = math.prod(sizes)
    room = file_size * DEFLATE if packed else file_size - int(image.dataobj.offset)
    if voxels > MOST_VOXELS or voxels * kind.itemsize > room:
        return (
            f"claims {_size(sizes)} voxels, more than its {plural(file_size, 'byte')} can hold; is it whole?"
        )
    affine = np.asarray(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
        return "has an affine that is not a place in space"
    unit = header.get_xyzt_units()[0]
    if unit not in ("mm", "unknown"):
        return f"is in units of {unit}, not mm"
    return _Header((sizes[0], sizes[1], sizes[2]), affine)


def _majority(
    headers: Mapping[int, _Header], problems: dict[int, str], paths: Sequence[Path]
) -> tuple[tuple[int, int, int], NDArray[np.float64]]:
    """Return the shape and affine of most images, and note the others as problems."""
    if not headers:
        _raise_problems(paths, problems)
    shape, count = Counter(header.shape for header in headers.values()).most_common(1)[0]
    of_shape = {}
    for k, header in headers.items():
        if header.shape == shape:
            of_shape[k] = header
        else:
            share = _share(count, len(headers))
            problems[k] = f"has {_size(header.shape)} voxels, expected {_size(shape)} {share}"
    kinds: list[tuple[_Header, list[int]]] = []
    for k, header in of_shape.items():
        for other, members in kinds:
            if np.abs(header.affine - other.affine).max() <= TOLERANCE:
                members.append(k)
                break
        else:
            kinds.append((header, [k]))
    usual, usual_members = max(kinds, key=lambda kind: len(kind[1]))
    share = _share(len(usual_members), len(headers))
    for header, members in kinds:
        if header is not usual:
            problems.update(dict.fromkeys(members, f"{_affine_difference(header, usual)} {share}"))
    return shape, usual.affine


def _affine_difference(header: _Header, usual: _Header) -> str:
    if header.orientation != usual.orientation:
        return f"has the orientation {header.orientation} against {usual.orientation}"
    size, usual_size = (np.linalg.norm(h.affine[:3, :3], axis=0) for h in (header, usual))
    if np.abs(size - usual_size).max() > TOLERANCE:
        return f"has voxels of {_size(size)} mm, expected {_size(usual_size)} mm"
    if np.abs(header.affine[:3, :3] - usual.affine[:3, :3]).max() > TOLERANCE:
        return "is rotated against the affine"
    shift = np.linalg.norm(header.affine[:3, 3] - usual.affine[:3, 3])
    return f"is shifted by {shift:.3g} mm against the affine"


# -- values ------------------------------------------------------------------------------------------------


def _read_checked(
    path: Path, shape: tuple[int, ...], mask: Mask | None, *, flat: bool = False
) -> FloatArray | str:
    """Return the values, or what is wrong with them; a mask may be ``flat``."""
    try:
        with np.errstate(over="ignore"):  # a number beyond float32 is named as infinite below
            values = read_volume(path)
    except Exception as error:  # whatever the reader meets in a damaged file
        return f"cannot be read to its end ({_first_line(error)}); is it whole?"
    if values.shape != shape:
        return "has changed while it was read"
    counted = values if mask is None else values[mask]
    finite = np.isfinite(counted)
    if not finite.all():
        count = plural(int((~finite).sum()), "voxel")
        where = "; give a mask without them" if mask is None else " within the mask"
        return f"is NaN or infinite in {count}{where}"
    low, high = counted.min(), counted.max()
    if low == high and not flat:
        return "is 0 everywhere" if low == 0 else f"is constant ({low:g} everywhere)"
    return values


def _in_order(
    function: Callable[[int], FloatArray | str], items: Sequence[int], jobs: int, progress: bool
) -> Iterator[FloatArray | str]:
    """Apply a function in threads, a few items at a time, so that memory does not grow with their number."""
    size, say = 1 if jobs == 1 else 2 * jobs, Progress("Images", len(items))
    with ThreadPoolExecutor(jobs) as pool:
        for start in range(0, len(items), size):
            part = items[start : start + size]
            yield from map(function, part) if jobs == 1 else pool.map(function, part)
            if progress:
                say(start + len(part))


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


# -- words -------------------------------------------------------------------------------------------------


def _raise_problems(paths: Sequence[Path], problems: Mapping[int, str]) -> None:
    if not problems:
        return
    order = sorted(problems)
    lines = [f"{paths[k]} {problems[k]}" for k in order[:SHOWN]]
    if len(order) > SHOWN:
        lines.append(f"and {len(order) - SHOWN} more")
    raise InputError(
        f"{len(order)} of {plural(len(paths), 'image')} cannot be used; repair them or leave them out:\n  "
        + "\n  ".join(lines)
    )


def _share(count: int, whole: int) -> str:
    return f"as in {count} of {plural(whole, 'file')}"


def _size(sizes: Iterable[Any]) -> str:
    return " × ".join(f"{size:g}" for size in sizes)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
