"""How well does preprocessing do on heads whose truth is known, and how long does it take?

    python benchmarks/preprocessing.py [--mricron FOLDER] [--affines 10]

Registration: the MNI brain is moved by random affines (up to 15°, 12 % of scale, 15 mm); once as it is, once
altered: warped by about 1 mm (the warp's own affine part taken out, so that the truth stays the truth), other
contrast, bias field, noise; then altered with up to 45° and 30 mm. Masks and times need a head with its
skull: ch2 of Debian's package mricron-data.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from nilearn.datasets import load_mni152_brain_mask, load_mni152_template
from scipy import ndimage
from scipy.spatial.transform import Rotation

from equipool.data.nifti import mni_grid
from equipool.preprocess.heads import (
    Steps,
    preprocess_head,
    read_head,
    register,
    remove_bias,
    template,
)

SHAPE, SIZE = (180, 210, 180), 1.2  # the grid that moved heads are sampled on, which holds all of them


def random_affine(rng, degrees=15, millimetres=15):
    """Return mm of the still head to mm of the moved one, with at least half of the largest rotation."""
    axis = rng.normal(size=3)
    angle = np.deg2rad(rng.uniform(degrees / 2, degrees)) * rng.choice([-1, 1])
    affine = np.eye(4)
    rotation = Rotation.from_rotvec(angle * axis / np.linalg.norm(axis)).as_matrix()
    affine[:3, :3] = rotation @ np.diag(1 + rng.uniform(-0.12, 0.12, 3))
    affine[:3, 3] = rng.uniform(-millimetres, millimetres, 3)
    return affine


def moved(values, affine, motion, order=1):
    """Sample an image that was moved by ``motion`` on a scanner's grid."""
    grid = np.diag([SIZE, SIZE, SIZE, 1.0])
    grid[:3, 3] = -SIZE / 2 * np.array(SHAPE) + [3.0, -18.0, 10.0]
    voxels = np.linalg.inv(affine) @ np.linalg.inv(motion) @ grid
    return ndimage.affine_transform(values, voxels, output_shape=SHAPE, order=order), grid


