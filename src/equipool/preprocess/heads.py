"""From a T1-weighted head to a brain on the standard grid: mask, bias field, affine, resampling, intensity.

Each step is a pure function of arrays and affines. The libraries deepbet, SimpleITK and picsl-greedy are the
extra ``preprocess`` and imported at use.
"""

import ctypes
import io
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
from nibabel.affines import voxel_sizes
from PIL import Image
from scipy import ndimage

from equipool.data.nifti import mni_grid
from equipool.exceptions import InputError, MissingExtraError, first_line

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

SPACE = "MNI152NLin2009aSym"  # the template in nilearn's wheel
STEPS = ("mask", "n4", "register", "resample", "normalize")
SKIPPABLE = ("n4", "register", "normalize")
FWHM = float(np.sqrt(8 * np.log(2)))  # full width at half maximum of a Gaussian of SD 1
N4_ITERATIONS = [10, 10, 20]  # by level; more gain little, and a fourth level removes anatomy with the bias
MARGIN_MM = 24.0  # around the box, in which registration searches for the head
PLANES = ((2, -18.0), (2, 8.0), (2, 40.0), (1, -22.0), (1, 18.0), (0, 4.0))  # of pictures: axis, mm in MNI
HEIGHT = 150  # pixels of a slice
BRAIN, TEMPLATE = (230, 159, 0), (86, 180, 233)  # orange and sky blue, of the Okabe–Ito palette
GAP_MM = 8.0  # half the width of the ventricles and sulci that are closed in an extracted brain


@dataclass(frozen=True)
class Steps:
    """What is done to a head.

    ``skip`` leaves out steps: ``"n4"`` (bias field), ``"register"`` (the image is in MNI space already),
    ``"normalize"`` (intensities stay in the scanner's units).
    """

    resolution: float = 2.0  # voxel size of the result in mm; 2 gives 91×109×91 voxels, 4 gives 46×55×46
    skip: tuple[str, ...] = ()
    brain_extracted: bool = False  # the image shows the brain alone; its mask is that of extracted_mask

    def __post_init__(self) -> None:
        unknown = [step for step in self.skip if step not in SKIPPABLE]
        if unknown:
            raise InputError(f"{unknown[0]!r} is no step that can be skipped; choose {', '.join(SKIPPABLE)}.")
        if not 0.5 <= self.resolution <= 16:
            raise InputError(f"The resolution must be between 0.5 and 16 mm; got {self.resolution:g}.")
        object.__setattr__(self, "resolution", float(self.resolution))
        object.__setattr__(self, "skip", tuple(sorted(set(self.skip))))


@dataclass(frozen=True)
class Brain:
    """One preprocessed brain on the MNI grid."""

    image: Array
    mask: Array
    head: Array  # with its skull, for pictures
    grid: Array  # from voxels to mm
    to_head: Array  # from mm of MNI to mm of the head
    quality: dict[str, float]
    seconds: dict[str, float]  # by step


def require_extra(steps: Steps) -> None:
    """Raise :class:`MissingExtraError` when a library that these steps need is not installed."""
    needed = {
        "SimpleITK": not {"n4", "register"} <= set(steps.skip),
        "deepbet": not steps.brain_extracted,
        "picsl_greedy": "register" not in steps.skip,
    }
    missing = [name for name in needed if needed[name] and find_spec(name) is None]
    if missing:
        what = f"Preprocessing needs {' and '.join(missing)}"
        raise MissingExtraError(f"{what}: pip install 'equipool[preprocess]'.")


