"""PooledDataset: rows from several sites, with features or images, a target and covariates."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks import Arrays, Inputs, Missing, Roles, Task, check_inputs
from equipool.checks.findings import listed, plural
from equipool.checks.inputs import FloatArray
from equipool.data.covariates import Covariate, covariates_of, scaled
from equipool.data.splits import IntArray, deal, systematic
from equipool.data.tables import image_paths, read_table
from equipool.exceptions import InputError, did_you_mean

Stratum = Literal["site", "target"] | str


@dataclass(frozen=True, eq=False)
class PooledDataset:
    """A checked, immutable pool of rows from several sites.

    Build it with :meth:`from_arrays`, :meth:`from_frame` or :meth:`read`; select rows with ``pool[rows]``. A
    selection keeps the sites and the covariates' scale of the whole pool, so that training and test rows have
    the same codes.

    Examples
    --------
    >>> pool = PooledDataset.from_arrays([[1.0], [2.0], [3.0], [4.0]], site=["A", "A", "B", "B"],
    ...                                  covariates=[20.0, 30.0, 60.0, 70.0], covariate_names=["age"])
    >>> pool
    PooledDataset: 4 rows, 1 feature, 2 sites (A, B), covariates age
    >>> pool[pool.C[:, 0] > 25].ids.tolist()
    ['2', '3', '4']
    """

    X: FloatArray | None  #: features (rows, features), or ``None`` for a pool of images
    images: tuple[Path, ...] | None  #: paths of the images, or ``None``
    y: NDArray[Any] | None  #: target: class labels or numbers, or ``None``
    site: IntArray  #: index of each row's site in ``sites``
    sites: tuple[str, ...]  #: the sites' names, in order
    C: FloatArray  #: covariates (rows, K) in their units; :attr:`scaled` has them in [−1, 1]
    covariates: tuple[Covariate, ...]  #: name, unit and scale of each
    ids: NDArray[np.object_]  #: one for each row
    feature_names: tuple[str, ...] = ()
    target_name: str = "target"
    task: Task | None = None
    site_name: str = "site"
    id_name: str = "id"

    def __post_init__(self) -> None:
        for array in (self.X, self.y, self.site, self.C, self.ids):
            if array is not None:
                array.setflags(write=False)

    @classmethod
    def from_arrays(
        cls,
        X: Any = None,
        *,
        site: Any,
        images: Iterable[str | Path] | None = None,
        units: Mapping[str, str] | None = None,
        missing: Missing = "error",
        **arrays: Unpack[Arrays],
    ) -> Self:
        """Build a pool from arrays, lists, series or frames of one length; give X or images.

        Parameters
        ----------
        X, images
            Features (rows, features), or paths of images.
        site, ids
            The site of each row, and its id (default: its number).
        covariates, covariate_names, units
            Numbers (rows,) or (rows, K), their names, and their units by name.
        y, task
            The target, and whether it is a ``"class"`` or a ``"number"`` (default: guessed).
        missing
            ``"error"``: refuse missing features; ``"impute"``: keep them for the imputer.
        """
        paths = None if images is None else image_paths(pd.DataFrame({"images": list(images)}), "images")
        if (X is None) == (paths is None):
            raise InputError("Give either X (features) or images (paths); got both or neither.")
        if paths is not None and len(paths) != len(site):
            images_given = plural(len(paths), "image")
            raise InputError(f"site has {len(site)} values for {images_given}; give one for each.")
        inputs = Inputs.from_arrays(X, site=site, **arrays)
        return cls.from_inputs(inputs, images=paths, units=units, missing=missing)

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        *,
        site: str,
        images: str | None = None,
        units: Mapping[str, str] | None = None,
        missing: Missing = "error",
        like: Self | None = None,
        **roles: Unpack[Roles],
    ) -> Self:
        """Build a pool from a table; the arguments name its columns as in :func:`equipool.check`.

        ``images`` names a column of paths; the pool then holds these in place of features. ``like`` is a pool
        whose sites, levels, scales and task are to be used: for new rows, even a single one. Sites that it
        does not have come last.
        """
        paths = None if images is None else image_paths(frame, images)
        if like is not None:
            levels = {covariate.name: covariate.levels for covariate in like.covariates}
            roles = {**roles, "levels": levels, "task": like.task, "features": like.feature_names}
        inputs = Inputs.from_frame(frame, site=site, images=images, **roles)
        return cls.from_inputs(inputs, images=paths, units=units, missing=missing, like=like)

    @classmethod
    def read(cls, path: str | Path, *, site: str, **roles: Any) -> Self:
        """Build a pool from a CSV, TSV or Parquet file; arguments as for :meth:`from_frame`."""
        return cls.from_frame(read_table(path, labels=[site, roles.get("id")]), site=site, **roles)

    @classmethod
    def from_inputs(
        cls,
        inputs: Inputs,
        *,
        images: tuple[Path, ...] | None = None,
        units: Mapping[str, str] | None = None,
        missing: Missing = "error",
        like: Self | None = None,
    ) -> Self:
        """Check inputs that are parsed already, and build a pool of them."""
        check_inputs(inputs, missing=missing, pooled=like is None)
        covariates = covariates_of(inputs, units) if like is None else like.covariates
        if like is not None and inputs.covariate_names != like.covariate_names:
            what = f"The pool has the covariates {list(like.covariate_names)}"
            got = f"Got {list(inputs.covariate_names)}"
            raise InputError(f"{what}. {got}; give the same in the same order.")
        # The sites of the pool that these rows are like come first.
        sites = tuple(dict.fromkeys([*(() if like is None else like.sites), *inputs.sites]))
        ids = np.arange(1, inputs.n_rows + 1).astype(str) if inputs.ids is None else inputs.ids
        return cls(
            X=inputs.X.copy() if images is None else None,
            images=images,
            y=None if inputs.target is None else inputs.target.copy(),
            site=pd.Index(sites).get_indexer(inputs.site),
            sites=sites,
            C=inputs.covariates.copy(),
            covariates=covariates,
            ids=ids.astype(object),
            feature_names=inputs.feature_names if images is None else (),
            target_name=inputs.target_name,
            task=inputs.task,
            site_name=inputs.site_name,
            id_name=inputs.id_name,
        )

    def __len__(self) -> int:
        return len(self.site)

    def __repr__(self) -> str:
        what = "images" if self.X is None else plural(self.X.shape[1], "feature")
        names = ", ".join(self.sites[:4]) + (", …" if len(self.sites) > 4 else "")
        parts = [plural(len(self), "row"), what, f"{plural(len(self.sites), 'site')} ({names})"]
        if self.covariates:
            parts.append("covariates " + ", ".join(self.covariate_names))
        if self.y is not None:
            parts.append(f"target {self.target_name}")
        return f"PooledDataset: {', '.join(parts)}"

    @property
    def features(self) -> FloatArray:
        """X, for code that needs features; a pool of images has none."""
        if self.X is None:
            raise InputError("This pool holds images; features are needed here.")
        return self.X

    @property
    def scaled(self) -> FloatArray:
        """The covariates in scaled units, (rows, K): what :class:`CovariateAction` takes."""
        return scaled(self.C, self.covariates)

    @property
    def covariate_names(self) -> tuple[str, ...]:
        """The covariates' names, in order."""
        return tuple(covariate.name for covariate in self.covariates)

    @property
    def site_labels(self) -> NDArray[np.object_]:
        """The name of each row's site."""
        return np.array(self.sites, dtype=object)[self.site]

    @property
    def labelled_covariates(self) -> pd.DataFrame:
        """The covariates as they were given, categories by their labels."""
        columns = {
            one.name: self.C[:, k] if one.levels is None else [one.levels[int(v)] for v in self.C[:, k]]
            for k, one in enumerate(self.covariates)
        }
        return pd.DataFrame(columns, index=range(len(self)))

    def covariate(self, name: str) -> FloatArray:
        """Return one covariate by name, in its unit."""
        if name not in self.covariate_names:
            otherwise = f"it has {listed(self.covariate_names, shown=12)}."
            hint = did_you_mean(name, self.covariate_names, otherwise)
            raise InputError(f"The pool has no covariate {name!r}; {hint}")
        return self.C[:, self.covariate_names.index(name)]

    def to_frame(self) -> pd.DataFrame:
        """Return the pool as a table: id, site, target, covariates, then features or image paths."""
        columns: dict[str, Any] = {}

        def add(name: str, values: Any) -> None:
            while name in columns or name in self.feature_names:
                name += "_"
            columns[name] = values

        add(self.id_name, self.ids)
        add(self.site_name, self.site_labels)
        if self.y is not None:
            add(self.target_name, self.y)
        for name, values in self.labelled_covariates.items():
            add(str(name), values)
        if self.X is None:
            add("image", [str(path) for path in self.images or ()])
            return pd.DataFrame(columns)
        features = pd.DataFrame(self.X, columns=list(self.feature_names))
        return pd.concat([pd.DataFrame(columns), features], axis=1)

    def __getitem__(self, rows: Any) -> Self:
        """Select rows by a mask, positions or a slice; sites and scales stay those of the whole."""
        positions = np.arange(len(self))[rows]
        if positions.ndim != 1:
            raise InputError("Select rows with a mask, a list of positions or a slice, not a single number.")
        images = None if self.images is None else tuple(self.images[k] for k in positions)
        arrays = {name: getattr(self, name) for name in ("X", "y", "site", "C", "ids")}
        parts: Any = {name: None if array is None else array[positions] for name, array in arrays.items()}
        return replace(self, images=images, **parts)

    def split(
        self, test_size: float = 0.2, *, stratify: Stratum | Sequence[Stratum] = "site", random_state: int = 0
    ) -> tuple[IntArray, IntArray]:
        """Return (train, test) row positions with every stratum in proportion.

        ``stratify`` names ``"site"``, ``"target"`` and covariates, in order of importance.
        """
        if not 0 < test_size < 1:
            raise InputError(f"test_size must be a share between 0 and 1. Got {test_size}.")
        if len(self) < 2:
            raise InputError(f"A pool of {len(self)} row(s) cannot be split.")
        test = systematic(*self._strata(stratify), test_size, random_state)
        if test.all() or not test.any():
            # So few rows that the share rounds to none or all: one row goes to the other side.
            test[int(random_state) % len(self)] ^= True
        return np.flatnonzero(~test), np.flatnonzero(test)

    def folds(
        self, n_folds: int = 5, *, stratify: Stratum | Sequence[Stratum] = "site", random_state: int = 0
    ) -> list[tuple[IntArray, IntArray]]:
        """Return (train, test) positions of each fold, for scikit-learn's ``cv=``; see :meth:`split`."""
        if not 2 <= n_folds <= len(self):
            raise InputError(f"n_folds must be between 2 and the {len(self)} rows. Got {n_folds}.")
        part = deal(*self._strata(stratify), n_folds, random_state)
        return [(np.flatnonzero(part != k), np.flatnonzero(part == k)) for k in range(n_folds)]

    def leave_one_site_out(self) -> list[tuple[IntArray, IntArray]]:
        """Return (train, test) positions with each site in turn as the test set, in their order."""
        return [
            (np.flatnonzero(self.site != k), np.flatnonzero(self.site == k)) for k in np.unique(self.site)
        ]

    def _strata(self, stratify: Stratum | Sequence[Stratum]) -> tuple[list[IntArray], list[FloatArray]]:
        labels: list[IntArray] = []
        numbers: list[FloatArray] = []
        for name in [stratify] if isinstance(stratify, str) else stratify:
            if name == "target" and self.y is None:
                raise InputError("The pool has no target to stratify by.")
            if name == "site":
                labels.append(self.site)
            elif name == "target" and self.task == "class":
                classes = np.unique(np.asarray(self.y, dtype=str), return_inverse=True)[1]
                labels.append(classes.astype(np.intp))
            else:
                numbers.append(np.asarray(self.y) if name == "target" else self.covariate(name))
        return (labels or [np.zeros(len(self), dtype=np.intp)]), numbers
