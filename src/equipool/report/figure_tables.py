"""The numbers behind a report's figures, as small tables of columns."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.data import PooledDataset
from equipool.exceptions import InputError
from equipool.judge.scores import Columns, FloatArray, adjusted, standardised
from equipool.judge.statmaps import FDR, stat_map

GRID = 60  # points of a density
STEPS = 16  # points of a curve
SHOWN = 3  # features with the largest site effect before, and as many after
MIN_ROWS_FOR_CURVE, MIN_ROWS_FOR_PARABOLA = 8, 20
RESERVED = {"site", "x", "y", "stage", "feature", "density", "value", "rows", "median"}
COMPONENTS = 20  # principal components that an embedding starts from


def column(name: str) -> str:
    """Return a variable's name as that of a column beside ours: "site" becomes "site (covariate)"."""
    return f"{name} (covariate)" if name in RESERVED else name


def rounded(values: Any) -> list[float]:
    """Return five significant digits: more would only make the file larger."""
    return [float(f"{value:.5g}") for value in values]


def first_number(pool: PooledDataset) -> int | None:
    """Return the place of the first covariate that has more than two values."""
    return next((k for k in range(pool.C.shape[1]) if len(np.unique(pool.C[:, k])) > 2), None)


def density_table(name: str, site: NDArray[Any], values: FloatArray) -> Columns:
    """Return a kernel density of one variable at each site, with columns site, variable, density.

    The bandwidth is Silverman's, 0.9 s n^(−1/5), and at least a sixtieth of the range of all values. Beyond a
    site's range the density is 0.
    """
    from scipy.stats import norm

    grid, rows, site = np.linspace(values.min(), values.max(), GRID), [], site.astype(str)
    for label in np.unique(site).tolist():
        x = values[site == label]
        width = max(0.9 * float(np.std(x)) * len(x) ** -0.2, float(np.ptp(values)) / 60, 1e-12)
        inside = (grid >= x.min() - width) & (grid <= x.max() + width)
        density = inside * norm.pdf(grid[:, None], x, width).mean(axis=1)
        rows += [(label, *point) for point in zip(rounded(grid), rounded(density), strict=True)]
    return _table(("site", column(name), "density"), rows)


