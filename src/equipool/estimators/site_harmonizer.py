"""SiteHarmonizer: a table without what its sites did."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from equipool.checks import Inputs, Missing, check_inputs, refuse_text
from equipool.checks.errors import warn_of_no_site, warn_of_small_sites
from equipool.checks.findings import listed, plural
from equipool.checks.inputs import parse_covariates, parse_labels, require_columns
from equipool.checks.overlap import NINE_TENTHS, nine_tenths_of_sorted
from equipool.data.covariates import covariate_frame, encode
from equipool.data.splits import deal
from equipool.estimators.arguments import (
    chosen_rows,
    given_sites,
    learned_from,
    like,
    persons,
    same_label,
    support,
    target_columns,
)
from equipool.exceptions import EquipoolWarning, InputError
from equipool.randomness import seed_for
from equipool.sites.design import Design, find_point_masses
from equipool.sites.model import SiteModel, fit_site_model
from equipool.sites.passes import members, pieces
from equipool.sites.shift_scale import WINSORISE_AT

__all__ = ["SiteHarmonizer"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
UnseenSite = Literal["error", "pooled", "adapt"]

FOLDS = 5  # of participants, for choices in fit
IMPUTATION_ROUNDS = 3
MIN_ROWS_TO_ADAPT = 10  # of a new site; of fewer the shift is mostly that of these participants
MAX_POINT_MASS = 0.5  # share of rows with one value, from which a feature is left alone
READING_RIDGE = 0.1  # of the regression that reads covariates from features, for each row


class SiteHarmonizer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Remove site effects from features: the same columns and units, without the site.

    A drop-in for ComBat: ``fit(X, site=, covariates=)`` on training participants, ``transform`` with the same
    for any others, a single one too. The sites' effects (:mod:`equipool.sites`) are estimated beside a smooth
    trend in the covariates that all sites share, so differences that the covariates explain are kept, also
    where the sites' ages do not overlap. Every effect beyond shift and scale enters only where it makes held-out
    participants more likely. Features that never vary, and point masses such as a volume of 0, pass through
    unchanged.

    Parameters
    ----------
    unseen_site
        What ``transform`` does with a site that was not there at fit: ``"error"``; ``"pooled"``, leave its
        rows as they are; ``"adapt"``, estimate the site from the rows given, with everything else as it is.
    reference_site
        Bring everybody to this site instead of to the pool; its own rows stay as they are.
    missing
        ``"error"``, or ``"impute"``: fill missing features with what site and covariates let expect.
    mixing
        Shrinkage k of the sites' covariances towards the pool's, in equivalent participants: larger removes
        less. ``None``: chosen, or none; ``numpy.inf``: covariances are left as they are, as in ComBat. See
        :mod:`equipool.sites.covariance`.
    bending
        Whether sites warp features, as a gamma does (:mod:`equipool.sites.warp`). ``None``: chosen.
    network
        Whether a network removes what sites do to features jointly (:mod:`equipool.sites.coupling`). ``None``:
        chosen.
    random_state
        Of the folds and of the network's first weights; the same number gives the same bits, ``None`` is 0.

    Attributes
    ----------
    sites_
        The sites seen at fit.
    site_effects_
        A frame with one row for each site and feature: its shift with an interval of 95 % (``shift``, ``low``,
        ``high``), its ``scale``, whether the feature is ``warped``, and how many participants' values were
        ``winsorised`` when effects were estimated.
    support_
        A frame with one row for each site and covariate: how far beyond the other sites it reaches.
    choices_
        What was chosen on held-out participants: the trend's ``curvature`` penalty, whether sites scale the
        trend (``scales_trend``), the ``warped`` features, the ``shrinkage`` of covariances (infinite: none) and
        the share of the ``coupling`` (0: none).
    model_
        What was learned, a :class:`~equipool.sites.model.SiteModel`, in standardised features.

    Examples
    --------
    >>> import equipool as ep
    >>> truth = ep.simulate_table(overlap=0.0)
    >>> pool = truth.pool
    >>> harmonizer = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=pool.C)
    >>> clean = harmonizer.transform(pool.X, site=pool.site_labels, covariates=pool.C)
    >>> def error(x):  # but for the mean of the pool, which cannot be known
    ...     return abs((x - truth.clean) - (x - truth.clean).mean(axis=0)).mean()
    >>> bool(error(clean) < error(pool.X) / 3)
    True
    """

    def __init__(
        self,
        *,
        unseen_site: UnseenSite = "error",
        reference_site: str | None = None,
        missing: Missing = "error",
        mixing: float | None = None,
        bending: bool | None = None,
        network: bool | None = None,
        random_state: int | None = None,
    ) -> None:
        self.unseen_site = unseen_site
        self.reference_site = reference_site
        self.missing = missing
        self.mixing = mixing
        self.bending = bending
        self.network = network
        self.random_state = random_state

    # -- fit -----------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        site: Any = None,
        covariates: Any = None,
        subject: Any = None,
        fit_on: Any = None,
    ) -> SiteHarmonizer:
        """Learn what the sites do.

        Parameters
        ----------
        X
            Features (rows, features).
        y
            A target whose effect must not be taken for the site's where sites differ in it: allowed for at
            fit, never needed by ``transform``.
        site
            The site of each row; without it there is one, and nothing to remove, which a warning says.
        covariates
            What is to be kept: numbers such as age, and categories such as sex.
        subject
            Who each row is, where people were measured several times: rows of one person count as one
            person and are never split.
        fit_on
            A mask of the rows to learn from, such as the controls; all rows can be transformed.
        """
        array = self._features(X, reset=True)
        y = np.asarray(y) if y is not None and not hasattr(y, "iloc") else y
        frame = covariate_frame(covariates, len(array))
        rows = learned_from(fit_on, len(array))
        frame, encoding = frame[rows], encode(frame[rows])
        array = array if rows.all() else array[rows]
        inputs = Inputs.from_arrays(
            X.loc[rows] if hasattr(X, "columns") else array,
            site=np.zeros(int(rows.sum()), dtype=int) if site is None else chosen_rows(site, rows, "site"),
            covariates=None if covariates is None else encoding.apart(frame),
            y=None if y is None else chosen_rows(y, rows, "y"),
        )
        self._check(inputs, site_given=site is not None)
        self.encoding_ = replace(encoding, names=inputs.covariate_names, levels=inputs.levels)
        self.sites_, codes = np.unique(inputs.site.astype(str), return_inverse=True)
        design = self._design(
            inputs, codes.astype(np.intp), None if subject is None else persons(subject, rows)
        )
        self._standardise(array, design.weight)
        self.support_ = support(inputs, self.sites_, design.site)
        z = self._standardised(self._filled_at_fit(array, design))
        self.model_ = fit_site_model(
            z,
            design,
            shrinkage=self.mixing,
            warp=None if self.bending is None else bool(self.bending),
            coupling=None if self.network is None else bool(self.network),
            seed=self._seed(),
        )
        self.site_effects_ = self._effects(inputs.feature_names)
        self._learn_to_read(z, design)
        warn_of_small_sites(self.sites_, self.model_.n_participants)
        return self

    def check_settings(self) -> None:
        """Refuse settings that mean nothing."""
        for name, value, allowed in (
            ("unseen_site", self.unseen_site, ("error", "pooled", "adapt")),
            ("missing", self.missing, ("error", "impute")),
        ):
            if value not in allowed:
                raise InputError(f"{name} must be one of {', '.join(allowed)}. Got {value!r}.")
        if self.mixing is not None and (not isinstance(self.mixing, int | float) or not self.mixing > 0):
            raise InputError(f"mixing must be a number above 0. Got {self.mixing!r}.")
        for name, wanted in (("bending", self.bending), ("network", self.network)):
            if not (wanted is None or isinstance(wanted, bool | np.bool_)):
                raise InputError(f"{name} must be True, False or None. Got {wanted!r}.")

    def _check(self, inputs: Inputs, *, site_given: bool) -> None:
        self.check_settings()
        one_site = not site_given and len(set(inputs.site)) == 1
        check_inputs(inputs, missing=self.missing, one_site=one_site)
        if one_site:
            warn_of_no_site("there is nothing to harmonize")
        names = sorted(set(inputs.site.astype(str)))
        if self.reference_site is not None and not same_label(self.reference_site, names):
            raise InputError(
                f"The reference site {self.reference_site!r} is not among the sites; there are "
                f"{listed(names, shown=8)}."
            )

    def _design(self, inputs: Inputs, codes: IntArray, subject: NDArray[Any] | None) -> Design:
        n_rows = len(codes)
        person = np.arange(n_rows) if subject is None else np.unique(subject, return_inverse=True)[1]
        first = np.unique(person, return_index=True)[1]
        # Folds are dealt to people, by the site of their first row.
        fold = deal([codes[first]], [], min(FOLDS, len(first)), seed_for(self._seed(), "folds"))[person]
        return Design(
            site=codes,
            covariates=inputs.covariates,
            target=target_columns(inputs),
            weight=1 / np.bincount(person)[person].astype(np.float64),
            fold=fold,
            n_sites=len(self.sites_),
        )

    def _standardise(self, array: FloatArray, weight: FloatArray) -> None:
        """Learn each feature's mean and scale over participants, and what is left alone."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # answered below
            n = _weighted_sum(~np.isnan(array), weight)
            mean = _weighted_sum(array, weight) / n
            deviation = np.sqrt(_weighted_sum(array, weight, mean) / n)
        names = getattr(self, "feature_names_in_", [f"x{k}" for k in range(array.shape[1])])
        for wrong, why in (
            (np.isnan(mean), "has no value in any row"),
            (np.isinf(deviation), "is too large"),
        ):
            if wrong.any():
                raise InputError(f"Column {str(names[int(wrong.argmax())])!r} {why}; leave it out.")
        ordered = np.sort(array, axis=0)
        mean, deviation = _without_outliers(array, weight, mean, deviation, nine_tenths_of_sorted(ordered))
        self.point_masses_ = find_point_masses(ordered)
        share = (array == self.point_masses_).mean(axis=0)
        constant = ~(deviation > 1e-9 * np.maximum(np.abs(mean), 1e-300)) | (share >= MAX_POINT_MASS)
        self.harmonized_ = ~constant
        self.feature_mean_ = mean
        self.feature_scale_ = np.where(constant, 1.0, deviation)

    def _filled_at_fit(self, array: FloatArray, design: Design) -> FloatArray:
        """Return the features with missing cells drawn from their site, covariates and others' residuals."""
        empty = np.isnan(array)
        if not empty.any():
            return array
        rng = np.random.default_rng(seed_for(self._seed(), "imputation"))
        filled, holes = np.where(empty, self.feature_mean_, array), empty[:, self.harmonized_]
        for _ in range(IMPUTATION_ROUNDS):
            z = self._standardised(filled)
            model = fit_site_model(z, design, shrinkage=np.inf, curvature=1.0, warp=False, coupling=False)
            at = model.at(design.covariates, design.site)
            predicted = model.redo(at.predicted, at)
            limit = WINSORISE_AT * np.sqrt(model.composition["shift and scale"].variance)
            residuals = np.where(holes, np.nan, np.clip(z - predicted, -limit, limit))
            # With somebody else's residual, or a site with many holes would seem to vary less.
            drawn = predicted + np.where(holes, _drawn(residuals, rng), 0.0)
            guess = np.tile(self.feature_mean_, (len(array), 1))
            guess[:, self.harmonized_] = self._in_units(drawn)
            filled = np.where(empty, guess, array)
        return filled

    def _effects(self, names: tuple[str, ...]) -> pd.DataFrame:
        model, features = self.model_, np.array(names, dtype=object)[self.harmonized_]
        units = self.feature_scale_[self.harmonized_]
        shift, error, scale = model.effects
        warped = np.isin(np.arange(len(features)), model.composition["warp"].columns)
        return pd.DataFrame(
            {
                "site": np.repeat(self.sites_, len(features)),
                "feature": np.tile(features, len(self.sites_)),
                "shift": (shift * units).ravel(),
                "low": ((shift - 1.96 * error) * units).ravel(),
                "high": ((shift + 1.96 * error) * units).ravel(),
                "scale": scale.ravel(),
                "warped": np.tile(warped, len(self.sites_)),
                "winsorised": np.round(model.winsorised, 2).ravel(),
            }
        )

    def _learn_to_read(self, z: FloatArray, design: Design) -> None:
        """Learn to predict the covariates from features, for rows that come without them.

        By ridge regression, once from features as measured and once from features less their site's shift.
        """
        width, n_sites, k = z.shape[1] + 1, len(self.sites_), design.covariates.shape[1]
        squares, products = np.zeros((width, width)), np.zeros((width, k))
        sums, covariate_sums = np.zeros((n_sites, width)), np.zeros((n_sites, k))
        for part in pieces(*z.shape):
            columns = np.hstack([z[part], np.ones((len(z[part]), 1))])
            weighted, c = columns * design.weight[part, None], design.covariates[part]
            squares += weighted.T @ columns
            products += weighted.T @ c
            add_up = members(design.site[part], n_sites, design.weight[part])
            sums += add_up @ columns
            covariate_sums += add_up @ c
        penalty = np.diag(np.append(np.full(z.shape[1], READING_RIDGE * len(z)), 1e-9))
        # The same of features without their site's shift follows from the sites' sums.
        shift = np.hstack([self.model_.effects[0], np.zeros((n_sites, 1))])
        across = sums.T @ shift
        shifted = squares - across - across.T + (shift.T * design.n_participants) @ shift
        self.covariate_readers_ = np.stack(
            [
                np.linalg.solve(squares + penalty, products),
                np.linalg.solve(shifted + penalty, products - shift.T @ covariate_sums),
            ]
        )

    # -- transform -----------------------------------------------------------------------------------------

    def transform(self, X: Any, *, site: Any = None, covariates: Any = None) -> Any:
        """Return X without what the site did, in the same columns and units; a frame for a frame.

        Without ``site``, it is inferred: each row is harmonized for every site, weighted by how likely the
        site would have measured it. Without ``covariates``, they are read from the features. Both cost
        precision: docs/harmonizer.md says how much.
        """
        check_is_fitted(self, "model_")
        array = self._features(X)
        if len(self.sites_) < 2:
            return like(X, self._filled(array, None, covariates).copy())
        labels = None if site is None else given_sites(site, len(array))
        x = self._filled(array, labels, covariates)
        z, model = self._standardised(x), self.model_
        codes = None if labels is None else self._codes(labels)
        c = self._covariates(covariates, z, codes)
        holes = np.isnan(array)[:, self.harmonized_]
        predicted = model.trend(c)
        if codes is None:
            harmonized = self._averaged_over_sites(z, c, predicted)
        else:
            model, codes = self._with_new_sites(labels, codes, np.where(holes, np.nan, z), c)
            at = model.at(c, codes, predicted)
            harmonized = self._at_reference(model.undo(z, at), c, predicted)
            harmonized[codes < 0] = z[codes < 0]
        # What was not measured is what the covariates predict.
        harmonized = np.where(holes, self._at_reference(predicted, c, predicted), harmonized)
        result = x.copy()
        result[:, self.harmonized_] = self._in_units(harmonized)
        unchanged = (x == self.point_masses_) | (codes is not None and self._left_alone(codes))
        np.copyto(result, x, where=unchanged)
        return like(X, result)

    def fit_transform(
        self,
        X: Any,
        y: Any = None,
        *,
        site: Any = None,
        covariates: Any = None,
        subject: Any = None,
        fit_on: Any = None,
    ) -> Any:
        """Fit, and transform the same rows."""
        self.fit(X, y, site=site, covariates=covariates, subject=subject, fit_on=fit_on)
        return self.transform(X, site=site, covariates=covariates)

    def infer_site(self, X: Any, *, covariates: Any = None) -> pd.DataFrame:
        """Return how likely each row was measured at each site, (rows, sites)."""
        check_is_fitted(self, "model_")
        x = self._filled(self._features(X), None, covariates)
        z = self._standardised(x)
        c = self._covariates(covariates, z, None)
        index = X.index if isinstance(X, pd.DataFrame) else None
        return pd.DataFrame(self._posterior(z, c), columns=self.sites_, index=index)

    @property
    def choices_(self) -> dict[str, Any]:
        """What was chosen in ``fit``."""
        check_is_fitted(self, "model_")
        composition, names = self.model_.composition, self.get_feature_names_out()[self.harmonized_]
        return {
            "curvature": self.model_.curvature,
            "scales_trend": composition["shift and scale"].scales_trend,
            "warped": names[composition["warp"].columns].tolist(),
            "shrinkage": composition["covariance"].shrinkage,
            "coupling": composition["coupling"].share,
        }

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[np.object_]:
        """Return the names of the columns, which stay the same."""
        check_is_fitted(self, "model_")
        names = getattr(self, "feature_names_in_", None)
        if names is None:
            names = (
                input_features
                if input_features is not None
                else [f"x{k}" for k in range(self.n_features_in_)]
            )
        return np.asarray(names, dtype=object)

    def save(self, folder: str | Path) -> Path:
        """Write the fitted harmonizer as safetensors and JSON; :func:`equipool.load` reads it."""
        from equipool.estimators.persistence import save

        return save(self, folder)

    # -- inside --------------------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "impute"
        return tags

    def _seed(self) -> int:
        return 0 if self.random_state is None else int(self.random_state)

    def _features(self, X: Any, *, reset: bool = False) -> FloatArray:
        refuse_text(X)
        array: FloatArray = validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=1 + reset
        )
        if not reset:  # at fit all inputs are looked at together
            self._require_values(array)
        return array

    def _require_values(self, array: FloatArray) -> None:
        """Refuse new people's features that are infinite, or missing where that is not allowed."""
        bad = np.isinf(array) if self.missing == "impute" else ~np.isfinite(array)
        if not bad.any():
            return
        row, column = (int(place) for place in np.argwhere(bad)[0])
        name = self.get_feature_names_out()[column]
        if np.isinf(array[row, column]):
            raise InputError(f"Column {str(name)!r} is infinite (inf) in row {row + 1}; correct it.")
        raise InputError(
            f"Column {str(name)!r} has no value (NaN) in row {row + 1}; fill it in, leave the row out, or "
            'fit with missing="impute" (harmonize --missing impute).'
        )

    def _standardised(self, x: FloatArray) -> FloatArray:
        z: FloatArray = x[:, self.harmonized_]
        z -= self.feature_mean_[self.harmonized_]
        z /= self.feature_scale_[self.harmonized_]
        return z

    def _in_units(self, z: FloatArray) -> FloatArray:
        x = z * self.feature_scale_[self.harmonized_]
        x += self.feature_mean_[self.harmonized_]
        return x

    def _codes(self, labels: NDArray[Any]) -> IntArray:
        """Return site numbers; −1 for a site that was not seen at fit, if that is allowed."""
        place = {str(name): k for k, name in enumerate(self.sites_)}
        # 1 and 1.0 are the same site, whatever else is in the batch.
        place |= {name[:-2]: k for name, k in place.items() if name.endswith(".0")}
        unseen = sorted({str(label) for label in labels} - set(place))
        if unseen and self.unseen_site == "error":
            raise InputError(
                f"Site {unseen[0]!r} was not seen at fit; known are {listed(self.sites_, shown=8)}. Use "
                'unseen_site="adapt" (--unseen-site adapt) to estimate it from its own rows, or "pooled" to '
                "leave them as they are."
            )
        return np.array([place.get(str(label), -1) for label in labels], dtype=np.intp)

    def _covariates(self, covariates: Any, z: FloatArray, codes: IntArray | None) -> FloatArray:
        names, levels = self.encoding_.names, self.encoding_.levels
        if not names:
            return np.empty((len(z), 0))
        if covariates is None:
            if codes is None:
                weights, x = self.covariate_readers_[0], z
            else:  # a site that was not seen at fit has no shift
                shift = np.vstack([self.model_.effects[0], np.zeros(z.shape[1])])
                weights, x = self.covariate_readers_[1], z - shift[codes]
            return x @ weights[:-1] + weights[-1]
        frame = covariate_frame(covariates, len(z), names=self.encoding_.columns)
        require_columns(frame, self.encoding_.columns)
        frame = frame[list(self.encoding_.columns)]
        return parse_covariates(self.encoding_.apart(frame), names, levels)

    def _filled(self, array: FloatArray, labels: NDArray[Any] | None, covariates: Any) -> FloatArray:
        """Return new rows with missing cells filled by what their site and covariates predict."""
        empty = np.isnan(array)
        if not empty.any():
            return array
        start = np.where(empty, self.feature_mean_, array)
        z = self._standardised(start)
        codes = None if labels is None else self._codes(labels)
        c = self._covariates(covariates, z, codes)
        predicted = self.model_.trend(c)
        if codes is not None:
            at = self.model_.at(c, codes, predicted)
            predicted = self.model_.redo(predicted, at)
        guess = start.copy()
        guess[:, self.harmonized_] = self._in_units(predicted)
        return np.where(empty, guess, array)

    def _with_new_sites(
        self, labels: NDArray[Any] | None, codes: IntArray, z: FloatArray, c: FloatArray
    ) -> tuple[SiteModel, IntArray]:
        """Add each site that was not seen at fit, estimated from its own rows."""
        model = self.model_
        if self.unseen_site != "adapt" or labels is None or (codes >= 0).all():
            return model, codes
        codes, small = codes.copy(), []
        for name in sorted({str(label) for label in labels[codes < 0]}):
            rows = labels == name
            small += [name] if rows.sum() < MIN_ROWS_TO_ADAPT else []
            model = model.add_site(z[rows], c[rows])
            codes[rows] = len(model.n_participants) - 1
        if small:
            warnings.warn(
                f"{plural(len(small), 'new site')} with fewer than {MIN_ROWS_TO_ADAPT} rows ({listed(small)}): "
                "what is removed there is partly what distinguishes these participants. Bring more of them at "
                "once.",
                EquipoolWarning,
                stacklevel=3,
            )
        return model, codes

    def _at_reference(self, values: FloatArray, c: FloatArray, predicted: FloatArray) -> FloatArray:
        """Return the pool's values as the reference site would have measured them, if there is one."""
        if self.reference_site is None:
            return values
        return self.model_.redo(values, self.model_.at(c, self._reference(), predicted))

    def _averaged_over_sites(self, z: FloatArray, c: FloatArray, predicted: FloatArray) -> FloatArray:
        """Return rows harmonized for every site, weighted by the sites' posterior probabilities."""
        posterior, result = self._posterior(z, c), np.zeros_like(z)
        for s in range(len(self.sites_)):
            values = self.model_.undo(z, self.model_.at(c, s, predicted))
            result += posterior[:, [s]] * self._at_reference(values, c, predicted)
        return result

    def _posterior(self, z: FloatArray, c: FloatArray) -> FloatArray:
        score = self.model_.log_likelihood(z, c) + np.log(np.maximum(self.model_.n_participants, 1e-12))
        score = np.exp(score - score.max(axis=1, keepdims=True))
        posterior: FloatArray = score / score.sum(axis=1, keepdims=True)
        return posterior

    def _reference(self) -> int:
        return int(self._codes(parse_labels([self.reference_site]))[0])

    def _left_alone(self, codes: IntArray) -> NDArray[np.bool_]:
        """Return which rows stay as they are: those of unseen sites, and of the reference site."""
        unchanged = codes < 0
        if self.reference_site is not None:
            unchanged |= codes == self._reference()
        return unchanged[:, None]


