"""What users give estimators, parsed, and what the harmonizers share: sites, the design and the target."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin

from equipool.checks import Inputs, Task
from equipool.checks.findings import listed, plural
from equipool.checks.inputs import covariate_frame, parse_covariates, parse_labels, require_length
from equipool.checks.units import Seen
from equipool.data import PooledDataset
from equipool.data.covariates import Covariate, scaled
from equipool.data.nifti import Frame, read_header
from equipool.data.splits import deal
from equipool.data.volumes import Volumes
from equipool.estimators.persistence import save
from equipool.exceptions import EquipoolWarning, InputError
from equipool.randomness import seed_for
from equipool.sites.design import Design
from equipool.sites.effect import FloatArray, IntArray

FOLDS = 5  # of participants, for choices in fit
MIN_ROWS_TO_ADAPT = 10  # of a new site; of fewer, the shift is mostly that of these participants


@dataclass(kw_only=True, eq=False, repr=False)
class Harmonizer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the harmonizers, whose ``fit`` and ``transform`` take site and covariates with X."""

    unseen_site: Literal["error", "pooled", "adapt"] = "error"
    keep_target: bool = False
    random_state: int | None = None
    sites_: NDArray[np.str_] = field(init=False)
    model_: Any = field(init=False)

    _learned: ClassVar[type]
    save = save

    def fit_transform(
        self: Any, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None, **more: Any
    ) -> Any:
        """Fit, and transform the same rows; arguments as for ``fit``."""
        self.fit(X, y, site=site, covariates=covariates, **more)
        return self.transform(X, site=site, covariates=covariates)

    @property
    def _seed(self) -> int:
        return int(self.random_state or 0)

    def _require_choices(self, **allowed: tuple[str, ...]) -> None:
        """Refuse settings that mean nothing."""
        for name, values in {"unseen_site": ("error", "pooled", "adapt"), **allowed}.items():
            if getattr(self, name) not in values:
                raise InputError(f"{name} must be one of {', '.join(values)}. Got {getattr(self, name)!r}.")
        if not isinstance(self.keep_target, bool | np.bool_):
            raise InputError(f"keep_target must be True or False. Got {self.keep_target!r}.")

    def _design(self, inputs: Inputs, covariates: FloatArray, participant: Any = None) -> Design:
        """Learn the sites, and return the design; without participants, each row is one."""
        self.sites_, site = np.unique(inputs.site.astype(str), return_inverse=True)
        who = np.arange(inputs.n_rows) if participant is None else participant
        _, first, index = np.unique(who, return_index=True, return_inverse=True)
        # Folds are dealt to participants, by the site of their first row.
        fold = deal([site[first]], [], min(FOLDS, len(first)), seed_for(self._seed, "folds"))
        return Design(
            site=site.astype(np.intp),
            covariates=covariates,
            target=target_columns(inputs),
            weight=1 / np.bincount(index)[index].astype(np.float64),
            fold=fold[index],
            n_sites=len(self.sites_),
        )

    @property
    def site_index(self) -> dict[str, int]:
        """The sites' indices; 1 and 1.0 are the same site, whatever else is in the batch."""
        index = {str(name): k for k, name in enumerate(self.sites_)}
        return index | {name[:-2]: k for name, k in index.items() if name.endswith(".0")}

    def _site_index(self, labels: NDArray[Any]) -> IntArray:
        """Return site indices; −1 for a site that was not in the data of the fit, if that is allowed."""
        index = self.site_index
        unseen = sorted({str(label) for label in labels} - set(index))
        if unseen and self.unseen_site == "error":
            raise InputError(
                f"Site {unseen[0]!r} was not seen at fit; there were {listed(self.sites_, shown=8)}. "
                'Use unseen_site="adapt" (--unseen-site adapt) to estimate it from its participants, or '
                '"pooled" to leave them as they are.'
            )
        return np.array([index.get(str(label), -1) for label in labels], dtype=np.intp)

    def _with_new_sites(
        self, labels: NDArray[Any], index: IntArray, add: Callable[[Any, NDArray[np.bool_]], Any]
    ) -> tuple[Any, IntArray]:
        """Return the model with each new site, if asked to adapt; ``add(model, rows)`` adds one."""
        model, index, small = self.model_, index.copy(), []
        new = (index < 0) & (self.unseen_site == "adapt")
        for name in sorted({str(label) for label in labels[new]}):
            rows = labels.astype(str) == name
            small += [name] if rows.sum() < MIN_ROWS_TO_ADAPT else []
            model = add(model, rows)
            index[rows] = len(model.n_participants) - 1
        if small:
            warnings.warn(
                f"{plural(len(small), 'new site')} with fewer than {MIN_ROWS_TO_ADAPT} rows "
                f"({listed(small)}): what is removed there is partly what distinguishes these participants. "
                "Bring more of them at once.",
                EquipoolWarning,
                stacklevel=4,
            )
        return model, index