def preprocess_head(values: Array, affine: Array, steps: Steps | None = None) -> Brain:
    """Preprocess a head, given as :func:`read_head` returns it; default: all steps, at 2 mm."""
    steps = steps or Steps()
    require_extra(steps)
    times, sizes = [time.perf_counter()], voxel_sizes(affine)
    mask = extracted_mask(values, sizes) if steps.brain_extracted else brain_mask(values, affine)
    if mask.sum() < 100:
        raise InputError("No brain was found in the image; is it a T1-weighted head?")
    times.append(time.perf_counter())
    if "n4" not in steps.skip:
        values = remove_bias(values, mask, sizes)
    times.append(time.perf_counter())
    to_head = np.eye(4) if "register" in steps.skip else register(np.where(mask, values, 0), affine)
    times.append(time.perf_counter())
    shape, grid = mni_grid(steps.resolution)
    brain, inside = resample_brain(values, mask, affine, shape, grid, to_head)
    head = resample(values, affine, shape, grid, to_head, order=1)
    times.append(time.perf_counter())
    if "normalize" not in steps.skip:
        peak = white_matter_peak(brain, inside, template(steps.resolution).white_matter)
        brain, head = brain / peak, head / peak
    times.append(time.perf_counter())
    # Agreement with the template and scaling of the affine, to find failed heads.
    mni, stretches = template(steps.resolution), np.linalg.svd(to_head[:3, :3], compute_uv=False)
    quality = {
        "correlation": float(np.corrcoef(brain[mni.mask], mni.t1[mni.mask])[0, 1]),
        "dice": float(2 * (inside & mni.mask).sum() / (inside.sum() + mni.mask.sum())),
        "scale": float(np.prod(stretches) ** (1 / 3)),
        "stretch": float(stretches[0] / stretches[-1]),
        "volume_ml": float(mask.sum() * abs(np.linalg.det(affine[:3, :3])) / 1000),
    }
    seconds = dict(zip(STEPS, np.diff(times).round(3).tolist(), strict=True))
    return Brain(brain.astype(np.float32), inside, head, grid, to_head, quality, seconds)


def read_head(path: Path) -> tuple[Array, Array]:
    """Read a 3-D image as float32 in the order closest to RAS; return it with its affine.

    NaN and infinity become 0. An image that cannot be a head is an :class:`InputError` that names the file.
    """
    try:
        image: Any = nibabel.as_closest_canonical(nibabel.load(path))
        values = np.asarray(image.dataobj, dtype=np.float32)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except Exception as error:  # nibabel and zlib raise many kinds for a damaged file
        what = f"{path.name} cannot be read as an image ({first_line(error)})"
        raise InputError(f"{what}; is it complete?") from error
    if values.ndim > 3 and values.size == np.prod(values.shape[:3]):
        values = values.reshape(values.shape[:3])  # a time axis of length 1
    if values.ndim != 3 or min(values.shape) < 8:
        size = "×".join(map(str, values.shape))
        raise InputError(f"{path.name} has {size} voxels; a head is one 3-D volume.")
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    if values.max() <= values.min():
        raise InputError(f"{path.name} has the same value everywhere; there is no head in it.")
    affine = np.asarray(image.affine, dtype=float)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-6:
        raise InputError(f"{path.name} has no usable orientation in its header (qform and sform).")
    return values, affine


def brain_mask(values: Array, affine: Array) -> Array:
    """Return the brain mask of deepbet, on the CPU (its weights come with its package)."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _, mask, _ = _deepbet().run(nibabel.Nifti1Image(values, affine))
    except (AssertionError, ValueError) as error:  # raised for an image without foreground
        raise InputError(f"deepbet found no brain ({error}); is it a T1-weighted head?") from error
    finally:
        torch.set_num_threads(threads)
    return np.asarray(mask.dataobj) > 0


def extracted_mask(values: Array, sizes: Array) -> Array:
    """Return the mask of an image without skull, with its ventricles and sulci.

    Voxels above 5 % of the 98th percentile (resampling leaves a faint rim above 0), with gaps narrower than
    twice ``GAP_MM`` closed and holes filled, because fluid may be as dark as the background.
    """
    if not (values > 0).any():
        return np.zeros(values.shape, dtype=bool)
    bright = values > 0.05 * np.percentile(values[values > 0], 98)
    box = _box(bright, margin=0)
    room = [int(np.ceil(GAP_MM / size)) + 1 for size in sizes]
    part = np.pad(bright[box], [(n, n) for n in room])
    grown = ndimage.distance_transform_edt(~part, sampling=sizes) <= GAP_MM
    closed = ndimage.distance_transform_edt(grown, sampling=sizes) > GAP_MM
    filled = ndimage.binary_fill_holes(closed | part)
    mask = np.zeros_like(bright)
    mask[box] = filled[tuple(slice(n, -n) for n in room)]
    return mask


@cache
def _deepbet() -> Any:
    """Load the networks once in each process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.load, which deepbet calls
        from deepbet import BrainExtraction

        return BrainExtraction(no_gpu=True)