def smooth(rng, shape, millimetres, spread):
    """Return a smooth random field, made on every fourth voxel."""
    coarse = ndimage.gaussian_filter(rng.normal(size=[n // 4 + 2 for n in shape]), millimetres / 4)
    field = ndimage.zoom(coarse, 4, order=1)[: shape[0], : shape[1], : shape[2]]
    return spread * (field - field.mean()) / field.std()


def warped(values, brain, rng):
    """Warp by 1 mm (SD along each axis) without any affine part over the brain."""
    points = np.argwhere(brain)[::101]
    design = np.c_[points, np.ones(len(points))]
    places = np.indices(values.shape, dtype=np.float32)
    for axis in range(3):
        field = smooth(rng, values.shape, 12, 1.0)
        fit = np.linalg.lstsq(design, field[tuple(points.T)], rcond=None)[0]
        affine_part = fit[3] + sum(fit[k] * np.arange(n).reshape([-1 if k == j else 1 for j in range(3)])
                                   for k, n in enumerate(values.shape))  # fmt: skip
        places[axis] += field - affine_part
    return ndimage.map_coordinates(values, places, order=1)


def altered(values, brain, rng):
    """Return another person's brain from another scanner, roughly."""
    values = warped(values, brain, rng).clip(0) ** rng.uniform(0.7, 1.5)
    values = values * np.exp(smooth(rng, values.shape, 40, 0.15))
    return (values + 0.03 * rng.normal(size=values.shape) * (values > 0)).clip(0)


def registration(count):
    image, brain = load_mni152_template(resolution=1), load_mni152_brain_mask(resolution=1).get_fdata() > 0
    values = image.get_fdata(dtype=np.float32)
    points = (np.c_[np.argwhere(brain)[::997], np.ones(len(np.argwhere(brain)[::997]))] @ image.affine.T)[
        :, :3
    ]
    print("| registration | mean error mm, mean over affines | largest mean | largest point | seconds |")
    print("|---|---|---|---|---|")
    for kind, limits in (("identical", (15, 15)), ("altered", (15, 15)), ("altered", (45, 30))):
        errors, largest, seconds = [], [], []
        for seed in range(count):
            rng = np.random.default_rng(seed)
            truth = random_affine(rng, *limits)
            shown = values if kind == "identical" else altered(values, brain, rng)
            head, grid = moved(shown, image.affine, truth)
            start = time.process_time()
            found = register(head, grid)
            seconds.append(time.process_time() - start)
            gap = np.linalg.norm(points @ (found - truth)[:3, :3].T + (found - truth)[:3, 3], axis=1)
            errors.append(gap.mean())
            largest.append(gap.max())
        print(
            f"| {kind}, {count} affines up to {limits[0]}°, 12 %, {limits[1]} mm "
            f"| {np.mean(errors):.3f} | {max(errors):.3f} | {max(largest):.3f} "
            f"| {np.mean(seconds):.1f} |",
            flush=True,
        )


def bias_field(count):
    image, brain = load_mni152_template(resolution=1), load_mni152_brain_mask(resolution=1).get_fdata() > 0
    clean = image.get_fdata(dtype=np.float32)
    print("\n| N4 | correlation with the clean brain before | after | field SD % before | after |")
    print("|---|---|---|---|---|")
    for seed in range(count):
        rng = np.random.default_rng(seed)
        field = np.exp(smooth(rng, clean.shape, 40, 0.25)).astype(np.float32)
        noisy = (clean * field + 0.02 * rng.normal(size=clean.shape)).clip(0).astype(np.float32)
        fixed = remove_bias(noisy, brain, np.ones(3))
        before, after = (np.corrcoef(each[brain], clean[brain])[0, 1] for each in (noisy, fixed))
        solid = brain & (clean > 0.4)
        left = [100 * np.log(each[solid].clip(1e-3) / clean[solid]).std() for each in (clean * field, fixed)]
        print(f"| field {seed} | {before:.3f} | {after:.3f} | {left[0]:.1f} | {left[1]:.1f} |", flush=True)


def dice(one, other):
    return 2 * (one & other).sum() / (one.sum() + other.sum())


def chain(folder, count):
    if not (folder / "ch2.nii.gz").is_file():
        print(f"\nNo head with skull in {folder}: apt-get install mricron-data, or give --mricron FOLDER.")
        return
    head, affine = read_head(folder / "ch2.nii.gz")
    reference = read_head(folder / "ch2bet.nii.gz")[0] > 0
    inside = template(2.0).mask  # read before the clock starts
    steps = Steps(resolution=2.0)
    print("\n| whole head (ch2, 2 mm) | Dice with ch2bet | Dice with MNI | mask | n4 | register | resample "
          "| normalize | all s (CPU) |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for seed in range(count):
        values, own, truth = head, affine, reference
        if seed:
            rng = np.random.default_rng(seed)
            motion = random_affine(rng)
            values, own = moved(head, affine, motion)
            truth = moved(reference.astype(np.float32), affine, motion)[0] > 0.5
            values = values * np.exp(smooth(rng, values.shape, 40, 0.2)) + rng.normal(0, 3, values.shape)
            values = values.clip(0).astype(np.float32)
        start = time.process_time()
        brain = preprocess_head(values, own, steps)
        cpu = time.process_time() - start
        # The reference mask goes where the chain took the head.
        shape, grid = mni_grid(2.0)
        voxels = np.linalg.inv(own) @ brain.to_head @ grid
        there = ndimage.affine_transform(truth.astype(np.float32), voxels, output_shape=shape, order=1) > 0.5
        took = " | ".join(
            f"{brain.seconds[s]:.1f}" for s in ("mask", "n4", "register", "resample", "normalize")
        )
        name = "as it is" if not seed else f"moved, biased, noisy {seed}"
        print(
            f"| {name} | {dice(brain.mask, there):.3f} | {dice(brain.mask, inside):.3f} | {took} "
            f"| {cpu:.1f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mricron", type=Path, default=Path("/usr/share/mricron/templates"), metavar="FOLDER"
    )
    parser.add_argument("--affines", type=int, default=10)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--fields", type=int, default=3)
    arguments = parser.parse_args()
    registration(arguments.affines)
    bias_field(arguments.fields)
    chain(arguments.mricron, arguments.heads)


if __name__ == "__main__":
    main()
