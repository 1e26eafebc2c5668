"""SiteHarmonizer: what table users take instead of ComBat."""

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
from equipool.sites.design import ATOM_WHOLE, Design, find_atoms
from equipool.sites.model import SiteModel, fit_site_model
from equipool.sites.passes import members, pieces, site_rows
from equipool.sites.shift_scale import FAR

__all__ = ["SiteHarmonizer"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
UnseenSite = Literal["error", "pooled", "adapt"]
FOLDS = 6  # of people, for choices in fit; a multiple of 3, see Design.thirds
ADAPTED_FROM = 10  # rows of a new site; from fewer its shift is mostly those people's own


class SiteHarmonizer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Remove what the site did to features and keep what the people brought: the same columns and units.

    A drop-in for ComBat: ``fit(X, site=, covariates=)`` on training people, ``transform`` with the same for
    anybody, one new person too. The sites' shifts, spreads and covariances are estimated beside a smooth
    trend in the covariates that all sites share, so differences that the covariates explain are kept, also
    where the sites' ages do not overlap. Features that never vary, and values that many people share, such as
    a volume of 0, pass through unchanged.

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
        Weight of the pooled covariance against a site's own, in people; larger removes less of the site's and
        keeps more of the people's. ``None``: the least that costs held-out people next to nothing;
        ``numpy.inf``: covariances are left as they are, as in ComBat.
    bending
        Whether sites may bend features, as a gamma does: a rising curve for each site and feature then brings
        them to the pool's shape. ``None``: where that makes held-out people likelier.
    network
        Whether a network may take out what sites do to people jointly and in curves, on top of all that:
        :mod:`equipool.sites.coupling`. ``None``: as much of it as foretells held-out people best, none where
        they show nothing, as with few people; ``True``: the best share, sure or not.
    keep_people
        Whether small differences between sites along a factor of people, such as head size where one scans
        more men, are left to their people: :mod:`equipool.sites.composition`. ``False``: whatever neither
        covariates nor ``y`` explain is the site's, as in ComBat.
    random_state
        Of the folds that choose the shrinkage, and of the network's first weights; the same number gives the
        same bits, ``None`` is 0.

    Attributes
    ----------
    sites_
        The sites seen at fit.
    site_effects_
        A frame with one row for each site and feature: its shift with an interval of 95 %, its spread,
        whether sites bend the feature, how many of its people were so far from the others that they were
        learned from as if nearer (``far``), and what of its difference was left to its people (``kept``, in
        the pool's units, the shift being in the site's).
    support_
        A frame with one row for each site and covariate: how far beyond the other sites it reaches.
    choices_
        A dict of what was chosen on held-out people: the penalty on a bent trend (``curvature``), whether
        sites stretch it (``gain``), which features they bend (``bent``), people's worth of the pooled
        covariance (``mixing``) and the share of the network that is taken out (``network``); and along how
        many factors differences are left to sites' people (``kept``), by a test on everybody.
    model_
        What was learned, a :class:`SiteModel`, in standardised features.

    Examples
    --------
    >>> import equipool as ep
    >>> truth = ep.simulate_table(overlap=0.0)
    >>> pool = truth.pool
    >>> harmonizer = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=pool.C)
    >>> clean = harmonizer.transform(pool.X, site=pool.site_labels, covariates=pool.C)
    >>> def error(x):  # beside the mean of the pool, which nobody can know
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
        keep_people: bool = True,
        random_state: int | None = None,
    ) -> None:
        self.unseen_site = unseen_site
        self.reference_site = reference_site
        self.missing = missing
        self.mixing = mixing
        self.bending = bending
        self.network = network
        self.keep_people = keep_people
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
            mixing=self.mixing,
            bending=None if self.bending is None else bool(self.bending),
            network=None if self.network is None else bool(self.network),
            keep_people=bool(self.keep_people),
            seed=self._seed(),
        )
        self.site_effects_ = self._effects(inputs.feature_names)
        self._learn_to_read(z, design)
        warn_of_small_sites(self.sites_, self.model_.people)
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
            raise InputError(f"mixing is a number of people, above 0. Got {self.mixing!r}.")
        for name, wanted in (("bending", self.bending), ("network", self.network)):
            if not (wanted is None or isinstance(wanted, bool | np.bool_)):
                raise InputError(f"{name} must be True, False or None. Got {wanted!r}.")
        if not isinstance(self.keep_people, bool | np.bool_):
            raise InputError(f"keep_people must be True or False. Got {self.keep_people!r}.")

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
            c=inputs.covariates,
            extra=target_columns(inputs),
            weight=1 / np.bincount(person)[person].astype(np.float64),
            fold=fold,
            n_sites=len(self.sites_),
        )

    def _standardise(self, array: FloatArray, weight: FloatArray) -> None:
        """Learn each feature's mean and scale over people, and what of it is left alone."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # answered below
            people = _weighted_sum(~np.isnan(array), weight)
            mean = _weighted_sum(array, weight) / people
            deviation = np.sqrt(_weighted_sum(array, weight, mean) / people)
        names = getattr(self, "feature_names_in_", [f"x{k}" for k in range(array.shape[1])])
        for wrong, why in (
            (np.isnan(mean), "has no value in any row"),
            (np.isinf(deviation), "is too large"),
        ):
            if wrong.any():
                raise InputError(f"Column {str(names[int(wrong.argmax())])!r} {why}; leave it out.")
        ordered = np.sort(array, axis=0)
        mean, deviation = _without_far(array, weight, mean, deviation, nine_tenths_of_sorted(ordered))
        self.atoms_ = find_atoms(ordered)
        share = (array == self.atoms_).mean(axis=0)
        still = ~(deviation > 1e-9 * np.maximum(np.abs(mean), 1e-300)) | (share >= ATOM_WHOLE)
        self.moved_ = ~still
        self.feature_mean_ = mean
        self.feature_scale_ = np.where(still, 1.0, deviation)

    def _filled_at_fit(self, array: FloatArray, design: Design) -> FloatArray:
        """Return the features with missing ones filled in by site and covariates, in a few rounds."""
        empty = np.isnan(array)
        if not empty.any():
            return array
        rng = np.random.default_rng(seed_for(self._seed(), "imputation"))
        filled = np.where(empty, self.feature_mean_, array)
        for _ in range(3):
            z = self._standardised(filled)
            model = fit_site_model(
                z,
                design,
                mixing=np.inf,
                curvature=1.0,
                bending=False,
                network=False,
                keep_people=bool(self.keep_people),
            )
            told = _measured(model, model.usual[design.site], design.c, design.site)
            limit = FAR * np.sqrt(model.residual)
            left = np.where(empty[:, self.moved_], np.nan, np.clip(z - told, -limit, limit))
            # With a residual of somebody else, or a site with many gaps would seem to vary less.
            drawn = told + np.where(empty[:, self.moved_], _drawn(left, rng), 0.0)
            guess = np.tile(self.feature_mean_, (len(array), 1))
            guess[:, self.moved_] = self._in_units(drawn)
            filled = np.where(empty, guess, array)
        return filled

    def _effects(self, names: tuple[str, ...]) -> pd.DataFrame:
        model, moved = self.model_, np.array(names, dtype=object)[self.moved_]
        scale = self.feature_scale_[self.moved_]
        shift, error, spread = model.effects
        return pd.DataFrame(
            {
                "site": np.repeat(self.sites_, len(moved)),
                "feature": np.tile(moved, len(self.sites_)),
                "shift": (shift * scale).ravel(),
                "low": ((shift - 1.96 * error) * scale).ravel(),
                "high": ((shift + 1.96 * error) * scale).ravel(),
                "spread": spread.ravel(),
                "bent": np.tile(np.isin(np.arange(len(moved)), model.bend.columns), len(self.sites_)),
                "far": np.round(model.far, 2).ravel(),
                "kept": (model.kept * scale).ravel(),
            }
        )

    def _learn_to_read(self, z: FloatArray, design: Design) -> None:
        """Learn to guess the covariates from features, for people who come without them."""
        width, n_sites = z.shape[1] + 1, len(self.sites_)
        squares, goal = np.zeros((width, width)), np.zeros((width, design.c.shape[1]))
        sums, read = np.zeros((n_sites, width)), np.zeros((n_sites, design.c.shape[1]))
        for part in pieces(*z.shape):
            columns = np.hstack([z[part], np.ones((len(z[part]), 1))])
            site, weight, c = design.site[part], design.weight[part], design.c[part]
            weighted = columns * weight[:, None]
            squares += weighted.T @ columns
            goal += weighted.T @ c
            add_up = members(site, n_sites, weight)
            sums += add_up @ columns
            read += add_up @ c
        penalty = np.diag(np.append(np.full(z.shape[1], 0.1 * len(z)), 1e-9))
        # The same of features without their site's shift follows from the sites' sums.
        shift = np.hstack([self.model_.effects[0], np.zeros((n_sites, 1))])
        across = sums.T @ shift
        without = squares - across - across.T + (shift.T * design.people) @ shift
        self.readers_ = np.stack(
            [
                np.linalg.solve(squares + penalty, goal),
                np.linalg.solve(without + penalty, goal - shift.T @ read),
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
        model, sites = self.model_, list(self.sites_)
        if len(sites) < 2:
            return like(X, self._filled(array, None, covariates).copy())
        labels = None if site is None else given_sites(site, len(array))
        x = self._filled(array, labels, covariates)
        z = self._standardised(x)
        codes = None if labels is None else self._codes(labels)
        c = self._covariates(covariates, z, codes)
        expected = model.expected(c)
        empty = np.isnan(array)[:, self.moved_]
        gaps = bool(empty.any())
        if codes is None:
            harmonized = self._weighted(z, c, expected)
        else:
            measured = np.where(empty, np.nan, z) if gaps else z
            model, codes = self._with_new_sites(model, labels, codes, measured, expected)
            harmonized = self._harmonized(model, z, c, expected, codes)
        if gaps:
            # What was not measured is what the covariates let expect.
            harmonized = np.where(empty, self._brought(model, np.zeros_like(z), c, expected), harmonized)
        result = x.copy()
        result[:, self.moved_] = self._in_units(harmonized)
        unmoved = (x == self.atoms_) | (codes is not None and self._left_alone(codes))
        np.copyto(result, x, where=unmoved)
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
        model = self.model_
        bent = self.get_feature_names_out()[self.moved_][model.bend.columns]
        return {
            "curvature": model.curvature,
            "gain": model.gain,
            "bent": bent.tolist(),
            "mixing": model.mixing,
            "kept": int(np.count_nonzero(model.composition.believed)),
            "network": model.amount,
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
        z: FloatArray = x[:, self.moved_]
        z -= self.feature_mean_[self.moved_]
        z /= self.feature_scale_[self.moved_]
        return z

    def _in_units(self, z: FloatArray) -> FloatArray:
        x = z * self.feature_scale_[self.moved_]
        x += self.feature_mean_[self.moved_]
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
            # A site that is unknown counts as the pool.
            known = codes is not None
            shift = np.vstack([self.model_.effects[0], np.zeros(z.shape[1])])
            x = z - shift[codes] if codes is not None else z
            weights = self.readers_[int(known)]
            return x @ weights[:-1] + weights[-1]
        frame = covariate_frame(covariates, len(z), names=self.encoding_.columns)
        require_columns(frame, self.encoding_.columns)
        frame = frame[list(self.encoding_.columns)]
        return parse_covariates(self.encoding_.apart(frame), names, levels)

    def _filled(self, array: FloatArray, labels: NDArray[Any] | None, covariates: Any) -> FloatArray:
        """Return new people's features with missing ones filled in by their site and covariates."""
        empty = np.isnan(array)
        if not empty.any():
            return array
        start = np.where(empty, self.feature_mean_, array)
        z = self._standardised(start)
        codes = None if labels is None else self._codes(labels)
        c = self._covariates(covariates, z, codes)
        expected = self.model_.expected(c)
        if codes is not None:
            # A site that is unknown counts as the pool.
            seen = codes >= 0
            usual = self.model_.usual[codes[seen]]
            expected[seen] = _measured(self.model_, usual, c[seen], codes[seen])
        guess = start.copy()
        guess[:, self.moved_] = self._in_units(expected)
        return np.where(empty, guess, array)

    def _with_new_sites(
        self,
        model: SiteModel,
        labels: NDArray[Any] | None,
        codes: IntArray,
        z: FloatArray,
        expected: FloatArray,
    ) -> tuple[SiteModel, IntArray]:
        """Add each site that was not seen at fit, estimated from its own rows."""
        if self.unseen_site != "adapt" or labels is None or (codes >= 0).all():
            return model, codes
        codes, few = codes.copy(), []
        for name in sorted({str(label) for label in labels[codes < 0]}):
            rows = labels == name
            few += [name] if rows.sum() < ADAPTED_FROM else []
            model = model.with_site(z[rows], expected[rows])
            codes[rows] = len(model.shift) - 1
        if few:
            warnings.warn(
                f"{plural(len(few), 'new site')} with fewer than {ADAPTED_FROM} rows ({listed(few)}): what "
                "is removed there is partly what those people are. Bring more of them at once.",
                EquipoolWarning,
                stacklevel=3,
            )
        return model, codes

    def _harmonized(
        self, model: SiteModel, z: FloatArray, c: FloatArray, expected: FloatArray, codes: IntArray
    ) -> FloatArray:
        result = z.copy()
        # Sites that were not seen at fit are numbered −1, come first, and stay as they are.
        for s, rows in enumerate(site_rows(codes + 1, len(model.shift) + 1)[1:]):
            for part in pieces(len(rows), z.shape[1]):
                some = rows[part]
                own = model.own(z[some], c[some], s, expected[some])
                result[some] = self._brought(model, own, c[some], expected[some])
        return result

    def _brought(self, model: SiteModel, own: FloatArray, c: FloatArray, expected: FloatArray) -> FloatArray:
        """Return people as the pool, or the reference site, would have measured them."""
        if self.reference_site is None:
            return expected + own
        return model.measured(own, c, self._reference(), expected)

    def _weighted(self, z: FloatArray, c: FloatArray, expected: FloatArray) -> FloatArray:
        posterior = self._posterior(z, c)
        result = np.zeros_like(z)
        for s in range(len(self.sites_)):
            own = self.model_.own(z, c, s, expected)
            result += posterior[:, [s]] * self._brought(self.model_, own, c, expected)
        return result

    def _posterior(self, z: FloatArray, c: FloatArray) -> FloatArray:
        score = self.model_.log_likelihood(z, c) + np.log(np.maximum(self.model_.people, 1e-12))
        score = np.exp(score - score.max(axis=1, keepdims=True))
        posterior: FloatArray = score / score.sum(axis=1, keepdims=True)
        return posterior

    def _reference(self) -> int:
        return int(self._codes(parse_labels([self.reference_site]))[0])

    def _left_alone(self, codes: IntArray) -> NDArray[np.bool_]:
        """Return which rows stay as they are: unseen sites of the pool, and the reference site."""
        alone = codes < 0
        if self.reference_site is not None:
            alone |= codes == self._reference()
        return alone[:, None]