def remove_bias(values: Array, mask: Array, sizes: Array, *, working_mm: float = 4.0) -> Array:
    """Divide by the smooth bias field that N4 estimates inside the mask.

    The field is fitted to block means of about ``working_mm`` and evaluated at every voxel. Its geometric
    mean over the mask is 1, so that intensities keep their scale.
    """
    import SimpleITK as sitk  # noqa: N813

    box = _box(mask, margin=2)
    frame = np.diag([*sizes, 1.0])
    image = _to_itk(values[box], frame)
    blocks = [int(max(1, round(working_mm / size))) for size in sizes]
    small = sitk.BinShrink(image, blocks)
    inside = sitk.BinShrink(_to_itk(mask[box], frame), blocks) > 0.5
    n4 = sitk.N4BiasFieldCorrectionImageFilter()
    n4.SetNumberOfThreads(1)
    n4.SetMaximumNumberOfIterations(N4_ITERATIONS)
    n4.Execute(small, sitk.And(inside, small > 0))  # it works on logarithms
    log_field = sitk.GetArrayFromImage(n4.GetLogBiasFieldAsImage(image)).T
    around = [(part.start, size - part.stop) for part, size in zip(box, mask.shape, strict=True)]
    log_field = np.pad(log_field - log_field[mask[box]].mean(), around, mode="edge")
    return (values / np.exp(log_field)).astype(np.float32)


def register(brain: Array, affine: Array, *, working_mm: float = 2.0) -> Array:
    """Return the affine from mm of MNI to mm of the head that registers the brain to the template.

    From aligned centres of mass, greedy maximises the local correlation of images of ``working_mm`` over
    twelve parameters, coarse to fine. Local correlation tolerates another contrast or bias field than the
    template's.
    """
    from picsl_greedy import Greedy3D

    shape, grid = mni_grid(working_mm)
    fixed = template(working_mm).t1
    start, wide = np.eye(4), grid.copy()
    start[:3, 3] = _centre(brain, affine) - _centre(fixed, grid)
    margin = round(MARGIN_MM / working_mm)
    wide[:3, 3] -= margin * working_mm
    moving = resample(brain, affine, tuple(n + 2 * margin for n in shape), wide, start, order=1)
    greedy = Greedy3D()
    with _silent():
        greedy.execute(
            "-d 3 -V 0 -threads 1 -a -dof 12 -m NCC 2x2x2 -n 100x50x10 -seed 1 -ia-identity "
            "-i fixed moving -o affine",
            fixed=_to_itk(fixed, grid),
            moving=_to_itk(moving, wide),
            affine=None,
            out=io.StringIO(),
            err=io.StringIO(),
        )
    return start @ np.asarray(greedy["affine"])


def resample(
    values: Array, affine: Array, shape: Shape, grid: Array, mapping: Array | None = None, *, order: int = 3
) -> Array:
    """Resample an image to another grid by splines of an order, 3 or 1; outside the image the result is 0.

    ``affine`` and ``grid`` are the voxel-to-mm matrices of image and result, ``mapping`` goes from mm of the
    grid to mm of the image (default: the same space). Against aliasing, the image is first smoothed by the
    Gaussian that widens the FWHM of one of its voxels to that of a voxel of the result.
    """
    voxels = np.linalg.inv(affine) @ (np.eye(4) if mapping is None else mapping) @ grid
    voxels = voxels.round(9)  # otherwise rounding puts the first voxel of an equal grid outside the image
    widths = np.linalg.norm(voxels[:3, :3], axis=1)  # of a new voxel along the old axes, in old voxels
    sigma = np.sqrt(np.clip(widths**2 - 1, 0, None)) / FWHM
    values = ndimage.gaussian_filter(np.asarray(values, dtype=np.float32), sigma)
    return ndimage.affine_transform(values, voxels, output_shape=shape, order=order)


def resample_brain(
    values: Array, mask: Array, affine: Array, shape: Shape, grid: Array, mapping: Array | None = None
) -> tuple[Array, Array]:
    """Resample a brain and its mask; outside the mask the brain is 0.

    Values are averaged inside the mask alone, so that neither skull nor background affects the brain's edge.
    """
    share = resample(mask, affine, shape, grid, mapping)
    total = resample(np.where(mask, values, 0), affine, shape, grid, mapping)
    inside = share > 0.5
    return np.where(inside, total / np.where(inside, share, 1), 0).clip(min=0), inside


