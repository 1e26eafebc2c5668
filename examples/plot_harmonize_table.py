"""A table of regional volumes, harmonized
=======================================

Three scanners measured regional volumes of different people. We fit a harmonizer on two thirds of them,
apply it to the others, and ask of the others three things: are they nearer to the truth (which a simulation
knows), can the scanner still be read, and what did the harmonizer think that each scanner does?
"""

# %%
# The data: a simulated table, so that the truth is known. With ``overlap=0.5`` the scanners' ages overlap
# by half.

import matplotlib.pyplot as plt
import numpy as np

import equipool as ep
from equipool.judge import classify_site

truth = ep.simulate_table(people=100, overlap=0.5, random_state=1)
pool = truth.pool
train, test = pool.split(1 / 3, stratify=("site", "target"), random_state=0)
print(pool)

# %%
# Fit on the training participants. The diagnosis is not needed. Where scanners differ in how many
# patients they have, ``SiteHarmonizer(keep_target=True)`` can allow for it.

harmonizer = ep.SiteHarmonizer()
harmonizer.fit(pool.X[train], site=pool.site_labels[train], covariates=pool.C[train])


def harmonized(rows):
    return harmonizer.transform(pool.X[rows], site=pool.site_labels[rows], covariates=pool.C[rows])


# %%
# **Is it nearer to the truth?** Agreement with the clean features of held-out people; each feature's mean
# is left out, since nobody can know which scanner is right.


def agreement(x, clean):
    a, b = x - x.mean(axis=0), clean - clean.mean(axis=0)
    return np.mean(1 - ((a - b) ** 2).mean(axis=0) / b.var(axis=0))


after = harmonized(test)
print(f"R² with the clean features: {agreement(pool.X[test], truth.clean[test]):.2f} as measured")
print(f"                            {agreement(after, truth.clean[test]):.2f} harmonized")

# %%
# **Can the scanner be read?** The best of three readers, fitted on training people. It must be compared
# with what the age alone tells, because the scanners' people differ in age and the age is kept on
# purpose.


def read(a, b):
    return max(score.auc for score in classify_site(a, pool.site[train], b, pool.site[test]))


for name, a, b in (
    ("as measured", pool.X[train], pool.X[test]),
    ("harmonized", harmonized(train), after),
    ("the age alone", pool.C[train], pool.C[test]),
):
    print(f"scanner read from {name:14s} AUC {read(a, b):.2f}")

# %%
# One region against age, and what the harmonizer says each scanner adds to every region.

colours = dict(zip(pool.sites, ("#0072B2", "#E69F00", "#009E73"), strict=True))
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", sharey=True)
for panel, values, title in zip(
    axes,
    (pool.X[test], after, truth.clean[test]),
    ("as measured", "harmonized", "the truth"),
    strict=True,
):
    for site, colour in colours.items():
        own = pool.site_labels[test] == site
        panel.plot(pool.C[test][own, 0], values[own, 0], ".", color=colour, label=site)
    panel.set(title=f"{pool.feature_names[0]}, {title}", xlabel="age (years)")
axes[0].legend(frameon=False)
axes[0].set_ylabel("volume")

# %%

effects = harmonizer.site_effects_
figure, panel = plt.subplots(figsize=(8, 4.2), layout="constrained")
for k, (site, colour) in enumerate(colours.items()):
    own = effects[effects["site"] == site]
    place = np.arange(len(own)) + 0.2 * (k - 1)
    panel.hlines(place, own["low"], own["high"], color=colour, linewidth=2, label=site)
    panel.plot(own["shift"], place, "o", color=colour, markersize=4)
panel.axvline(0, color="#5C5C5C", linewidth=0.8)
panel.set_yticks(range(len(pool.feature_names)), pool.feature_names)
panel.set(xlabel="what the scanner adds, with an interval of 95 %")
panel.legend(frameon=False)
plt.show()
