"""Brains of three scanners, harmonized
====================================

Simulated T1-weighted brains, so that each person's volume without a scanner is known. From a BIDS folder to
harmonized volumes. The voxels are large (8 mm) and the people few, so that it runs in seconds; the
benchmark (``equipool benchmark adni-sim``) has the figures that count.
"""

# %%
# A BIDS folder of 42 people, the truth beside it. ``write`` makes one person at a time.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import equipool as ep
from equipool.simulate.brains import COHORTS, Cohort

work = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(work.name) / "bids"
scanners = COHORTS["adni"].scanners
cohort = Cohort(scanners, patients=(5, 5, 5), controls=(9, 9, 9), overlap=0.8)
brains = ep.simulate_brains(cohort, resolution=8.0, random_state=0)
for _ in brains.write(folder):
    pass

people = ep.read_bids(folder)
volumes = ep.Volumes.build(list(people.path), cache=Path(work.name) / "cache")
print(volumes)

# %%
# Fit on three quarters of them.

fit = np.arange(len(people)) % 4 != 0
held = np.flatnonzero(~fit)
harmonizer = ep.ImageHarmonizer()
harmonizer.fit(volumes[fit], site=people.site[fit], covariates=people.loc[fit, ["age"]])

# %%
# Held-out participants: their harmonized volumes, beside those without a scanner. A volume is compared with
# its clean one by the correlation of their differences from the mean brain: individual anatomy counts, what
# all brains share does not.

clean = np.stack([brains.clean(k)[volumes.mask] for k in held])
measured = volumes.read(held)
given = {"site": people.site[held], "covariates": people.loc[held, ["age"]]}
after = harmonizer.transform(volumes[held], **given).read()


def likeness(x):
    scaled = x / np.median(x, axis=1, keepdims=True)
    found, true = scaled - scaled.mean(axis=0), clean - clean.mean(axis=0)
    return np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(found, true, strict=True)])


print(
    f"likeness with the clean volumes: {likeness(measured):.2f} as scanned, {likeness(after):.2f} harmonized"
)

# %%
# One held-out participant of each scanner.


def slice_of(values):
    return np.rot90(volumes.unmask(values)[:, :, volumes.mask.shape[2] // 2])


shown = [int(np.flatnonzero(people.site.to_numpy()[held] == scanner.name)[0]) for scanner in scanners]
figure, axes = plt.subplots(3, 4, figsize=(9, 7.5), layout="constrained")
for row, k in zip(axes, shown, strict=True):
    scale = np.median(measured[k]) / np.median(after[k])
    pictures = (measured[k] / scale, after[k], measured[k] / scale - after[k], clean[k])
    for panel, values in zip(row, pictures, strict=True):
        panel.set_axis_off()
        limits = {"cmap": "gray", "vmin": 0, "vmax": np.quantile(values, 0.995)}
        if panel is row[2]:
            size = np.quantile(np.abs(values), 0.99)
            limits = {"cmap": "RdBu_r", "vmin": -size, "vmax": size}
        panel.imshow(slice_of(values), **limits)
    person = people.iloc[held[k]]
    row[0].set_title(f"{person.site}, {person.age:.0f} years, {person.dx}", fontsize=10)
for panel, title in zip(
    axes[0][1:], ("harmonized", "estimated site effect", "without a scanner"), strict=True
):
    panel.set_title(title, fontsize=10)
plt.show()
work.cleanup()