def given_sites(
    site: Any,
    rows: int,
    otherwise: str = "name its column in X with site_column=. To have it estimated from the features, set "
    "infer=True (--infer)",
) -> NDArray[Any]:
    """Return the label of each row's site; without one, an error says to pass it, or what to do otherwise."""
    if site is None:
        raise InputError(f"The site of each row is needed: pass site=, or {otherwise}.")
    if isinstance(site, str):
        raise InputError(f"site must have one value for each row, such as [{site!r}]. Got the text {site!r}.")
    remedy = "fill it in, or leave site out and have it inferred (infer=True, --infer)"
    return labels_of("site", site, rows, remedy)


def learned_from(fit_on: Any, rows: int) -> NDArray[np.bool_]:
    """Return which rows to learn from, all by default."""
    mask = np.ones(rows, dtype=bool) if fit_on is None else np.asarray(fit_on)
    if mask.shape != (rows,) or mask.dtype != bool:
        what = f"fit_on must be a mask of True and False with {rows} values, such as (dx == 'CN')"
        raise InputError(f"{what}. Got shape {mask.shape} of {mask.dtype}.")
    if not mask.any():
        raise InputError("fit_on selects no row; nothing can be learned.")
    return mask


def labels_of(name: str, values: Any, rows: int, remedy: str) -> NDArray[Any]:
    """Return labels with one for each row."""
    labels = parse_labels(values)
    if labels.shape != (rows,):
        raise InputError(f"{name} must have one value for each of the {rows} rows. Got shape {labels.shape}.")
    for row in np.flatnonzero([label is None for label in labels]):
        raise InputError(f"{name} has no value in row {row + 1}; {remedy}.")
    return labels


def inputs_of(
    X: Any, rows: NDArray[np.bool_], *, site: Any, covariates: Any, y: Any, task: Task | None = None
) -> Inputs:
    """Return the rows to learn from, parsed; X and covariates have no others, site and target have all."""

    def chosen(values: Any, name: str) -> Any:
        values = values if hasattr(values, "iloc") else np.asarray(values)
        require_length(name, values, len(rows))
        return values.reset_index(drop=True)[rows] if hasattr(values, "iloc") else values[rows]

    return Inputs.from_arrays(
        X,
        site=np.zeros(rows.sum(), dtype=int) if site is None else chosen(site, "site"),
        covariates=covariates,
        y=None if y is None else chosen(y, "y"),
        task=task,
    )


def target_columns(inputs: Inputs) -> FloatArray:
    """Return the target as standardised columns, (rows, E): the number, or all classes but the first."""
    if inputs.target is None:
        return np.empty((inputs.n_rows, 0))
    if inputs.task == "number":
        columns = np.asarray(inputs.target, dtype=np.float64)[:, None]
    else:
        levels = sorted(set(inputs.target))[1:]
        columns = np.column_stack([(inputs.target == level).astype(np.float64) for level in levels])
    deviation = columns.std(axis=0)
    return (columns - columns.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)


def support(inputs: Inputs, site: IntArray) -> FloatArray:
    """Return each site's range of each covariate, and how far it reaches beyond all others.

    (covariates, sites, 4): the least and the greatest value, the share of rows that lie beyond the other
    sites' ranges, and how far the farthest does.
    """
    table = np.empty((inputs.covariates.shape[1], site.max() + 1, 4))
    for ranges, values in zip(table, inputs.covariates.T, strict=True):
        of_site = pd.Series(values).groupby(site)
        ranges[:, 0], ranges[:, 1] = of_site.min(), of_site.max()
        low, high = _least_of_others(ranges[:, 0]), -_least_of_others(-ranges[:, 1])
        beyond = np.maximum(np.maximum(low[site] - values, values - high[site]), 0.0)
        ranges[:, 2] = pd.Series(beyond > 0).groupby(site).mean()
        ranges[:, 3] = pd.Series(beyond).groupby(site).max()
    return table


