"""Where the time of one complete run goes: ours on Adult, both stages and every metric, on one core.

    python benchmarks/adult_run.py [--seed 0] [--dataset adult]

Prints CPU seconds and shares of each part, the sum, and the peak of the process's memory.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

from equipool.benchmark.datasets import load_dataset
from equipool.benchmark.methods import make_method, settings_of
from equipool.judge import classify_site, shuffled_band
from equipool.judge.scores import age_from_tau, delta_eq, equivariance_of, mmd_measure

PARTS: dict[str, float] = {}


@contextmanager
def part(name: str) -> Iterator[None]:
    start = time.process_time()
    yield
    PARTS[name] = PARTS.get(name, 0.0) + time.process_time() - start


def timed(owner: object, method: str, name: str) -> None:
    """Let a bound method count as a part."""
    inner = getattr(owner, method)

    def outer(*arguments: object, **named: object) -> object:
        with part(name):
            return inner(*arguments, **named)

    setattr(owner, method, outer)


def run(dataset: str, seed: int) -> None:
    with part("load"):
        data = load_dataset(dataset, seed)
    train, test = data.train, data.test
    ours = make_method("ours", seed, settings_of(dataset, "ours"))
    timed(ours, "_fit_stage_one", "stage one")
    timed(ours, "_fit_stage_two", "stage two")
    with part("fit, whole"):
        ours.fit(train.X, train.y, site=train.site_labels, covariates=train.C)
    PARTS["fit, the rest"] = PARTS.pop("fit, whole") - PARTS["stage one"] - PARTS["stage two"]
    with part("transform and predict"):
        codes = ours.transform(train.X), train.site_labels, ours.transform(test.X), test.site_labels
        ours.predict(test.X)
    with part("Adv, the paper's adversary"):
        classify_site(*codes, classifiers=["paper"], seed=seed)
    with part("three site classifiers"):
        classify_site(*codes, seed=seed)
    with part("shuffled sites"):
        shuffled_band(*codes, seed=seed)
    with part("ΔEq"):
        delta_eq(ours.tau_vector(test.X), test.C)
    with part("M"):
        mmd_measure(codes[2], test.site_labels)
    with part("age from τ, equivariance error"):
        age_from_tau(ours.tau_vector(train.X), train.C[:, 0], ours.tau_vector(test.X), test.C[:, 0])
        equivariance_of(ours, test.X)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="adult")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        run(arguments.dataset, arguments.seed)
    total = sum(PARTS.values())
    for name, seconds in sorted(PARTS.items(), key=lambda item: -item[1]):
        print(f"{name:34s} {seconds:7.1f} s  {seconds / total:5.0%}")
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    print(f"{'all':34s} {total:7.1f} s\npeak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