def _table(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Columns:
    return {name: [row[k] for row in rows] for k, name in enumerate(names)}


def embedding(x: FloatArray, seed: int = 0) -> FloatArray:
    """Return t-SNE of standardised features, (rows, 2), from their first principal components."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    with warnings.catch_warnings(action="ignore"):  # features that never vary
        z = standardised(PCA(min(COMPONENTS, *x.shape), random_state=seed)).fit_transform(x)
        if len(z) < 4:
            return np.pad(z, ((0, 0), (0, 2)))[:, :2]
        start, perplexity = "pca" if z.shape[1] > 1 else "random", min(30.0, (len(z) - 1) / 3)
        tsne = TSNE(2, init=start, perplexity=perplexity, max_iter=400, random_state=seed)
        places: FloatArray = tsne.fit_transform(z.astype(np.float32)).astype(np.float64)
    return places


# -- features by site --------------------------------------------------------------------------------------


def worst(before: FloatArray, after: FloatArray) -> list[int]:
    """Return the features with the largest share of variance due to site before, then those after."""
    order = [*np.argsort(-before, kind="stable")[:SHOWN], *np.argsort(-after, kind="stable")[:SHOWN]]
    return list(dict.fromkeys(int(k) for k in order))


def boxes(pool: PooledDataset, before: FloatArray, after: FloatArray, names: Sequence[str]) -> Columns:
    """Return the numbers of box plots of features at each site, before and after, covariates adjusted."""
    from matplotlib.cbook import boxplot_stats

    rows = []
    for stage, x in (("before", adjusted(pool, before)), ("after", adjusted(pool, after))):
        for f, feature in enumerate(names):
            for s in np.unique(pool.site):
                values = x[pool.site == s, f]
                box = boxplot_stats(values)[0]
                numbers = rounded(box[key] for key in ("whislo", "q1", "med", "q3", "whishi"))
                rows.append((feature, stage, pool.sites[s], len(values), *numbers))
    return _table(("feature", "stage", "site", "rows", "low", "q1", "median", "q3", "high"), rows)


def curves(pool: PooledDataset, before: FloatArray, after: FloatArray, names: Sequence[str]) -> Columns:
    """Return each feature's course over the first numeric covariate at each site, over the site's range.

    A parabola where the site has 20 rows or more, else a line; sites of fewer than 8 have none.
    """
    k = first_number(pool)
    if k is None:
        return {}
    rows = []
    for stage, x in (("before", before), ("after", after)):
        for s, site in enumerate(pool.sites):
            here = pool.site == s
            c = pool.C[here, k]
            if len(c) < MIN_ROWS_FOR_CURVE or np.ptp(c) == 0:
                continue
            grid = np.linspace(c.min(), c.max(), STEPS)
            # A parabola needs participants along the way, not twenty at two ages.
            degree = 2 if len(c) >= MIN_ROWS_FOR_PARABOLA and len(np.unique(c)) > 5 else 1
            for f, feature in enumerate(names):
                course = np.polynomial.Polynomial.fit(c, x[here, f], degree)(grid)
                points = zip(rounded(grid), rounded(course), strict=True)
                rows += [(feature, stage, site, *point) for point in points]
    return _table(("feature", "stage", "site", column(pool.covariate_names[k]), "value"), rows)


# -- effects -----------------------------------------------------------------------------------------------


def effects(
    pool: PooledDataset,
    before: FloatArray,
    after: FloatArray,
    names: Sequence[str],
    subject: NDArray[Any] | None = None,
) -> dict[str, Any] | None:
    """Return the target's effect on each feature: as measured, so with site intercepts, harmonized with them.

    Without a target, the first covariate's; ``None`` if nothing varies. Of more than two classes the two
    largest are compared. Of a ``subject`` with several rows the first is used: the regression assumes
    independent rows.
    """
    outcome = _outcome(pool)
    if outcome is None:
        return None
    name, values, rows, others, note = outcome
    if subject is not None:
        first = rows[np.unique(np.asarray(subject).astype(str)[rows], return_index=True)[1]]
        if len(first) < len(rows):
            rows, note = np.sort(first), f"{note} Of each participant only the first row was used.".strip()
    table: Columns = {"feature": list(names)}
    about: dict[str, Any] = {"of": name, "participants": len(rows), "significant": {}}
    covariates = others[rows] if others.shape[1] else None
    site = pool.site_labels[rows]
    for stage, x, sites in (
        ("measured", before, None),
        ("with_site", before, site),
        ("harmonized", after, site),
    ):
        try:
            result = stat_map(x[rows], values[rows], covariates=covariates, sites=sites)
        except InputError as error:
            about["significant"][stage], note = None, f"{note} {error}".strip()
            continue
        about["contrast"] = result.contrast
        about["significant"][stage] = int(result.significant(**FDR).sum())
        table |= {f"{stage}_{key}": rounded(getattr(result, key)) for key in ("effect", "t", "q")}
    return {"about": about | {"note": note}, "table": table}


def _outcome(pool: PooledDataset) -> tuple[str, NDArray[Any], NDArray[np.intp], FloatArray, str] | None:
    """Return name, values, which rows to use, what to adjust for, and a remark."""
    if pool.y is not None and pool.task == "number":
        return pool.target_name, pool.y, np.arange(len(pool)), pool.C, ""
    labels, counts = np.unique([] if pool.y is None else pool.y.astype(str), return_counts=True)
    if len(labels) > 1:
        y = np.asarray(pool.y).astype(str)
        rows = np.flatnonzero(np.isin(y, labels[np.argsort(-counts, kind="stable")[:2]]))
        note = f"Of {len(labels)} classes, the two largest." if len(labels) > 2 else ""
        return pool.target_name, y, rows, pool.C, note
    varying = np.flatnonzero(np.ptp(pool.C, axis=0) > 0)
    if not len(varying):
        return None
    k, note = varying[0], "No target was named, so these are the effects of the first covariate."
    return pool.covariate_names[k], pool.C[:, k], np.arange(len(pool)), np.delete(pool.C, k, axis=1), note