def _least_of_others(values: FloatArray) -> FloatArray:
    """Return for each value the least of the others, −∞ where there are none."""
    first, second = np.sort(values)[:2] if len(values) > 1 else (-np.inf, -np.inf)
    return np.where(values == first, second, first)


def as_volumes(X: Any, mask: Any = None, affine: Any = None) -> Volumes | None:
    """Return volumes if X is volumes, paths of images or a pool of images; ``None`` if it is a table.

    Given the mask and the affine of a fitted estimator, files are read with that mask, and volumes on another
    grid are refused.
    """
    paths = _paths_of(X, mask)
    if paths:
        grid = None if mask is None else read_header(Path(paths[0]))
        if isinstance(grid, Frame):
            _require_grid(grid.shape, grid.affine, mask, affine)
        X = Volumes.build(paths, mask=mask)
    if not isinstance(X, Volumes):
        return None
    if mask is not None:
        _require_grid(X.mask.shape, X.affine, mask, affine)
        if not (X.mask == mask).all():
            what = "These volumes were cut out by another mask than at fit"
            raise InputError(f"{what}; build them with that one.")
    return X


def _paths_of(X: Any, mask: Any) -> list[Any]:
    """Return the paths of images that are to be read; none of a table, and of volumes that are read."""
    if isinstance(X, Volumes):
        # Values that were changed in memory are in no file, so they are not read again with the mask.
        again = mask is not None and X.scales is not None and not np.array_equal(X.mask, mask)
        return list(X.paths) if again else []
    if isinstance(X, PooledDataset) and X.images is not None:
        return list(X.images)
    X = [X] if isinstance(X, str | Path) else X
    # A frame is no list of paths, although it iterates over names.
    listed = hasattr(X, "__len__") and not hasattr(X, "columns") and len(X) > 0
    return list(X) if listed and all(isinstance(x, str | Path) for x in X) else []


def _require_grid(shape: tuple[int, ...], place: FloatArray, mask: Any, affine: Any) -> None:
    def grid(shape: tuple[int, ...], affine: FloatArray) -> str:
        size, corner = np.linalg.norm(affine[:3, :3], axis=0), affine[:3, 3]
        voxels = f"{' × '.join(map(str, shape))} voxels of {' × '.join(f'{s:.3g}' for s in size)} mm"
        return f"{voxels} from ({', '.join(f'{c:.4g}' for c in corner)})"

    if shape != mask.shape or np.abs(place - affine).max() > 1e-3:
        raise InputError(
            f"The estimator was fitted on a grid of {grid(mask.shape, affine)}; these volumes have "
            f"{grid(shape, place)}. Resample them to the grid of the training images."
        )


def seen_at_fit(model: Any) -> list[Seen]:
    """Return the range of each numeric covariate at the fit of a harmonizer, and of each of its features.

    Of a feature, two standard deviations around its mean, but not below the least value of a positive one.
    """
    if hasattr(model, "covariates_"):
        ends = [(one.centre - one.scale, one.centre + one.scale) for one in model.covariates_]
        covariates = [(one.name, one.levels) for one in model.covariates_]
        features = []
    else:
        ranges = model.support_.groupby("covariate", sort=False).agg({"low": "min", "high": "max"})
        ends = list(ranges.itertuples(index=False, name=None))
        covariates = list(zip(model.encoding_.names, model.encoding_.levels, strict=True))
        kept, mean, reach = model.harmonized_, model.feature_mean_, 2 * model.feature_scale_
        low = np.where(model.floor_ > 0, np.maximum(mean - reach, 2 * model.floor_), mean - reach)
        table = zip(model.get_feature_names_out()[kept], low[kept], (mean + reach)[kept], strict=True)
        features = [Seen(str(name), low, high, is_covariate=False) for name, low, high in table]
    both = zip(covariates, ends, strict=True)
    return [Seen(name, *end, True) for (name, levels), end in both if levels is None] + features


def given_covariates(values: Any, covariates: tuple[Covariate, ...], rows: int) -> FloatArray:
    """Return covariates that are given after fit, one row for each of so many, as scaled at fit."""
    names = tuple(one.name for one in covariates)
    if names and values is None:
        raise InputError(f"This estimator keeps {listed(names)}; give covariates to transform, as to fit.")
    frame = covariate_frame(values if names else None, rows, names=names)
    return scaled(parse_covariates(frame, names, [one.levels for one in covariates]), covariates)
