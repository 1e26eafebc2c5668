"""A code that does not tell the sex, and what it costs
====================================================

The site need not be a scanner. Here it is the sex, the covariate is the age and the target is a good
income, as in the paper's tables: features know the sex, and a score learned from them may use it. How far
can the sex be read from what is released, and how much accuracy does hiding it cost? The table is made up,
so nothing is downloaded; on the real ones it is ``equipool benchmark german adult --methods all --out
table1``.
"""

# %%
# 800 people. Some features depend on the sex (hours, occupation), some on age, some on what decides the
# income.

import matplotlib.pyplot as plt
import numpy as np

import equipool as ep
from equipool.estimators import NaivePooler
from equipool.judge import classify_site

rng = np.random.default_rng(0)
people = 800
woman = rng.random(people) < 0.4
age = rng.uniform(20, 65, people) + 4 * woman
skill = rng.standard_normal(people)
income = skill + 0.02 * (age - 42) - 0.4 * woman + 0.6 * rng.standard_normal(people) > 0.4
X = np.column_stack(
    [
        skill + 0.5 * rng.standard_normal(people),  # education
        0.8 * skill - 0.6 * woman + 0.5 * rng.standard_normal(people),  # occupation
        40 - 5 * woman + 4 * rng.standard_normal(people),  # hours
        (age - 18) * 0.5 + 4 * rng.standard_normal(people),  # years of work
        1.2 * woman + rng.standard_normal(people),  # something that is the sex and nothing else
        rng.standard_normal(people),
    ]
)
sex = np.where(woman, "woman", "man")
pool = ep.PooledDataset.from_arrays(
    X, site=sex, covariates=age, covariate_names=["age"], y=np.where(income, "high", "low")
)
train, test = pool.split(0.4, stratify=("site", "target"), random_state=0)
print(ep.check(pool.to_frame(), site="site", covariates="age", target="target").verdict)

# %%
# ``power`` is the dial: each code has this length and is released with noise of unit variance, so that a
# shorter code tells less of everything; ``None`` releases codes as they are. The readers are fitted on the
# codes of the training people and judged on the others.


def judge(pooler):
    pooler.fit(pool.X[train], pool.y[train], site=sex[train], covariates=pool.C[train])
    codes = [pooler.transform(pool.X[rows]) for rows in (train, test)]
    read = max(score.auc for score in classify_site(codes[0], sex[train], codes[1], sex[test]))
    return read, pooler.score(pool.X[test], pool.y[test])


common = {"n_latent": 8, "steps": 150, "learning_rate": 4e-3, "random_state": 0}
found = {"naive": judge(NaivePooler(**common))}
for power in (None, 3.0, 1.0):
    name = "no channel" if power is None else f"power {power:g}"
    found[name] = judge(ep.EquivariantPooler(power=power, **common))
features = max(s.auc for s in classify_site(pool.X[train], sex[train], pool.X[test], sex[test]))
larger = max(np.mean(income[test]), 1 - np.mean(income[test]))
print(f"{'':10s} sex read (AUC)  income right")
print(f"{'features':10s} {features:14.2f}")
for name, (read, right) in found.items():
    print(f"{name:10s} {read:14.2f}  {right:12.1%}")
print(f"{'chance':10s} {0.5:14.2f}  {larger:12.1%}")

# %%
# A naive code tells the sex almost as the features do. Without the channel, matching and misleading a reader
# take a part of it away and may not settle; with it, readers are near chance at no loss. With too much noise
# (power 1) nothing is left, and the larger class is all that can be said. One table and one seed, with 320
# people to judge by: differences of a few hundredths are chance.

figure, panel = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
for (name, (read, right)), colour in zip(
    found.items(), ("#5C5C5C", "#0072B2", "#009E73", "#E69F00"), strict=True
):
    panel.plot(read, right, "o", color=colour, markersize=9)
    panel.annotate(name, (read, right), xytext=(7, 5), textcoords="offset points")
panel.margins(y=0.12)
panel.axvline(0.5, color="black", linestyle=":", linewidth=1)
panel.axhline(larger, color="black", linestyle=":", linewidth=1)
panel.set(xlabel="sex read by the best of three (AUC)", ylabel="income predicted right", xlim=(0.45, 1))
panel.set_title("dotted: chance", fontsize=10)
plt.show()
