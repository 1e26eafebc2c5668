"""What τ and Φ do, on a sphere one can see
========================================

Latents live on a sphere and the covariate acts on it by rotation. In three dimensions this can be drawn:
one plane turns with age, the third axis stands still.
"""

# %%
# A hundred people on S². Age turns them around the vertical axis; who they are decides where they would
# stand at the age zero (scaled: −1 is the youngest, 1 the oldest).

import matplotlib.pyplot as plt
import numpy as np
import torch

from equipool.groups import CovariateAction, FrameTau, Phi
from equipool.groups.testing import equivariance_error
from equipool.nn import equivariance_loss

torch.manual_seed(0)
rho = CovariateAction.spread(3)
tau = FrameTau(rho)

age = torch.linspace(-1, 1, 100, dtype=torch.float64)
height = 0.35 * torch.randn(100, dtype=torch.float64)  # the person's own
upright = torch.nn.functional.normalize(
    torch.stack([torch.ones(100), torch.zeros(100), height], 1).double(), dim=1
)
latent = rho(age) @ upright

# %%
# τ reads the age back from the phase of the plane that turns. It is exact, and so is undoing it: τ(ℓ)⁻¹ℓ
# no longer knows the age and keeps the person.

read = tau.covariate(latent)[:, 0]
print(f"largest error of the age read back: {(read - age).abs().max():.1e}")
undone = tau(latent).inverse @ latent
print(f"largest distance from where people started: {(undone - upright).norm(dim=1).max():.1e}")

# %%
# Φ(ℓ) = τ(ℓ)·b(τ(ℓ)⁻¹ℓ) applies any map b where everybody stands at one age, and turns back. Whatever b
# is, a person who ages turns in the code as in the latent space. The same network without τ has no such
# structure.

b = torch.nn.Sequential(torch.nn.Linear(3, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)).double()
print(f"equivariance error of b alone: {equivariance_error(b, rho):.2f}")
print(f"equivariance error of Φ:       {equivariance_error(Phi(tau, b), rho):.1e}")

# %%
# Equation (4) of the paper is zero where latents turn with the age as they should, and grows if they do
# not. It is a sum over all pairs of people, computed without going through the pairs.

shuffled = rho(age[torch.randperm(100)]) @ upright
print(f"equation (4): {equivariance_loss(tau.vector(latent), age, rho):.1e} as it should be")
print(f"              {equivariance_loss(tau.vector(shuffled), age, rho):.2f} with ages shuffled")

# %%
# The picture: the latents coloured by age; everybody moved to the age zero; and the code of a
# trained-by-nobody b.

panels = {
    "latents ℓ: age turns them": latent,
    "moved to one age: τ(ℓ)⁻¹ℓ": undone,
    "the code Φ(ℓ), any b": torch.nn.functional.normalize(Phi(tau, b)(latent), dim=1).detach(),
}
angles, heights = np.mgrid[0 : 2 * np.pi : 40j, 0 : np.pi : 20j]
ball = np.cos(angles) * np.sin(heights), np.sin(angles) * np.sin(heights), np.cos(heights)
figure = plt.figure(figsize=(11, 4), layout="constrained")
for k, (title, points) in enumerate(panels.items()):
    panel = figure.add_subplot(1, 3, k + 1, projection="3d")
    panel.plot_wireframe(*ball, color="#BBBBBB", linewidth=0.3)
    shown = panel.scatter(*points.numpy().T * 1.01, c=age.numpy(), cmap="cividis", s=18, depthshade=False)
    panel.set_title(title)
    panel.set_box_aspect((1, 1, 1), zoom=1.25)
    panel.set_axis_off()
    panel.view_init(elev=25, azim=0)
figure.colorbar(shown, ax=figure.axes, shrink=0.6, label="age, scaled")
plt.show()
