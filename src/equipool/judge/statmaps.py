"""Voxel-wise statistics: t-maps of a target with covariates adjusted, clusters, comparison with the truth.

One ordinary least-squares regression for each voxel, all with the same design, so that one QR decomposition
serves all of them. Voxels are read a tile at a time: memory does not grow with their number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage, sparse, special, stats
from sklearn.metrics import roc_auc_score

from equipool.checks.errors import check_inputs
from equipool.checks.findings import listed, plural
from equipool.checks.inputs import Inputs, as_numbers, parse_labels
from equipool.exceptions import InputError
from equipool.judge.scores import FloatArray

Correction = Literal["bonferroni", "fdr"] | None
BoolArray = NDArray[np.bool_]

FDR: dict[str, Any] = {"alpha": 0.05, "correction": "fdr"}  # in place of the paper's Bonferroni, 0.001
TILE = 512  # voxels read and computed at once
COLLINEAR = 1e-8  # residual of a column of the design, as a share of it, that counts as zero
EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class StatMap:
    """The effect of a target on each voxel, covariates adjusted; arrays are (voxels,).

    ``t`` and two-sided, uncorrected ``p`` are 0 and 1 where a voxel could not be ``tested``: one that never
    varies, or not beyond what covariates and sites explain. ``effect`` is the coefficient, in the units of
    the values: the difference between the two classes, or the slope. ``df`` are the residual degrees of
    freedom, ``n`` the participants; ``contrast`` says what a positive effect means, such as ``"CN - AD"``.
    """

    t: FloatArray
    p: FloatArray
    effect: FloatArray
    df: int
    n: int
    tested: BoolArray
    contrast: str = ""

    @property
    def q(self) -> FloatArray:
        """The p-values adjusted for the false discovery rate over all tested voxels; 1 for the others."""
        q = np.ones_like(self.p)
        if self.tested.any():
            q[self.tested] = stats.false_discovery_control(self.p[self.tested])
        return q

    def significant(self, *, alpha: float = 0.001, correction: Correction = "bonferroni") -> BoolArray:
        """Return the voxels that are significant at ``alpha`` over all tested ones.

        ``"bonferroni"``: p < alpha / tested voxels, as in the paper; ``"fdr"``: the false discovery rate of
        Benjamini and Hochberg; None: p < alpha.
        """
        if not 0 < alpha < 1:
            raise InputError(f"alpha must lie between 0 and 1. Got {alpha}.")
        if correction not in ("bonferroni", "fdr", None):
            raise InputError(f"correction must be 'bonferroni', 'fdr' or None. Got {correction!r}.")
        if correction == "fdr":
            return self.q <= alpha
        level = alpha / max(int(self.tested.sum()), 1) if correction == "bonferroni" else alpha
        return self.tested & (self.p < level)


def stat_map(
    values: Any,
    target: ArrayLike,
    *,
    covariates: Any = None,
    sites: Any = None,
    positive: Any = None,
    subject: Any = None,
) -> StatMap:
    """Regress every voxel on the target, with covariates and sites adjusted where they are given.

    Parameters
    ----------
    values
        (rows, voxels): an array, or an object with ``shape`` and ``columns(start, stop)``, such as
        memory-mapped volumes.
    target
        Two classes, as any labels, or numbers. The effect is the second class in sorted order minus the
        first, or ``positive`` minus the other; for more than two numbers it is the slope.
    covariates
        What to adjust for, linearly: (rows,) or (rows, K); a column of two text levels is 0 and 1.
    sites
        Labels; each site then has an intercept.
    subject
        The participant of each row, where participants have several: each counts once, with mean values.

    Examples
    --------
    >>> values = np.array([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0], [6.0, 5.0]])
    >>> result = stat_map(values, ["CN", "CN", "AD", "AD"], positive="AD")
    >>> result.effect.round(9).tolist(), result.tested.tolist(), result.contrast
    ([3.5, 0.0], [True, False], 'AD - CN')
    """
    if not hasattr(values, "columns") or isinstance(values, pd.DataFrame):
        values = np.asarray(values)
    if len(values.shape) != 2 or 0 in values.shape:
        text = "values must be rows by voxels, at least one of each"
        raise InputError(f"{text}. Got shape {tuple(values.shape)}.")
    n, voxels = values.shape
    given = {"target": target, "covariates": covariates, "sites": sites, "subject": subject}
    for what, column in given.items():
        if column is not None and len(column) != n:
            raise InputError(f"{what} has {len(column)} values for {n} rows; give one for each row.")
    site = np.zeros(n) if sites is None else sites
    inputs = Inputs.from_arrays(None, site=site, covariates=covariates, y=target, task="class")
    check_inputs(inputs, pooled=False)
    y, contrast = _target(inputs.target, positive)
    means = None if subject is None else _participant_means(subject, y, classes=bool(contrast))
    basis, scale = _basis(y, inputs, means)
    n = len(basis)
    df = n - basis.shape[1]
    effect, t, tested = np.zeros(voxels), np.zeros(voxels), np.zeros(voxels, dtype=bool)
    for part, tile in _tiles(values):
        effect[part], t[part], tested[part] = _regress(tile if means is None else means @ tile, basis, scale)
    p = np.where(tested, 2 * special.stdtr(df, -np.abs(t)), 1.0)
    return StatMap(t, p, effect, df, n, tested, contrast)


def _participant_means(subject: Any, target: FloatArray, *, classes: bool) -> sparse.csr_array:
    """Return the matrix that averages rows by participant, (participants, rows); refuse changes of class."""
    labels = parse_labels(subject)
    if None in labels:
        raise InputError(f"subject is empty in row {list(labels).index(None) + 1}; say whose row it is.")
    names, codes, counts = np.unique(labels.astype(str), return_inverse=True, return_counts=True)
    ranges = pd.Series(target).groupby(codes)
    mixed = names[ranges.max() > ranges.min()]
    if classes and len(mixed):
        raise InputError(
            f"{plural(len(mixed), 'participant is', 'participants are')} of one class of the target at one "
            f"visit, of the other at another ({listed(mixed)}); give the visits of one class, or one a "
            "participant."
        )
    return sparse.csr_array((1.0 / counts[codes], (codes, np.arange(len(codes)))))


def _tiles(values: Any) -> Iterator[tuple[slice, FloatArray]]:
    """Yield a few voxels at a time, checked, with their places."""
    for start in range(0, values.shape[1], TILE):
        part = slice(start, min(start + TILE, values.shape[1]))
        some = values.columns(part.start, part.stop) if hasattr(values, "columns") else values[:, part]
        tile = np.ascontiguousarray(some, dtype=np.float64)
        if not np.isfinite(tile).all():
            row, column = np.argwhere(~np.isfinite(tile))[0]
            raise InputError(
                f"Voxel {start + column + 1} of row {row + 1} is {tile[row, column]}; every voxel needs a "
                "finite number: fill it in, or leave it out of the mask."
            )
        yield part, tile


def _regress(tile: FloatArray, basis: FloatArray, scale: float) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Return effect, t and what could be tested; the target is the last column of the orthonormal basis Q.

    With b = Qᵀy the residual sum of squares is ‖y − Qb‖², the effect b_K / scale, and t = b_K / s.
    """
    part = basis.T @ tile
    residuals = tile - basis @ part
    rest = np.einsum("ij,ij->j", residuals, residuals)
    # What rounding alone leaves of a voxel; below it there is nothing to test.
    rounding = (EPS * len(tile)) ** 2 * np.einsum("ij,ij->j", tile, tile)
    tested = (tile != tile[0]).any(axis=0) & (part[-1] ** 2 + rest > rounding)
    # A voxel that the target explains to the last bit has a huge t, not an infinite one.
    spread = np.sqrt(np.maximum(rest, rounding) / (len(basis) - basis.shape[1]))
    t = np.divide(part[-1], spread, out=np.zeros_like(spread), where=tested)
    return np.where(tested, part[-1] / scale, 0.0), t * np.sign(scale), tested


