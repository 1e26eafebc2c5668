"""``equipool demo``: a simulated pool of three scanners, from table to harmonized volumes."""

from argparse import Namespace
from typing import Any

import pandas as pd

from equipool import simulate
from equipool.cli.outputs import announce, check_out, whole_or_nothing
from equipool.data import check
from equipool.data.tables import write_table
from equipool.estimators import EquivariantPooler, SiteHarmonizer
from equipool.files import write_json
from equipool.judge import classify_site
from equipool.judge.scores import r2_with_clean
from equipool.progress import say
from equipool.report.figures import pooling_figure, preflight_figure
from equipool.report.style import save_figure
from equipool.simulate import SimulatedTable

SUMMARY = """
In participants who were not in the fit:
  agreement with clean volumes (R²)           {clean_raw:5.2f} as measured, {clean_harmonized:.2f} harmonized
  prediction of the site, best of three (AUC) {site_auc_raw:5.2f} as measured, {site_auc_code:.2f} from codes
  chance                                       0.50
  prediction of the diagnosis from codes      {accuracy:5.0%} correct (larger class: {majority:.0%})
"""


def run(arguments: Namespace) -> int:
    """Simulate, check, pool and harmonize; write it all into the folder."""
    truth = simulate.simulate_table(overlap=arguments.overlap, random_state=arguments.seed)
    pool, frame = truth.pool, truth.pool.to_frame()
    check_out(arguments)
    facts = {"overlap": arguments.overlap, "seed": arguments.seed}
    with whole_or_nothing(arguments, facts) as new:
        table = write_table(new / "table.csv", frame)
        report = check(table, site="site", covariates="age", target="dx", id="id")
        print(report)
        write_json(new / "preflight.json", report.to_dict(), indent=2)
        save_figure(preflight_figure(report), new / "preflight.png")
        say("\nFitting the pooler (about 20 seconds) …")
        numbers, harmonized = _pooled(truth, arguments.seed)
        frame[list(pool.feature_names)] = harmonized
        write_table(new / "harmonized.csv", frame)
        site_auc = {"raw features": numbers["site_auc_raw"], "the code": numbers["site_auc_code"]}
        figure = pooling_figure(pool, harmonized, pool.feature_names[0], site_auc, chance=0.5)
        save_figure(figure, new / "pooled.png")
    print(SUMMARY.format(**numbers))
    made = {"table": "table.csv", "harmonized": "harmonized.csv", "picture": "pooled.png"}
    announce(arguments, {name: arguments.out / file for name, file in made.items()})
    return 0


def _pooled(truth: SimulatedTable, seed: int) -> tuple[dict[str, float], Any]:
    """Fit on half of the participants, judge on the other half; harmonize all of them."""
    pool = truth.pool
    first, second = pool.split(0.5, stratify=("site", "target"), random_state=seed)
    train, test = pool[first], pool[second]
    given = {"site": train.site_labels, "covariates": train.C}
    pooler = EquivariantPooler(random_state=seed, steps=800).fit(train.X, train.y, **given)
    harmonizer = SiteHarmonizer(random_state=seed).fit(train.X, **given)
    harmonized = harmonizer.transform(pool.X, site=pool.site_labels, covariates=pool.C)

    def site_auc(a: Any, b: Any) -> float:
        return max(score.auc for score in classify_site(a, train.site, b, test.site, seed=seed))

    return {
        "site_auc_raw": site_auc(train.X, test.X),
        "site_auc_code": site_auc(pooler.transform(train.X), pooler.transform(test.X)),
        "accuracy": pooler.score(test.X, test.y),
        "majority": float(pd.Series(test.y).value_counts(normalize=True).max()),
        "clean_raw": r2_with_clean(pool.features[second], truth.clean[second]),
        "clean_harmonized": r2_with_clean(harmonized[second], truth.clean[second]),
    }, harmonized
