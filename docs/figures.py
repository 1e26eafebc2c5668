"""Draw the pictures of explained.md: `python docs/figures.py` writes docs/images/explained-*.png."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import FancyArrowPatch

import equipool as ep
from equipool.groups import CovariateAction, FrameTau
from equipool.report.style import COLOURS, save_figure, styled

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, _, _, RED, GREY = COLOURS
SITES = {"GE": BLUE, "Philips": ORANGE, "Siemens": GREEN}


def save(figure: Any, name: str) -> None:
    """Write one picture."""
    save_figure(figure, IMAGES / f"explained-{name}.png")
    plt.close(figure)


def causes() -> None:
    """Draw what causes what: age, disease and scanner act on X; age is confounded with scanner."""
    places = {"age": (0, 1.5), "disease": (0, 0), "site": (3.2, 1.5), "features": (3.2, 0)}
    colours = {"age": BLUE, "disease": GREEN, "site": RED, "features": GREY}
    figure, axes = plt.subplots(figsize=(6.4, 3), layout="constrained")
    for name, (x, y) in places.items():
        axes.text(x, y, name, ha="center", va="center", fontsize=13, color="white", bbox=_box(colours[name]))
    _arrow(axes, places["age"], places["features"], BLUE, "kept")
    _arrow(axes, places["disease"], places["features"], GREEN, "kept")
    _arrow(axes, places["site"], places["features"], RED, "removed")
    _arrow(axes, places["age"], places["disease"], GREY, "")
    _arrow(axes, places["age"], places["site"], GREY, "who takes part where", style="<|-|>", dashed=True)
    axes.set(xlim=(-0.9, 4.3), ylim=(-0.5, 2))
    axes.set_axis_off()
    save(figure, "causes")


def _box(colour: str) -> dict[str, Any]:
    return {"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": "none"}


def _arrow(
    axes: Any, a: Any, b: Any, colour: str, label: str, *, style: str = "-|>", dashed: bool = False
) -> None:
    line = "--" if dashed else "-"
    options = {"arrowstyle": style, "shrinkA": 34, "shrinkB": 38, "linewidth": 2, "mutation_scale": 16}
    axes.add_patch(FancyArrowPatch(a, b, color=colour, linestyle=line, **options))
    x, y = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
    upright = a[0] == b[0]
    axes.text(x + 0.5 * upright, y + 0.12 * (not upright), label, ha="center", color=colour, fontsize=10)


def ambiguity() -> None:
    """Draw the same points under two stories: one trend and shifts, or a curved trend and none."""
    rng = np.random.default_rng(0)
    windows = {"GE": (20, 42), "Philips": (44, 66), "Siemens": (68, 90)}
    shifts = {"GE": 0.0, "Philips": -1.0, "Siemens": 0.5}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    for site, (low, high) in windows.items():
        age = rng.uniform(low, high, 60)
        value = 9 - 0.04 * age + shifts[site] + 0.25 * rng.standard_normal(60)
        for panel in axes:
            panel.plot(age, value, ".", color=SITES[site], markersize=4, label=site)
        span = np.array([low, high])
        axes[0].plot(span, 9 - 0.04 * span + shifts[site], color=SITES[site], linewidth=2)
    grid = np.linspace(20, 90, 200)
    axes[0].plot(grid, 9 - 0.04 * grid, color="black", linestyle="--", linewidth=1)
    bend = -1.0 / (1 + np.exp(-(grid - 43) / 0.8)) + 1.5 / (1 + np.exp(-(grid - 67) / 0.8))
    axes[1].plot(grid, 9 - 0.04 * grid + bend, color="black", linewidth=1.5)
    axes[0].set_title("one straight trend, three shifts", fontsize=11)
    axes[1].set_title("one curved trend, no shifts: fits as well", fontsize=11)
    axes[0].legend(fontsize=8)
    axes[0].set_ylabel("feature")
    for panel in axes:
        panel.set_xlabel("age (years)")
    save(figure, "ambiguity")


def shrinkage() -> None:
    """Draw the shrinkage of an estimated shift, by participants at the site and by how much sites differ."""
    count = np.arange(1, 101)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for between, colour in ((0.1, BLUE), (0.3, ORANGE), (1.0, GREEN)):
        kept = between**2 / (between**2 + 1 / count)
        axes[0].plot(count, kept, color=colour, label=f"sites differ by {between:g} SD")
    axes[0].set(xlabel="participants at the site", ylabel="share of the shift removed", ylim=(0, 1.02))
    axes[0].legend(fontsize=9)
    for k, colour in ((30.0, BLUE), (200.0, ORANGE), (1000.0, GREEN)):
        axes[1].plot(count, count / (count + k), color=colour, label=f"covariance, mixing = {k:g}")
    axes[1].plot(count, count / (count + 10), color=GREY, linestyle="--", label="scale, 10")
    axes[1].set(xlabel="participants at the site", ylabel="weight of the site's estimate", ylim=(0, 1.45))
    axes[1].legend(fontsize=8, ncols=2, loc="upper left")
    axes[0].set_title("shift", fontsize=11)
    axes[1].set_title("scale and covariance", fontsize=11)
    save(figure, "shrinkage")


def steps() -> None:
    """Draw two features of one simulated pool after each step of the closed form."""
    pool = ep.simulate_table(people=120, overlap=0.6, mixing=0.5, random_state=5).pool
    site, c = pool.site_labels, pool.C
    fitted = ep.SiteHarmonizer(mixing=100.0).fit(pool.X, site=site, covariates=c)
    model = fitted.model_
    z = (pool.features - fitted.feature_mean_) / fitted.feature_scale_
    predicted = model.trend(c)
    codes = np.searchsorted(fitted.sites_.astype(str), site.astype(str))
    at = model.at(c, codes)
    beside, residuals = z - predicted, model.undo(z, at) - predicted
    scaled = model.composition["shift and scale"].undo(z, at) - predicted
    panels = {"beside the trend": beside, "shift and scale removed": scaled, "covariance removed": residuals}
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.5), layout="constrained")
    pair = _most_different(scaled, codes)
    for panel, (title, values) in zip(axes, panels.items(), strict=True):
        for k, name in enumerate(fitted.sites_):
            points = values[codes == k][:, list(pair)]
            panel.plot(*points.T, ".", color=SITES[str(name)], markersize=3, alpha=0.5)
            panel.plot(*_ellipse(points), color=SITES[str(name)], linewidth=2, label=str(name))
        panel.set_title(title, fontsize=11)
        panel.set_xlabel(pool.feature_names[pair[0]])
    axes[0].set_ylabel(pool.feature_names[pair[1]])
    axes[0].legend(fontsize=8)
    save(figure, "steps")


def _most_different(values: Any, codes: Any) -> tuple[int, int]:
    """Return the two features whose correlation differs most between sites."""
    each = np.stack([np.corrcoef(values[codes == k].T) for k in np.unique(codes)])
    spread = np.ptp(each, axis=0)
    first, second = np.unravel_index(spread.argmax(), spread.shape)
    return int(first), int(second)


def _ellipse(points: Any) -> Any:
    """Return the curve of two standard deviations."""
    angle = np.linspace(0, 2 * np.pi, 100)
    root = np.linalg.cholesky(np.cov(points.T))
    return points.mean(axis=0)[:, None] + 2 * root @ np.stack([np.cos(angle), np.sin(angle)])


def sphere() -> None:
    """Draw latents of three participants over age, and what τ undoes."""
    rho = CovariateAction.spread(3)
    tau = FrameTau(rho)
    age = torch.linspace(-1, 1, 60, dtype=torch.float64)
    figure = plt.figure(figsize=(8, 3.4), layout="constrained")
    starts = {BLUE: 0.55, ORANGE: 0.05, GREEN: -0.5}
    for number, title in enumerate(
        ("a participant over age is an arc: ρ(c)", "τ(ℓ)⁻¹ℓ: all at the reference age"), start=1
    ):
        panel = figure.add_subplot(1, 2, number, projection="3d")
        _ball(panel)
        for colour, height in starts.items():
            point = torch.tensor([np.sqrt(1 - height**2), 0.0, height], dtype=torch.float64)
            latent = rho(age) @ point.repeat(60, 1)
            shown = latent if number == 1 else tau(latent).inverse @ latent
            panel.scatter(
                *1.02 * shown.numpy().T, color=colour, s=6 + 26 * (age.numpy() + 1), depthshade=False
            )
        panel.set_title(title, fontsize=11)
    save(figure, "sphere")


def _ball(panel: Any) -> None:
    angles, heights = np.mgrid[0 : 2 * np.pi : 40j, 0 : np.pi : 20j]
    ball = np.cos(angles) * np.sin(heights), np.sin(angles) * np.sin(heights), np.cos(heights)
    panel.plot_wireframe(*ball, color="#BBBBBB", linewidth=0.3)
    panel.set_box_aspect((1, 1, 1), zoom=1.55)
    panel.set_axis_off()
    panel.view_init(elev=20, azim=0)


if __name__ == "__main__":
    for draw in (causes, ambiguity, shrinkage, steps, sphere):
        styled(draw)()