def _weighted_sum(array: NDArray[Any], weight: FloatArray, around: FloatArray | None = None) -> FloatArray:
    """Add rows, or their squared distances from a point, up; what is missing counts nothing."""
    total = np.zeros(array.shape[1])
    for part in pieces(*array.shape):
        values = array[part] if around is None else (array[part] - around) ** 2
        total += weight[part] @ np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
    return total


def _without_far(
    array: FloatArray,
    weight: FloatArray,
    mean: FloatArray,
    deviation: FloatArray,
    near: tuple[FloatArray, FloatArray, FloatArray],
) -> tuple[FloatArray, FloatArray]:
    """Return mean and deviation; where a few values make all others alike, without how far these are.

    ``near`` is where the middle nine tenths begin, their middle and their end.
    """
    low, middle, high = near
    width = (high - low) / NINE_TENTHS
    for k in np.flatnonzero((width > 0) & (deviation > 5 * width)):
        seen = ~np.isnan(array[:, k])
        near = np.clip(array[seen, k], middle[k] - 10 * width[k], middle[k] + 10 * width[k])
        mean[k] = np.average(near, weights=weight[seen])
        deviation[k] = np.sqrt(np.average((near - mean[k]) ** 2, weights=weight[seen]))
    return mean, deviation


def _measured(model: SiteModel, own: FloatArray, c: FloatArray, site: IntArray) -> FloatArray:
    """Return what each row's site would have measured."""
    result = np.empty_like(own)
    for s in np.unique(site):
        rows = site == s
        result[rows] = model.measured(own[rows], c[rows], int(s))
    return result


def _drawn(left: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return residuals drawn with replacement from those of the same feature."""
    result = np.zeros_like(left)
    for k, column in enumerate(left.T):
        known = column[~np.isnan(column)]
        if len(known):
            result[:, k] = rng.choice(known, len(column))
    return result
