"""A custom encoder
================

Any torch module that takes scaled features (rows, features) to (rows, n_latent) can be the encoder. Here each
half of a table has its network. Whatever the module, the code turns with age exactly, because that is built
into Φ and not learned.
"""

# %%
# The modules are ordinary torch. They are given untrained; ``fit`` trains a copy. For images the input is
# (rows, 1, x, y, z).

import matplotlib.pyplot as plt
import torch
from torch import nn

import equipool as ep
from equipool.groups.testing import equivariance_error
from equipool.judge import classify_site


class TwoHalves(nn.Module):
    """A network for each half of the features, joined by a linear layer."""

    def __init__(self, n_features: int, n_latent: int, width: int = 16) -> None:
        super().__init__()
        self.split = n_features // 2
        self.first = nn.Sequential(nn.Linear(self.split, width), nn.SiLU())
        self.second = nn.Sequential(nn.Linear(n_features - self.split, width), nn.SiLU())
        self.join = nn.Linear(2 * width, n_latent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.first(x[:, : self.split]), self.second(x[:, self.split :])
        return self.join(torch.cat(halves, dim=1))


# %%
# Two poolers that differ in the encoder alone, few steps each.

pool = ep.simulate_table(people=100, overlap=0.5, disease=0.12, random_state=4).pool
train, test = pool.split(0.4, stratify=("site", "target"), random_state=0)
settings = {"n_latent": 12, "steps": 220, "learning_rate": 3e-3, "random_state": 0}
torch.manual_seed(0)
poolers = {
    "usual": ep.EquivariantPooler(**settings),
    "two halves": ep.EquivariantPooler(encoder=TwoHalves(12, 12), decoder=nn.Linear(12, 12), **settings),
}
for name, pooler in poolers.items():
    pooler.fit(pool.X[train], pool.y[train], site=pool.site_labels[train], covariates=pool.C[train])
    codes = [pooler.transform(pool.X[rows]) for rows in (train, test)]
    site = max(s.auc for s in classify_site(codes[0], pool.site[train], codes[1], pool.site[test]))
    accuracy = pooler.score(pool.X[test], pool.y[test])
    print(f"{name:11s} diagnosis: accuracy {accuracy:.0%}; site, best of three classifiers: AUC {site:.2f}")

# %%
# The code is equivariant at the latents of held-out participants, to rounding, whatever the modules. How well
# the age of new participants is predicted is another matter: that is learned.

pooler = poolers["two halves"]
one, two = pooler.network_.one, pooler.network_.two
scaled = torch.from_numpy((pool.X[test] - pooler.feature_mean_) / pooler.feature_scale_)
latents = one.latent(scaled).detach()
error = equivariance_error(
    lambda latent: two.phi(*one.tau.at_reference(latent)), one.tau.action, inputs=latents
)
print(f"equivariance error of the code: {error:.1e}")

predicted = pooler.read_covariates(pool.X[test])[:, 0]
figure, panel = plt.subplots(figsize=(4.5, 4), layout="constrained")
for site, colour in zip(pool.sites, ("#0072B2", "#E69F00", "#009E73"), strict=True):
    here = pool.site_labels[test] == site
    panel.plot(pool.C[test][here, 0], predicted[here], ".", color=colour, label=site)
panel.axline((55, 55), slope=1, color="#5C5C5C", linewidth=0.8)
panel.set(xlabel="age (years)", ylabel="age predicted by τ (held out)", title="encoder of two halves")
panel.legend(frameon=False)
plt.show()