def _weighted_sum(array: NDArray[Any], weight: FloatArray, around: FloatArray | None = None) -> FloatArray:
    """Add rows, or their squared distances from a point, up; what is missing counts nothing."""
    total = np.zeros(array.shape[1])
    for part in pieces(*array.shape):
        values = array[part] if around is None else (array[part] - around) ** 2
        total += weight[part] @ np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
    return total


def _without_outliers(
    array: FloatArray,
    weight: FloatArray,
    mean: FloatArray,
    deviation: FloatArray,
    quantiles: tuple[FloatArray, FloatArray, FloatArray],
) -> tuple[FloatArray, FloatArray]:
    """Return mean and deviation, winsorised where a few values would make all others alike.

    ``quantiles`` are where the middle nine tenths begin, the median, and where they end.
    """
    low, median, high = quantiles
    width = (high - low) / NINE_TENTHS
    for k in np.flatnonzero((width > 0) & (deviation > 5 * width)):
        seen = ~np.isnan(array[:, k])
        near = np.clip(array[seen, k], median[k] - 10 * width[k], median[k] + 10 * width[k])
        mean[k] = np.average(near, weights=weight[seen])
        deviation[k] = np.sqrt(np.average((near - mean[k]) ** 2, weights=weight[seen]))
    return mean, deviation


def _drawn(residuals: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return residuals drawn with replacement from those of the same feature that are not NaN."""
    result = np.zeros_like(residuals)
    for k, column in enumerate(residuals.T):
        measured = column[~np.isnan(column)]
        if len(measured):
            result[:, k] = rng.choice(measured, len(column))
    return result