def white_matter_peak(values: Array, mask: Array, white_matter: Array) -> float:
    """Return the mode of the intensities where the template has white matter.

    Unlike the mean or median of the whole brain, it does not depend on atrophy, and so not on age or disease.
    """
    from scipy.stats import gaussian_kde

    sample = values[mask & (white_matter > 0.9) & (values > 0)]
    if len(sample) < 30 or sample.std() == 0:
        raise InputError("The brain does not cover the template's white matter; see how it was registered.")
    sample = sample[:: max(1, len(sample) // 5000)].astype(float)
    low, high = np.percentile(sample, [2, 98])
    levels = np.linspace(low, high, 400)
    return float(levels[np.argmax(gaussian_kde(sample)(levels))])


@dataclass(frozen=True)
class Template:
    """The MNI152 brain on a grid: its T1 image, brain mask and proportion of white matter."""

    t1: Array
    mask: Array
    white_matter: Array


@cache
def template(resolution: float) -> Template:
    """Return nilearn's MNI152 maps on :func:`mni_grid`."""
    from nilearn.datasets import load_mni152_brain_mask, load_mni152_template, load_mni152_wm_template

    shape, grid = mni_grid(resolution)
    loaders = (load_mni152_template, load_mni152_brain_mask, load_mni152_wm_template)
    images = [loader(resolution=1) for loader in loaders]
    t1, mask, white = (resample(image.get_fdata(), image.affine, shape, grid, order=1) for image in images)
    return Template(t1, mask > 0.5, white)


def mosaic(head: Array, mask: Array, template: Array, grid: Array) -> bytes:
    """Return a JPEG of six slices in MNI space in a row, with outlines of two masks.

    Given the head, its brain mask, the template's brain mask, and the voxel-to-mm matrix of their RAS grid.
    Left is left, up is superior or anterior.
    """
    top, tiles = np.percentile(head[mask], 99.5) if mask.any() else head.max(), []
    for axis, mm in PLANES:
        at = int(np.clip(round((mm - grid[axis, 3]) / grid[axis, axis]), 0, head.shape[axis] - 1))
        planes = [np.take(volume, at, axis).T[::-1] for volume in (head / (top or 1), template, mask)]
        size = round(planes[0].shape[1] * HEIGHT / planes[0].shape[0]), HEIGHT
        images = [Image.fromarray(plane.astype(np.float32)) for plane in planes]
        grey, *masks = (np.asarray(image.resize(size, Image.Resampling.BILINEAR)) for image in images)
        tile = np.repeat((np.clip(grey, 0, 1) * 255).astype(np.uint8)[..., None], 3, axis=2)
        for share, colour in zip(masks, (TEMPLATE, BRAIN), strict=True):
            tile[(share > 0.5) & ~ndimage.binary_erosion(share > 0.5, border_value=1)] = colour
        tiles.append(tile)
    picture = io.BytesIO()
    # subsampling=0: colours at full resolution, or the thin outlines would fade.
    Image.fromarray(np.concatenate(tiles, axis=1)).save(picture, format="JPEG", quality=80, subsampling=0)
    return picture.getvalue()


def _box(mask: Array, margin: int) -> tuple[slice, ...]:
    """Return the box around the mask."""
    (box,) = ndimage.find_objects(mask.astype(np.uint8))
    sides = zip(box, mask.shape, strict=True)
    return tuple(slice(max(0, side.start - margin), min(n, side.stop + margin)) for side, n in sides)


def _centre(values: Array, affine: Array) -> Array:
    return np.asarray((affine @ [*ndimage.center_of_mass(values.clip(min=0)), 1.0])[:3])


def _to_itk(values: Array, affine: Array) -> Any:
    """Return an ITK image, whose x and y axes point the other way."""
    import SimpleITK as sitk  # noqa: N813

    lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    image = sitk.GetImageFromArray(np.ascontiguousarray(values.T, dtype=np.float32))
    image.SetSpacing(voxel_sizes(lps).tolist())
    image.SetDirection((lps[:3, :3] / voxel_sizes(lps)).ravel().tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    return image


@contextmanager
def _silent() -> Iterator[None]:
    """Discard standard output: greedy's optimiser prints from C, past ``sys.stdout``."""
    libc = ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        libc.fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
