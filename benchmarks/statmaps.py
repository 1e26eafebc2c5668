"""The time of a t-map beside nilearn's in the same run, the largest difference, and what memory it takes.

    python benchmarks/statmaps.py [--people 300] [--voxels 30000]

Ends with one line of JSON. One core. Memory is measured on volumes that lie on disk,
with as many voxels and with four times as many.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from equipool.judge.statmaps import in_volume, stat_map


def people(n: int, voxels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    age, site = rng.uniform(50, 95, n), rng.integers(0, 3, n)
    dx = rng.integers(0, 2, n)
    values = rng.standard_normal((n, voxels), dtype=np.float32)
    return values, dx, age, site


def best(run: Callable[[], np.ndarray], times: int) -> tuple[float, np.ndarray]:
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        t = run()
        spent.append(time.perf_counter() - start)
    return min(spent), t


def ols_of_nilearn(values: np.ndarray, dx: np.ndarray, age: np.ndarray, site: np.ndarray) -> np.ndarray:
    from nilearn.mass_univariate import permuted_ols

    confounds = np.column_stack([age, site == 1, site == 2])
    result = permuted_ols(dx.astype(float), values, confounds, model_intercept=True, n_perm=0)
    return np.ravel(result["t"])


def second_level_of_nilearn(
    values: np.ndarray, dx: np.ndarray, age: np.ndarray, site: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return seconds and t; making images of the array is not counted."""
    import nibabel as nib
    import pandas as pd
    from nilearn.glm.second_level import SecondLevelModel

    edge = int(np.ceil(values.shape[1] ** (1 / 3)))
    mask = np.arange(edge**3).reshape(edge, edge, edge) < values.shape[1]
    images = [nib.Nifti1Image(in_volume(person, mask).astype(np.float32), np.eye(4)) for person in values]
    design = pd.DataFrame({"dx": dx, "age": age, "b": site == 1, "c": site == 2, "intercept": 1}).astype(
        float
    )
    model = SecondLevelModel(mask_img=nib.Nifti1Image(mask.astype(np.uint8), np.eye(4)), n_jobs=1)
    start = time.perf_counter()
    found = model.fit(images, design_matrix=design).compute_contrast("dx", output_type="stat")
    return time.perf_counter() - start, np.asarray(found.dataobj)[mask]


class OnDisk:
    """Volumes that lie on disk as float16, as a cache would keep them."""

    def __init__(self, path: Path, n: int, voxels: int) -> None:
        self.values = np.memmap(path, dtype=np.float16, mode="r", shape=(n, voxels))
        self.shape = (n, voxels)

    def columns(self, start: int, stop: int) -> np.ndarray:
        """Return some voxels of everybody."""
        return self.values[:, start:stop].astype(np.float32)


def memory(n: int, voxels: int) -> float:
    """Return the most that Python and NumPy hold at once, in MiB, while a map is made of volumes on disk."""
    values, dx, age, site = people(n, voxels)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "volumes"
        values.astype(np.float16).tofile(path)
        del values
        tracemalloc.start()
        stat_map(OnDisk(path, n, voxels), dx, covariates=age, sites=site)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--people", type=int, default=300)
    parser.add_argument("--voxels", type=int, default=30_000)
    arguments = parser.parse_args()
    n, voxels = arguments.people, arguments.voxels
    data = people(n, voxels)
    values, dx, age, site = data
    few = (values[:, :10], dx, age, site)
    ols_of_nilearn(*few), second_level_of_nilearn(*few)  # imports are not counted
    with threadpool_limits(1):
        ours, t = best(lambda: stat_map(values, dx, covariates=age, sites=site).t, times=5)
        peers = {
            "permuted_ols": best(lambda: ols_of_nilearn(*data), times=3),
            "SecondLevelModel": second_level_of_nilearn(*data),
        }
    print(f"ours               {ours:7.3f} s")
    for name, (spent, theirs) in peers.items():
        gap = np.abs(theirs - t).max()
        print(f"{name:18s} {spent:7.3f} s  ours takes {ours / spent:.3f} of it; t differs by {gap:.0e}")
    result = {"ours_seconds": ours} | {f"ratio_{name}": ours / spent for name, (spent, _) in peers.items()}
    result |= {f"peak_mib_{factor}x": memory(n, factor * voxels) for factor in (1, 4)}
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
