"""A site that was not there at fit
================================

A classifier of the diagnosis is to work at a hospital that gave no training data. We leave each site out in
turn and compare three ways: no harmonization; a harmonizer that leaves unknown sites as they are
(``"pooled"``); and one that estimates the new site from its own rows without their labels (``"adapt"``).
Then: how many rows does that take?
"""

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import equipool as ep

SITES = ("GE", "Philips", "Siemens", "Canon")
pool = ep.simulate_table(sites=SITES, people=100, overlap=0.7, disease=0.06, noise=0.08, random_state=3).pool
site, age, sick = pool.site_labels, pool.C, np.asarray(pool.y) == "AD"


def classifier():
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.3, max_iter=500))


def score(held, predicted):
    return balanced_accuracy_score(sick[held], predicted)


# %%
# Each site left out once; the harmonizer, too, is fitted without it. The age of the new participants is
# given to the harmonizer; it is not what we predict. The score is the balanced accuracy at the left-out
# site, which asks whether the threshold carries over; an AUC within one site would not see a shift.

table = {"as measured": [], "pooled": [], "adapt": []}
fitted = []
for fit, held in pool.leave_one_site_out():
    model = ep.SiteHarmonizer().fit(pool.X[fit], site=site[fit], covariates=age[fit])
    clean = model.transform(pool.X[fit], site=site[fit], covariates=age[fit])
    raw, harmonized = (classifier().fit(features, sick[fit]) for features in (pool.X[fit], clean))
    table["as measured"].append(score(held, raw.predict(pool.X[held])))
    for way in ("pooled", "adapt"):
        model.set_params(unseen_site=way)
        new = model.transform(pool.X[held], site=site[held], covariates=age[held])
        table[way].append(score(held, harmonized.predict(new)))
    fitted.append((held, model, harmonized))  # with unseen_site="adapt"
left_out = [pool.sites[pool.site[held[0]]] for _, held in pool.leave_one_site_out()]
print(f"{'left out':12s}", *(f"{name:>9s}" for name in left_out), f"{'mean':>9s}")
for name, scores in table.items():
    print(f"{name:12s}", *(f"{value:9.2f}" for value in scores), f"{np.mean(scores):9.2f}")

# %%
# How many participants of the new site? ``adapt`` sees the first 3, 6, 12 … of them at a time, without
# labels.

sizes = (1, 3, 6, 12, 25, 50, 100)
curves = []
for held, model, harmonized in fitted:
    row = []
    for size in sizes:
        batches = [held[start : start + size] for start in range(0, len(held) - size + 1, size)]
        with warnings.catch_warnings(action="ignore"):  # that a few rows are too few, which is the question
            seen = [model.transform(pool.X[rows], site=site[rows], covariates=age[rows]) for rows in batches]
        row.append(score(np.concatenate(batches), harmonized.predict(np.vstack(seen))))
    curves.append(row)

figure, (bars, lines) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for k, (name, colour) in enumerate(zip(table, ("#5C5C5C", "#E69F00", "#0072B2"), strict=True)):
    bars.bar(np.arange(len(left_out)) + 0.27 * (k - 1), table[name], 0.25, color=colour, label=name)
bars.axhline(0.5, color="black", linestyle=":", linewidth=1)
bars.set_xticks(range(len(left_out)), left_out)
bars.set(ylim=(0.3, 1.18), ylabel="balanced accuracy", title="each site left out (chance: 0.5)")
bars.legend(frameon=False, ncols=3, loc="upper center")
lines.plot(sizes, np.array(curves).T, color="#56B4E9", linewidth=1)
lines.plot(sizes, np.mean(curves, axis=0), "o-", color="#0072B2", label="mean of the sites")
lines.axhline(np.mean(table["as measured"]), color="#5C5C5C", linestyle="--", label="as measured")
lines.set_xscale("log")
lines.set_xticks(sizes, [str(size) for size in sizes])
lines.set(xlabel="participants of the new site in one batch", ylabel="balanced accuracy", title="adapt")
lines.legend(frameon=False)
plt.show()

# %%
# One new participant alone cannot tell what the scanner does: the residual and the shift are one
# number. From a dozen participants on, the site is known well enough.
