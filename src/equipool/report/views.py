"""The numbers behind a report's figures, as small tables of columns."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.data import PooledDataset
from equipool.exceptions import InputError
from equipool.judge.scores import Columns, adjusted
from equipool.judge.statmaps import StatMap, stat_map

__all__ = [
    "boxes",
    "column",
    "curves",
    "densities",
    "effects",
    "embedding",
    "first_number",
    "rounded",
    "smooth_density",
    "worst",
]

FloatArray = NDArray[np.float64]

GRID = 60  # points of a density
STEPS = 16  # points of a curve
SHOWN = 3  # features with most of the site before, and as many after
ENOUGH = 8  # people of a site below which no curve is drawn
OURS = {"site", "x", "y", "stage", "feature", "density", "value", "drawing", "people", "median"}
COMPONENTS = 20  # principal components that an embedding starts from


def column(name: str) -> str:
    """Return a variable's name as that of a column beside ours.

    Examples
    --------
    >>> column("age"), column("site")
    ('age', 'site (covariate)')
    """
    return f"{name} (covariate)" if name in OURS else name


def smooth_density(own: FloatArray, grid: FloatArray) -> FloatArray:
    """Return a kernel density of values on a grid, 0 beyond their range.

    Examples
    --------
    >>> density = smooth_density(np.array([1.0, 2.0, 3.0]), np.linspace(0, 4, 401))
    >>> round(float(density.sum() * 0.01), 1)
    0.9
    """
    spread = float(grid[-1] - grid[0]) or 1.0
    width = max(0.9 * float(np.std(own)) * len(own) ** -0.2, spread / 60)
    density = np.exp(-0.5 * ((grid[:, None] - own) / width) ** 2).sum(axis=1)
    density /= len(own) * width * np.sqrt(2 * np.pi)
    inside = (grid >= own.min() - width) & (grid <= own.max() + width)
    result: FloatArray = np.where(inside, density, 0.0)
    return result


def densities(pool: PooledDataset) -> dict[str, Columns]:
    """Return each numeric covariate's density at each site."""
    found: dict[str, Columns] = {}
    for k, name in enumerate(pool.covariate_names):
        values = pool.C[:, k]
        if len(np.unique(values)) < 3:
            continue
        grid = np.linspace(values.min(), values.max(), GRID)
        own_name = column(name)
        table: Columns = {"site": [], own_name: [], "density": []}
        for s, site in enumerate(pool.sites):
            own = values[pool.site == s]
            if len(own):
                table["site"] += [site] * GRID
                table[own_name] += rounded(grid)
                table["density"] += rounded(smooth_density(own, grid))
        found[name] = table
    return found


