"""SiteHarmonizer: a table without its site effects."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.base import OneToOneFeatureMixin
from sklearn.linear_model import Ridge
from sklearn.utils.validation import check_is_fitted, validate_data

from equipool.checks import Missing, check_for_fit, refuse_text
from equipool.checks.errors import warn_of_small_sites
from equipool.checks.findings import listed
from equipool.checks.inputs import covariate_frame, parse_covariates, parse_labels
from equipool.checks.overlap import NINE_TENTHS, nine_tenths
from equipool.data.covariates import Encoding, encode
from equipool.estimators.harmonizer import (
    Harmonizer,
    given_sites,
    inputs_of,
    labels_of,
    learned_from,
    support,
)
from equipool.exceptions import InputError
from equipool.randomness import row_noise
from equipool.sites.design import MAX_FEATURES, Design, find_point_masses, winsorised
from equipool.sites.effect import FloatArray, IntArray, array
from equipool.sites.missing import completed, pooled_precision
from equipool.sites.table_model import SiteModel, fit_site_model

RIDGE = 0.1  # of the regression that predicts covariates from features, for each row

EFFECTS = ["site", "feature", "shift", "low", "high", "scale", "warped", "winsorised"]
SUPPORT = ["low", "high", "share_beyond", "farthest"]


@dataclass(frozen=True)
class Learned:
    """What a fitted harmonizer has learned, for persistence."""

    n_features_in_: int = field(metadata={"least": 1, "counts": "inputs"})
    harmonized_: NDArray[np.bool_] = field(metadata={"dimensions": ("inputs",), "counts": "features"})
    point_masses_: FloatArray = field(metadata={"dimensions": ("inputs",), "missing": True})
    encoding_: Encoding
    model_: SiteModel
    feature_names_in_: NDArray[np.object_] | None = array("inputs")
    sites_: NDArray[np.str_] = array("sites")
    feature_mean_: FloatArray = array("inputs")
    feature_scale_: FloatArray = array("inputs", positive=True)
    covariate_readers_: FloatArray = array("2", "features+1", "covariates")
    floor_: FloatArray = array("inputs")
    imputation_: FloatArray = array("imputed", "imputed")
    _support: FloatArray = array("covariates", "sites", "4")


@dataclass(kw_only=True, eq=False, repr=False)
class SiteHarmonizer(OneToOneFeatureMixin, Harmonizer):  # type: ignore[misc]
    """Remove site effects from features: the same columns and units, without the site.

    A drop-in for ComBat: ``fit(X, site=, covariates=)`` on training participants, ``transform`` on any.
    Site effects (:mod:`equipool.sites`) are estimated together with a smooth trend in the covariates that all
    sites share, so differences that the covariates explain are kept, also where the sites' ages do not
    overlap. Every effect beyond shift and scale enters only where held-out participants have a higher
    likelihood with it. Constant features, and point masses such as a volume of 0, pass through unchanged.

    Parameters
    ----------
    unseen_site
        What ``transform`` does with a site that was not in the data of the fit: ``"error"``; ``"pooled"``,
        leave its rows as they are; ``"adapt"``, estimate its effects from its rows.
    reference_site
        Bring all rows to this site instead of to the pool; its rows stay as they are.
    missing
        ``"keep"``: cells that were not measured say nothing at fit and stay empty, the rest of their row is
        harmonized; ``"error"``; ``"impute"``: as ``"keep"``, and then they are drawn given the measured
        features of their row, without site, covariates or target (:mod:`equipool.sites.missing`).
    keep_target
        Whether the target given to ``fit`` is allowed for when site effects are estimated, if held-out
        participants have a higher likelihood with it. By default a target is not looked at.
    infer
        Whether ``transform`` may estimate a site or covariates that it is not given. By default it raises.
    site_column, covariate_columns, subject_column
        Columns of a data frame X that hold these, instead of the arguments of ``fit`` and ``transform``: so
        cross-validation passes on those of the test participants, with any scorer. They are taken out of X.
    mixing
        Shrinkage k of the sites' covariances towards the pool's, in equivalent participants: larger removes
        less. ``None``: chosen; ``numpy.inf``: covariances are not changed, as in ComBat. See
        :mod:`equipool.sites.covariance`.
    bending
        Whether sites warp features, as a gamma does (:mod:`equipool.sites.warp`). ``None``: chosen.
    network
        Whether a network removes joint effects, see :mod:`equipool.sites.coupling`. ``None``: chosen.
    random_state
        Of the folds, the network's hidden units and draws of missing cells; the same number gives the same
        bits, ``None`` is 0.

    Attributes
    ----------
    sites_
        The sites in the data of the fit.
    site_effects_
        A frame with one row for each site and feature: its ``shift`` with an interval of 95 % (``low``,
        ``high``), its ``scale``, whether the feature is ``warped``, and how many participants' values were
        ``winsorised`` for the estimates.
    support_
        A frame with one row for each site and covariate: how far beyond the other sites it reaches.
    choices_
        What was chosen on held-out participants: the trend's ``curvature`` penalty, whether sites scale
        the trend (``scales_trend``), the ``warped`` features, whether the ``covariance`` of sites is
        changed, its ``shrinkage`` (infinite: variances of principal components alone), the share of the
        ``coupling`` (0: none), and whether a ``target`` was allowed for.
    harmonized_, point_masses_
        Which features are harmonized; the value of each feature that many rows share and that stays as it is,
        NaN where there is none.
    model_
        The fitted :class:`~equipool.sites.table_model.SiteModel`, in standardised features.

    Examples
    --------
    >>> import equipool as ep
    >>> truth = ep.simulate_table(overlap=0.0)
    >>> pool = truth.pool
    >>> harmonizer = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=pool.C)
    >>> clean = harmonizer.transform(pool.X, site=pool.site_labels, covariates=pool.C)
    >>> def error(x):  # without the mean of the pool, which cannot be estimated
    ...     return abs((x - truth.clean) - (x - truth.clean).mean(axis=0)).mean()
    >>> bool(error(clean) < error(pool.X) / 3)
    True
    """

    reference_site: str | None = None
    missing: Missing = "keep"
    infer: bool = False
    site_column: str | None = None
    covariate_columns: Sequence[str] | None = None
    subject_column: str | None = None
    mixing: float | None = None
    bending: bool | None = None
    network: bool | None = None

    _learned: ClassVar[type] = Learned

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        site: Any = None,
        covariates: Any = None,
        subject: Any = None,
        fit_on: Any = None,
    ) -> Self:
        """Estimate the site effects.

        Parameters
        ----------
        X
            Features (rows, features).
        y
            A target in which sites may differ; looked at with ``keep_target`` alone, never by ``transform``.
        site, covariates
            The site of each row; without it, a warning: there is one site, and nothing to remove. Covariates
            whose effects are kept: numbers such as age, and categories such as sex.
        subject
            The participant of each row, where some were measured several times: rows of one participant count
            as one and are never split over folds.
        fit_on
            A mask of the rows to estimate from, such as the controls; all rows can be transformed.
        """
        X, given = self._apart(X, site=site, covariates=covariates, subject=subject)
        site, covariates, subject = given.values()
        y = y if self.keep_target else None
        x = self._features(X, reset=True)
        frame = covariate_frame(covariates, len(x))
        rows = learned_from(fit_on, len(x))
        frame, x = frame[rows], x if rows.all() else x[rows]
        encoding = encode(frame)
        features = X.loc[rows] if hasattr(X, "columns") else x
        inputs = inputs_of(features, rows, site=site, covariates=encoding.apart(frame), y=y)
        self._require_settings()
        nothing = "there is nothing to harmonize"
        check_for_fit(inputs, site_given=site is not None, missing=self.missing, without_site=nothing)
        self.encoding_ = replace(encoding, names=inputs.covariate_names, levels=inputs.levels)
        if subject is not None:
            subject = labels_of("subject", subject, len(rows), "give each row the name of its participant")
            subject = subject[rows].astype(str)
        design = self._design(inputs, inputs.covariates, subject)
        _ = self._reference  # refused if it is not among the sites
        self._standardise(x, design.weight)
        self._support = support(inputs, design.site)
        z = self._standardised(x)
        more: Any = {"shrinkage": self.mixing, "warp": self.bending, "coupling": self.network}
        self.model_ = fit_site_model(z, design, **more, seed=self._seed)
        self.covariate_readers_ = self._regressions(np.nan_to_num(z), design)
        least = np.nanmin(x, axis=0)
        self.floor_ = np.where(least > 0, least / 2, 0.0)
        self.imputation_ = np.empty((0, 0))
        if self.missing == "impute":
            if z.shape[1] > MAX_FEATURES:
                raise InputError(
                    f"Missing cells can be imputed in tables of at most {MAX_FEATURES} features. Got "
                    f'{z.shape[1]}; use missing="keep" (--missing keep), and impute with another tool.'
                )
            clean = self.model_.undo(z, self.model_.at(design.covariates, design.site))
            self.imputation_ = pooled_precision(clean, design.weight)
        warn_of_small_sites(self.sites_, self.model_.n_participants)
        return self

    def _require_settings(self) -> None:
        """Refuse settings that mean nothing."""
        self._require_choices(missing=("keep", "error", "impute"))
        if self.mixing is not None and (not isinstance(self.mixing, Real) or not self.mixing > 0):
            raise InputError(f"mixing must be a number above 0. Got {self.mixing!r}.")
        for name in ("bending", "network", "infer"):
            value, chosen = getattr(self, name), name in ("bending", "network")
            if not isinstance(value, bool | np.bool_) and not (chosen and value is None):
                what = f"{name} must be True{', False or None' if chosen else ' or False'}"
                raise InputError(f"{what}. Got {value!r}.")

    def _standardise(self, x: FloatArray, weight: FloatArray) -> None:
        """Estimate each feature's mean and scale over participants, and which features are harmonized."""
        low, median, high = nine_tenths(x)
        # A few values must not make all others alike.
        reach = np.where(high > low, 10 * (high - low) / NINE_TENTHS, np.inf)
        mean, deviation = np.empty(x.shape[1]), np.empty(x.shape[1])
        for k, name in enumerate(self.get_feature_names_out()):
            measured = ~np.isnan(x[:, k])
            if not measured.any():
                raise InputError(f"Column {str(name)!r} has no value in any row; leave it out.")
            near = np.clip(x[measured, k], median[k] - reach[k], median[k] + reach[k])
            with np.errstate(over="ignore", invalid="ignore"):  # answered below
                mean[k] = np.average(near, weights=weight[measured])
                deviation[k] = np.sqrt(np.average((near - mean[k]) ** 2, weights=weight[measured]))
            if not np.isfinite(deviation[k]):
                raise InputError(f"Column {str(name)!r} is too large; leave it out.")
        self.point_masses_ = find_point_masses(np.sort(x, axis=0))
        varies = deviation > 1e-9 * np.maximum(np.abs(mean), 1e-300)
        self.harmonized_ = varies & (median != self.point_masses_)
        self.feature_mean_ = mean
        self.feature_scale_ = np.where(self.harmonized_, deviation, 1.0)

    def _regressions(self, z: FloatArray, design: Design) -> FloatArray:
        """Return ridge coefficients that predict the covariates from features, (2, features + 1, covariates).

        For rows without covariates: from features as measured, and from features minus their site's shift.
        """
        if not z.shape[1] * design.covariates.shape[1]:  # nothing to predict, or nothing that is harmonized
            return np.zeros((2, z.shape[1] + 1, design.covariates.shape[1]))
        ridge = Ridge(alpha=RIDGE * len(z), solver="cholesky")
        fits = (
            ridge.fit(winsorised(values, 1.0), design.covariates, sample_weight=design.weight)
            for values in (z, z - self.model_.effects[0][design.site])
        )
        return np.stack([np.vstack([np.atleast_2d(fit.coef_).T, fit.intercept_]) for fit in fits])

    def transform(self, X: Any, *, site: Any = None, covariates: Any = None) -> Any:
        """Return X without site effects, in the same columns and units; a frame for a frame.

        With ``infer``, a site or covariates may be missing: without ``site``, each row is harmonized for
        every site, and the results are averaged with the sites' posterior probabilities; without
        ``covariates``, they are predicted from the features. Both cost precision, see docs/harmonizer.md.
        """
        check_is_fitted(self, "model_")
        X, given = self._apart(X, site=site, covariates=covariates)
        site, covariates = given.values()
        x = self._features(X)
        z = self._standardised(x)
        if len(self.sites_) < 2:
            return _like(X, self._imputed(x, z))
        labels, index = None, None
        if site is not None or not self.infer:
            labels = given_sites(site, len(x))
            index = self._site_index(labels)
        c = self._covariates(covariates, z, index)
        predicted, unchanged = self.model_.trend(c), x == self.point_masses_
        if labels is None or index is None:
            posterior, harmonized = self._posterior(z, c), np.zeros_like(z)
            for s in range(len(self.sites_)):
                undone = self.model_.undo(z, self.model_.at(c, s, predicted))
                harmonized += posterior[:, [s]] * self._at_reference(undone, c, predicted)
        else:
            model, index = self._with_new_sites(
                labels, index, lambda model, rows: model.add_site(z[rows], c[rows])
            )
            undone = model.undo(z, model.at(c, index, predicted))
            harmonized = self._at_reference(undone, c, predicted)
            unchanged |= ((index < 0) | (index == self._reference))[:, None]
        result = x.copy()
        result[:, self.harmonized_] = self._in_units(harmonized)
        # Below half of the least value of a positive feature, as a hyperbola that stays above 0.
        low = (result < self.floor_) & (x > 0) & (self.floor_ > 0)
        floor = np.broadcast_to(self.floor_, x.shape)[low]
        result[low] = floor / (2 - result[low] / floor)
        np.copyto(result, x, where=unchanged)
        return _like(X, self._imputed(result, harmonized))

    def infer_site(self, X: Any, *, covariates: Any = None) -> pd.DataFrame:
        """Return the probability of each site for each row, (rows, sites)."""
        check_is_fitted(self, "model_")
        X, given = self._apart(X, covariates=covariates)
        z = self._standardised(self._features(X))
        posterior = self._posterior(z, self._covariates(given["covariates"], z, None))
        index = X.index if isinstance(X, pd.DataFrame) else None
        return pd.DataFrame(posterior, columns=self.sites_, index=index)

    @property
    def site_effects_(self) -> pd.DataFrame:
        """One row for each site and feature: what the site does to it."""
        model, features = self.model_, self.get_feature_names_out()[self.harmonized_]
        units = self.feature_scale_[self.harmonized_]
        shift, error, scale = model.effects
        warped = np.isin(np.arange(len(features)), model.composition["warp"].columns)
        low, high = shift - 1.96 * error, shift + 1.96 * error
        columns = self.sites_[:, None], features, shift * units, low * units, high * units, scale, warped
        cells = (np.broadcast_to(c, shift.shape).ravel() for c in (*columns, np.round(model.winsorised, 2)))
        return pd.DataFrame(dict(zip(EFFECTS, cells, strict=True)))

    @property
    def support_(self) -> pd.DataFrame:
        """One row for each covariate and site: how far beyond the other sites it reaches."""
        rows = [(site, name) for name in self.encoding_.names for site in self.sites_]
        who = pd.DataFrame(rows, columns=["site", "covariate"])
        return who.join(pd.DataFrame(self._support.reshape(-1, 4), columns=SUPPORT))

    @property
    def choices_(self) -> dict[str, Any]:
        """What was chosen in ``fit``."""
        check_is_fitted(self, "model_")
        composition, names = self.model_.composition, self.get_feature_names_out()[self.harmonized_]
        return {
            "curvature": self.model_.curvature,
            "scales_trend": composition["shift and scale"].scales_trend,
            "warped": names[composition["warp"].columns].tolist(),
            "covariance": not composition["covariance"].is_identity,
            "shrinkage": composition["covariance"].shrinkage,
            "coupling": composition["coupling"].share,
            "target": self.model_.allowed_for_target,
        }

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing != "error"
        return tags

    @property
    def _reference(self) -> int:
        """The index of the reference site, −1 without one."""
        if self.reference_site is None:
            return -1
        index = self.site_index.get(str(parse_labels([self.reference_site])[0]))
        if index is None:
            what = f"The reference site {self.reference_site!r} is not among the sites"
            raise InputError(f"{what}; there are {listed(self.sites_, shown=8)}.")
        return index

    def _features(self, X: Any, *, reset: bool = False) -> Any:
        """Return X as an array; values of new rows that cannot be used are refused."""
        refuse_text(X)
        x = validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=1 + reset
        )
        bad = ~np.isfinite(x) if self.missing == "error" else np.isinf(x)
        for row, column in [] if reset else np.argwhere(bad):  # at fit all inputs are checked together
            what, remedy = "is infinite (inf)", "correct it"
            if np.isnan(x[row, column]):
                what, remedy = "has no value (NaN)", "fill it in, leave the row out, or fit with "
                remedy += 'missing="keep" (harmonize --missing keep)'
            name = str(self.get_feature_names_out()[column])
            raise InputError(f"Column {name!r} {what} in row {row + 1}; {remedy}.")
        return x

    def _standardised(self, x: FloatArray) -> FloatArray:
        z: FloatArray = x[:, self.harmonized_]
        z -= self.feature_mean_[self.harmonized_]
        z /= self.feature_scale_[self.harmonized_]
        return z

    def _in_units(self, z: FloatArray) -> FloatArray:
        x = z * self.feature_scale_[self.harmonized_]
        x += self.feature_mean_[self.harmonized_]
        return x

    def _imputed(self, x: FloatArray, z: FloatArray) -> FloatArray:
        """Return x with missing cells drawn given the measured ones of their row, if that is asked for."""
        empty = np.isnan(x)
        if self.missing != "impute" or not empty.any():
            return x
        # The same draw whatever the batch, from what the row holds.
        noise = row_noise(np.nan_to_num(z).astype(np.float32), z.shape[1], self._seed).astype(np.float64)
        filled = np.tile(self.feature_mean_, (len(x), 1))
        filled[:, self.harmonized_] = self._in_units(completed(z, self.imputation_, noise))
        return np.where(empty, np.where(self.floor_ > 0, np.maximum(filled, self.floor_), filled), x)

    def _covariates(self, covariates: Any, z: FloatArray, index: IntArray | None) -> FloatArray:
        """Return covariates as numbers, (rows, K); where none are given, predicted from the features."""
        names, levels = self.encoding_.names, self.encoding_.levels
        if not names:
            return np.empty((len(z), 0))
        if covariates is None and not self.infer:
            raise InputError(
                f"The covariates {listed(names)} are needed, as at fit: pass covariates=, or name their "
                "columns in X with covariate_columns=. To have them estimated, set infer=True (--infer)."
            )
        if covariates is not None:
            frame = covariate_frame(covariates, len(z), names=self.encoding_.columns)
            return parse_covariates(self.encoding_.apart(frame), names, levels)
        z = np.nan_to_num(z)
        coefficients = self.covariate_readers_[0 if index is None else 1]
        if index is not None:  # a site that was not in the data of the fit has no shift
            z = z - np.vstack([self.model_.effects[0], np.zeros(z.shape[1])])[index]
        return winsorised(z, 1.0) @ coefficients[:-1] + coefficients[-1]

    def _apart(self, X: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
        """Return X without the columns that hold site, covariates or subject, and these."""
        columns = {
            "site": self.site_column,
            "covariates": None if self.covariate_columns is None else list(self.covariate_columns),
            "subject": self.subject_column,
        }
        taken: list[Any] = []
        for role, names in columns.items():
            if names is None:
                continue
            if given.get(role) is not None:
                raise InputError(f"{role} is given twice: as an argument, and as a column of X. Give one.")
            names = [names] if isinstance(names, str) else names
            taken += [name for name in names if hasattr(X, "columns") and name in X.columns]
            if all(name in taken for name in names):
                given |= {role: X[columns[role]]} if role in given else {}
            elif not (self.infer and role != "subject") and role in given:
                what = f"X has no column {listed(names)} for the {role}"
                raise InputError(f"{what}; give a data frame with it.")
        return (X.drop(columns=taken) if taken else X), given

    def _at_reference(self, values: FloatArray, c: FloatArray, predicted: FloatArray) -> FloatArray:
        """Return the pool's values as the reference site would have measured them, if there is one."""
        reference = self._reference
        return values if reference < 0 else self.model_.redo(values, self.model_.at(c, reference, predicted))

    def _posterior(self, z: FloatArray, c: FloatArray) -> Any:
        score = self.model_.log_likelihood(z, c) + np.log(np.maximum(self.model_.n_participants, 1e-12))
        return softmax(score, axis=1)


def _like(X: Any, values: FloatArray) -> Any:
    """Return a frame for a frame, an array for anything else."""
    return pd.DataFrame(values, X.index, X.columns) if isinstance(X, pd.DataFrame) else values