# -- the design --------------------------------------------------------------------------------------------


def _target(labels: Any, positive: Any) -> tuple[FloatArray, str]:
    """Return the target as numbers (classes as 0 and 1) and what a positive effect means."""
    numbers = as_numbers(pd.Series(labels)).to_numpy(dtype=np.float64)
    numeric = bool(np.isfinite(numbers).all())
    levels = sorted(set(labels), key=float if numeric else None)
    if len(levels) < 2:
        what = f"The target is {levels[0]!r} in every row"
        raise InputError(f"{what}; a t-map compares participants who differ in it.")
    if len(levels) > 2 and not numeric:
        what = f"The target has {len(levels)} classes ({listed(levels)})"
        raise InputError(f"{what}; choose the rows of two of them, or give numbers.")
    if positive is not None:
        wanted = parse_labels([positive])[0]
        if len(levels) != 2 or wanted not in levels:
            what = f"positive must be one of the target's two classes. Got {positive!r}"
            raise InputError(f"{what}; the target is {listed(levels)}.")
        levels.sort(key=lambda level: level == wanted)
    if len(levels) > 2:
        return numbers, ""
    return (labels == levels[1]).astype(np.float64), f"{levels[1]} - {levels[0]}"


def _basis(y: FloatArray, inputs: Inputs, means: sparse.csr_array | None) -> tuple[FloatArray, float]:
    """Return an orthonormal basis of the design, the target last, and the norm of the target's residual."""
    intercepts, C = (inputs.site[:, None] == inputs.sites).astype(np.float64), inputs.covariates
    if means is not None:
        intercepts, C, y = means @ intercepts, means @ C, means @ y
        # Where all participants travelled between the same sites, these have one intercept.
        intercepts, size, _ = np.linalg.svd(intercepts, full_matrices=False)
        intercepts = intercepts[:, size > COLLINEAR * size[0]]
    count = intercepts.shape[1] + C.shape[1] + 1
    if len(y) <= count:
        raise InputError(
            f"There are {plural(len(y), 'participant')} for {count} coefficients (intercepts, covariates, "
            f"target); at least {count + 1} are needed."
        )
    # Centred, so that rounding can be distinguished from variation, wherever a covariate's zero lies.
    columns = np.column_stack([C - C.mean(axis=0), y - y.mean()])
    Q, R = np.linalg.qr(np.column_stack([intercepts, columns]))
    collinear = np.abs(np.diagonal(R)) <= COLLINEAR * np.linalg.norm(R, axis=0)
    fixed = np.flatnonzero(collinear[intercepts.shape[1] :])
    if len(fixed):
        _refuse_collinear(fixed[0], intercepts, columns, inputs.covariate_names)
    return Q, float(R[-1, -1])


