"""Every degenerate table of the users' list through our harmonizer and the ComBat family, as one table.

    python benchmarks/degenerate.py

Outcomes: "right" (finite, and nearer to the clean features than the raw ones where these are known), "worse"
(finite but further away), "NaN", "clear error" (a sentence that says what was wrong), "traceback" (all else).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from equipool.benchmark.harmonizers import ComBatPeer
from equipool.estimators import SiteHarmonizer
from equipool.exceptions import InputError
from equipool.simulate import simulate_table

METHODS: dict[str, Callable[[], Any]] = {
    "ours": lambda: SiteHarmonizer(),
    "combat": lambda: ComBatPeer("combat"),
    "combat-gam": lambda: ComBatPeer("combat-gam"),
    "covbat-gam": lambda: ComBatPeer("covbat-gam"),
}


@dataclass
class Case:
    """A table to fit on, one to transform, and the truth of the latter where it is known."""

    X: Any
    site: Any
    c: Any
    X_new: Any = None
    site_new: Any = None
    c_new: Any = None
    clean: Any = None
    settings: dict[str, Any] | None = None
    y: Any = None


def cases() -> dict[str, Case]:
    full, none = (simulate_table(overlap=overlap, people=60, random_state=3) for overlap in (1.0, 0.0))
    x, site, c, clean = full.pool.X, full.pool.site_labels, full.pool.C, full.clean
    rng = np.random.default_rng(0)
    lonely = np.where(np.arange(len(site)) == 0, "lonely", site)
    constant = np.where(np.arange(x.shape[1]) < 0.6 * x.shape[1], 1.0, x)
    holes = np.where(rng.random(x.shape) < 0.05, np.nan, x)
    infinite = np.where(np.arange(x.size).reshape(x.shape) == 5, np.inf, x)
    text = pd.DataFrame(x).astype(object)
    text.iloc[3, 1] = "n/a?"
    tied = (site == "GE").astype(float)
    many = simulate_table(sites=[f"s{k}" for k in range(200)], people=4, overlap=1.0)
    two = site != "Siemens"
    return {
        "ages overlap": Case(x, site, c, clean=clean),
        "ages disjoint": Case(none.pool.X, none.pool.site_labels, none.pool.C, clean=none.clean),
        "a site with one person": Case(x, lonely, c, clean=clean),
        "60 % constant features": Case(constant, site, c, clean=np.where(constant == 1.0, 1.0, clean)),
        "5 % NaN": Case(holes, site, c, clean=clean),
        '5 % NaN, missing="impute"': Case(holes, site, c, clean=clean, settings={"missing": "impute"}),
        "an infinite value": Case(infinite, site, c),
        "text among numbers": Case(text, site, c),
        "an empty table": Case(x[:0], site[:0], c[:0]),
        "one site": Case(x, np.full(len(x), "GE"), c),
        "diagnosis tied to site, as covariate": Case(x, site, np.column_stack([c[:, 0], tied])),
        "diagnosis tied to site, as y": Case(x, site, c, y=np.where(tied, "AD", "CN")),
        "one class, as y": Case(x, site, c, y=np.full(len(x), "CN")),
        "covariate never varies": Case(x, site, np.full((len(x), 1), 50.0)),
        "200 sites of 4 people": Case(many.pool.X, many.pool.site_labels, many.pool.C, clean=many.clean),
        "unseen site": Case(x[two], site[two], c[two], x[~two], site[~two], c[~two]),
        'unseen site, "adapt"': Case(
            x[two], site[two], c[two], x, site, c, clean=clean, settings={"unseen_site": "adapt"}
        ),
        "one new person": Case(x, site, c, x[:1], site[:1], c[:1]),
        "a batch with one of the sites": Case(x, site, c, x[:9], site[:9], c[:9]),
        "age outside the training range": Case(x, site, c, x, site, c + 60.0),
    }


def outcome(make: Callable[[], Any], case: Case) -> str:
    new = (case.X, case.site, case.c) if case.X_new is None else (case.X_new, case.site_new, case.c_new)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tool = make()
            if isinstance(tool, SiteHarmonizer):
                tool.set_params(**(case.settings or {}))
            extra = {} if case.y is None else {"y": case.y}
            tool.fit(case.X, site=case.site, covariates=case.c, **extra)
            found = np.asarray(tool.transform(new[0], site=new[1], covariates=new[2]), dtype=float)
    except (ValueError, TypeError) as error:
        own = isinstance(error, InputError) or (len(str(error)) < 400 and str(error)[:1].isupper())
        return "clear error" if own else f"traceback ({type(error).__name__})"
    except Exception as error:
        return f"traceback ({type(error).__name__})"
    raw = np.asarray(new[0], dtype=float)
    if not np.isfinite(found[np.isfinite(raw)]).all():  # a cell that was not measured may stay empty
        return "NaN"
    if case.clean is None:
        return "right"
    away = []
    for values in (raw, found):
        error = values - case.clean
        away.append(np.nanmean(np.abs(error - np.nanmean(error, axis=0))))
    return "right" if away[1] < away[0] else "worse"


def table() -> pd.DataFrame:
    return pd.DataFrame(
        {
            name: {method: outcome(make, case) for method, make in METHODS.items()}
            for name, case in cases().items()
        }
    ).T


def main() -> None:
    found = table()
    print("| | " + " | ".join(found.columns) + " |\n" + "|---" * (len(found.columns) + 1) + "|")
    for name, row in found.iterrows():
        print(f"| {name} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