def embedding(x: FloatArray, seed: int = 0) -> FloatArray:
    """Return t-SNE of standardised features (people, 2), by way of their first principal components."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    scale = x.std(axis=0)
    z = (x - x.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    count = min(COMPONENTS, *z.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # features that never vary
        z = PCA(count, random_state=seed).fit_transform(z)
        if len(z) < 4:
            return np.pad(z, ((0, 0), (0, 2)))[:, :2]
        perplexity = min(30.0, (len(z) - 1) / 3)
        # Started from two components where there are that many; their signs are numpy's, so it repeats.
        start = z[:, :2] / max(float(z[:, 0].std()), 1e-12) * 1e-4 if count > 1 else "random"
        tsne = TSNE(2, init=start, perplexity=perplexity, max_iter=400, random_state=seed)
        places: FloatArray = tsne.fit_transform(z.astype(np.float32)).astype(np.float64)
    return places


# -- features by site --------------------------------------------------------------------------------------


def worst(before: FloatArray, after: FloatArray) -> list[int]:
    """Return the features with most of the site before, then those with most of it left, by their shares."""
    order = [*np.argsort(-before, kind="stable")[:SHOWN], *np.argsort(-after, kind="stable")[:SHOWN]]
    return list(dict.fromkeys(int(k) for k in order))


def boxes(pool: PooledDataset, before: FloatArray, after: FloatArray, names: list[str]) -> Columns:
    """Return five numbers of each feature at each site, before and after, covariates taken out."""
    columns = ("feature", "stage", "site", "people", "low", "q1", "median", "q3", "high")
    table: Columns = {name: [] for name in columns}
    for stage, x in (("before", adjusted(pool, before)), ("after", adjusted(pool, after))):
        for f, feature in enumerate(names):
            for s, site in enumerate(pool.sites):
                own = x[pool.site == s, f]
                if not len(own):
                    continue
                q1, middle, q3 = np.quantile(own, [0.25, 0.5, 0.75])
                reach = 1.5 * (q3 - q1)
                low = own[own >= q1 - reach].min()
                high = own[own <= q3 + reach].max()
                row = (feature, stage, site, len(own), *rounded([low, q1, middle, q3, high]))
                for name, value in zip(table, row, strict=True):
                    table[name].append(value)
    return table


def curves(pool: PooledDataset, before: FloatArray, after: FloatArray, names: list[str]) -> Columns:
    """Return each feature's course over the first numeric covariate at each site, over the site's own range.

    A parabola where the site has 20 people or more, else a line; sites of fewer than 8 have none.
    """
    k = first_number(pool)
    if k is None:
        return {}
    covariate = column(pool.covariate_names[k])
    table: Columns = {name: [] for name in ("feature", "stage", "site", covariate, "value")}
    for stage, x in (("before", before), ("after", after)):
        for f, feature in enumerate(names):
            for s, site in enumerate(pool.sites):
                rows = pool.site == s
                own = pool.C[rows, k]
                if rows.sum() < ENOUGH or np.ptp(own) == 0:
                    continue
                grid = np.linspace(own.min(), own.max(), STEPS)
                centre, reach = own.mean(), np.ptp(own)
                # A parabola needs people along the way, not twenty at two ages.
                degree = 2 if rows.sum() >= 20 and len(np.unique(own)) > 5 else 1
                fit = np.polynomial.Polynomial.fit((own - centre) / reach, x[rows, f], degree)
                table["feature"] += [feature] * STEPS
                table["stage"] += [stage] * STEPS
                table["site"] += [site] * STEPS
                table[covariate] += rounded(grid)
                table["value"] += rounded(fit((grid - centre) / reach))
    return table


def first_number(pool: PooledDataset) -> int | None:
    """Return the place of the first covariate that has more than two values."""
    return next((k for k in range(pool.C.shape[1]) if len(np.unique(pool.C[:, k])) > 2), None)


# -- effects -----------------------------------------------------------------------------------------------


def effects(
    pool: PooledDataset,
    before: FloatArray,
    after: FloatArray,
    names: list[str],
    subject: NDArray[Any] | None = None,
) -> tuple[dict[str, Any], Columns] | None:
    """Return what the target does to each feature: as measured, with the site in the regression, harmonized.

    Without a target, the first covariate. Of more than two classes the two largest. Of a ``subject`` with
    several rows the first, since the regression takes rows to be independent. ``None`` if nothing varies.
    """
    from scipy.stats import false_discovery_control

    chosen = _outcome(pool)
    if chosen is None:
        return None
    name, values, rows, others, note = chosen
    if subject is not None:
        taken = np.flatnonzero(rows)
        once = taken[np.unique(np.asarray(subject).astype(str)[taken], return_index=True)[1]]
        if len(once) < len(taken):
            rows = np.isin(np.arange(len(pool)), once)
            note = f"{note} Of each person only the first row was taken.".strip()
    columns: Columns = {"feature": list(names)}
    about: dict[str, Any] = {"of": name, "people": int(rows.sum()), "note": note, "found": {}}
    covariates = others[rows] if others.shape[1] else None
    for label, x, sites in (
        ("measured", before, None),
        ("with_site", before, pool.site_labels[rows]),
        ("harmonized", after, None),
    ):
        try:
            found: StatMap = stat_map(x[rows], values[rows], covariates=covariates, sites=sites)
        except InputError as error:
            about["found"][label] = None
            about["note"] = f"{about['note']} {error}".strip()
            continue
        q = np.ones(len(names))
        q[found.tested] = false_discovery_control(found.p[found.tested]) if found.tested.any() else 1.0
        about["contrast"] = found.contrast
        about["found"][label] = int((q <= 0.05).sum())
        columns[f"{label}_effect"] = rounded(found.effect)
        columns[f"{label}_t"] = rounded(found.t)
        columns[f"{label}_q"] = rounded(q)
    return about, columns


def _outcome(
    pool: PooledDataset,
) -> tuple[str, NDArray[Any], NDArray[np.bool_], FloatArray, str] | None:
    """Return name, values, whom to take, what to adjust for, and a remark."""
    everybody = np.ones(len(pool), dtype=bool)
    if pool.y is not None:
        if pool.task == "number":
            return pool.target_name, pool.y, everybody, pool.C, ""
        labels, counts = np.unique(pool.y.astype(str), return_counts=True)
        if len(labels) > 1:
            largest = labels[np.argsort(-counts, kind="stable")[:2]]
            note = f"Of {len(labels)} classes, the two largest." if len(labels) > 2 else ""
            y = pool.y.astype(str)
            return pool.target_name, y, np.isin(y, largest), pool.C, note
    varying = [k for k in range(pool.C.shape[1]) if np.ptp(pool.C[:, k]) > 0]
    if not varying:
        return None
    k = varying[0]
    note = "No target was named, so these are the effects of the first covariate."
    others = np.delete(pool.C, k, axis=1)
    return pool.covariate_names[k], pool.C[:, k], everybody, others, note


def rounded(values: Any) -> list[float]:
    """Return five significant digits: more would only make the file larger."""
    return [float(f"{value:.5g}") for value in values]