def _refuse_collinear(
    k: int, intercepts: FloatArray, columns: FloatArray, names: tuple[str, ...]
) -> NoReturn:
    """Raise an error for a covariate or the target that columns before it determine, and name both."""
    column = columns[:, k]
    if k < len(names) and np.ptp(column) == 0:
        raise InputError(f"The covariate {names[k]!r} is the same in every row; leave it out.")
    before = {"the sites": intercepts} if intercepts.shape[1] > 1 else {}
    before |= {repr(name): columns[:, [j]] for j, name in enumerate(names[:k])}
    residuals = {name: column - part @ np.linalg.lstsq(part, column)[0] for name, part in before.items()}
    limit = COLLINEAR * np.linalg.norm(column)
    alone = [name for name, residual in residuals.items() if np.linalg.norm(residual) <= limit]
    cause = alone[0] if alone else " and ".join(before)
    if k < len(names):
        raise InputError(f"The covariate {names[k]!r} is fixed by {cause}; leave one of them out.")
    what = f"The target is fixed by {cause}, so their effects cannot be separated"
    raise InputError(f"{what}; adjust for less, or take participants for whom they differ.")


# -- maps in space, and beside the truth -------------------------------------------------------------------


def in_volume(values: ArrayLike, mask: ArrayLike, *, fill: float = 0.0) -> FloatArray:
    """Put one value for each voxel of the mask, in the order of ``volume[mask]``, back into a volume.

    Examples
    --------
    >>> in_volume([5.0, 7.0], [[[True, False], [False, True]]]).tolist()
    [[[5.0, 0.0], [0.0, 7.0]]]
    """
    inside, values = np.asarray(mask) != 0, np.asarray(values)
    if inside.ndim != 3 or values.shape != (inside.sum(),):
        raise InputError(
            f"The mask has shape {inside.shape} and {inside.sum()} voxels, the map has shape {values.shape}; "
            "give the mask of three axes that the voxels were taken with."
        )
    volume = np.full(inside.shape, fill)
    volume[inside] = values
    return volume


def clusters(
    statistics: StatMap, mask: ArrayLike, affine: ArrayLike, *, keep: ArrayLike | None = None
) -> pd.DataFrame:
    """List the groups of voxels connected by faces, the largest first, positive and negative effects apart.

    ``mask`` and ``affine`` are of the volume that the voxels were taken from; coordinates are in its mm.
    ``keep`` says which voxels to group, (voxels,); default: those significant by Bonferroni at 0.001. The
    table has cluster (from 1), voxels, mm3, peak_t, peak_p, peak_x, peak_y, peak_z, and centre_x, centre_y,
    centre_z, the mean place weighted by ``|t|``.
    """
    affine = np.asarray(affine, dtype=np.float64)
    # Rounded, because numpy's determinant of a diagonal 8, 8, 8 is 511.9999999999994.
    size = round(abs(float(np.linalg.det(affine[:3, :3]))), 9)
    t, p = in_volume(statistics.t, mask), in_volume(statistics.p, mask, fill=1.0)
    kept = in_volume(statistics.significant() if keep is None else keep, mask) > 0
    rows = []
    for side in (t > 0, t < 0):
        labels, _ = ndimage.label(kept & side)
        for k, box in enumerate(ndimage.find_objects(labels), start=1):
            place = np.argwhere(labels[box] == k) + [axis.start for axis in box]
            voxels = tuple(place.T)
            peak = np.argmax(np.abs(t[voxels]))
            centre = np.average(place, axis=0, weights=np.abs(t[voxels]))
            mm = np.stack([place[peak], centre]) @ affine[:3, :3].T + affine[:3, 3]
            rows.append((len(place), len(place) * size, t[voxels][peak], p[voxels][peak], *mm[0], *mm[1]))
    rows.sort(key=lambda row: (-row[0], -abs(row[2])))
    places = [f"{what}_{axis}" for what in ("peak", "centre") for axis in "xyz"]
    columns = ["cluster", "voxels", "mm3", "peak_t", "peak_p", *places]
    return pd.DataFrame([(k, *row) for k, row in enumerate(rows, start=1)], columns=columns)


class Detection(NamedTuple):
    """How a map agrees with the truth.

    ``found`` and ``false`` are the shares of truly affected and of unaffected voxels that are called; ``auc``
    is the area under the ROC curve: how often an affected voxel has a larger score than an unaffected one.
    The score is ``|t|``, or t in the true effect's direction.
    """

    found: float
    false: float
    auc: float


def detection(
    statistics: StatMap,
    affected: ArrayLike,
    unaffected: ArrayLike,
    *,
    alpha: float = 0.001,
    correction: Correction = "bonferroni",
    false_rate: float | None = None,
    direction: ArrayLike | None = None,
) -> Detection:
    """Return which share of truly affected voxels is called, and which of unaffected ones.

    ``affected`` and ``unaffected`` are the truth, (voxels,) each; voxels in neither do not count. One that
    could not be tested is not called. Called are the significant voxels (:meth:`StatMap.significant`), or,
    with ``false_rate``, those above the lowest threshold that calls no more than this share of the
    unaffected: methods compared so differ in power alone, not in how freely they call. ``direction`` has the
    sign of the true effect, (voxels,) or one for all: a voxel counts as called in this direction alone, and
    in either where it is 0. Default: either direction, everywhere.
    """
    if false_rate is not None and not 0 <= false_rate < 1:
        raise InputError(f"false_rate must lie between 0 and 1. Got {false_rate}.")
    yes, no = np.asarray(affected), np.asarray(unaffected)
    for name, flags in {"affected": yes, "unaffected": no}.items():
        if flags.shape != statistics.t.shape:
            what = f"{name} must say yes or no for each of the map's {len(statistics.t)} voxels"
            raise InputError(f"{what}. Got shape {flags.shape}.")
    yes, no = yes.astype(bool), no.astype(bool)
    if not yes.any() or not no.any() or (yes & no).any():
        what = f"There are {yes.sum()} affected and {no.sum()} unaffected voxels, {(yes & no).sum()} both"
        raise InputError(f"{what}; give at least one of each, and none as both.")
    sign = np.broadcast_to(np.sign(0 if direction is None else direction), statistics.t.shape)
    score = np.where(sign == 0, np.abs(statistics.t), sign * statistics.t)
    if false_rate is None:
        called = statistics.significant(alpha=alpha, correction=correction) & (score > 0)
    else:
        # A little is added because 0.29 · 100 is 28.999…
        called = score > np.sort(score[no])[-1 - int(false_rate * no.sum() + 1e-9)]
    either = yes | no
    area = float(roc_auc_score(yes[either], score[either]))
    return Detection(float(called[yes].mean()), float(called[no].mean()), area)
