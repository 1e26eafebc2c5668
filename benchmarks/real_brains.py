"""Real brains of two scanners: what is left of the scanner, and of age and sex, on people held out.

    python benchmarks/real_brains.py FOLDER [--figure brains.png] [--folds 5] [--repeats 1] [--first-seed 0]
    python benchmarks/real_brains.py FOLDER --severity wab_aq
    python benchmarks/real_brains.py FOLDER --break-at sub-M2052

FOLDER is a BIDS folder of T1w brains on one grid whose participants.tsv has the columns scanner, age and sex.
Everything is fitted on the training participants of each fold. The scanner is predicted by the best of three
classifiers from means over blocks of 4 × 4 × 4 voxels; age and sex by linear models on all voxels. One core.

--severity names a column in which the scanners' patients may differ: the prediction from it alone is shown
beside, and the scanner is predicted once more among pairs of both scanners' participants alike in it.

--break-at names the first participant after a change of the scanner, as `equipool check` may say: those
before become another site for the methods. What is predicted is the scanner as the table has it. With
--shuffled, sites are shuffled before harmonizing, and shuffled scanners are predicted: the level of chance.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_score
from threadpoolctl import threadpool_limits

from equipool import EquivariantPooler, ImageHarmonizer
from equipool.benchmark.harmonizers import ComBatPeer
from equipool.data.bids import read_bids
from equipool.data.volumes import Volumes, block_means
from equipool.judge.classifiers import BALANCED, UNWEIGHTED, classify_site


@dataclass(frozen=True)
class People:
    """The cohort in memory."""

    volumes: Volumes
    scans: np.ndarray
    scanner: np.ndarray
    age: np.ndarray
    sex: np.ndarray
    site: np.ndarray  # for the methods: the scanner, or its parts
    severity: np.ndarray | None = None

    @property
    def scaled_age(self) -> np.ndarray:
        """Around 0, in standard deviations, (people, 1)."""
        return ((self.age - self.age.mean()) / self.age.std())[:, None]

    def paired(self, rows: np.ndarray) -> np.ndarray:
        """Return those of rows with a counterpart of the other scanner within a quarter of a deviation."""
        first, second = (rows[self.scanner[rows] == k] for k in (0, 1))
        apart = np.abs(self.severity[first][:, None] - self.severity[second])
        one, other = linear_sum_assignment(apart)
        near = apart[one, other] <= 0.25 * self.severity.std()
        return np.sort(np.concatenate([first[one[near]], second[other[near]]]))


def people_of(folder: Path, severity: str | None = None, break_at: str | None = None) -> People:
    table = read_bids(folder)
    volumes = Volumes.build(table["path"])
    codes = [np.unique(table[name].astype(str), return_inverse=True)[1] for name in ("scanner", "sex")]
    about = None
    if severity is not None:
        numbers = pd.to_numeric(table[severity], errors="coerce")
        about = numbers.fillna(numbers.median()).to_numpy()
    scanner, site = codes[0], codes[0].copy()
    if break_at is not None:
        first = int(np.flatnonzero(table["participant_id"].astype(str) == break_at)[0])
        site[(scanner == scanner[first]) & (np.arange(len(table)) < first)] = scanner.max() + 1
    age = table["age"].to_numpy(dtype=float)
    return People(volumes, volumes.read(), scanner, age, codes[1], site, about)


# -- methods: each returns everybody's volumes, having learned from the training people ------------------


def raw(people: People, train: np.ndarray) -> np.ndarray:
    return people.scans


def gain(people: People, train: np.ndarray) -> np.ndarray:
    return people.scans / np.median(people.scans, axis=1, keepdims=True)


def combat(before: Callable[[People, np.ndarray], np.ndarray]) -> Callable[[People, np.ndarray], np.ndarray]:
    def method(people: People, train: np.ndarray) -> np.ndarray:
        rows = before(people, train)
        about = {"site": people.site, "covariates": people.age[:, None]}
        tool = ComBatPeer("combat").fit(rows[train], **{name: value[train] for name, value in about.items()})
        return tool.transform(rows, **about).astype(np.float32)

    return method


def ours(with_sex: bool) -> Callable[[People, np.ndarray], np.ndarray]:
    def method(people: People, train: np.ndarray) -> np.ndarray:
        y = people.sex[train] if with_sex else None
        about = {"site": people.site, "covariates": people.age}
        model = ImageHarmonizer().fit(people.volumes[train], y, **{k: v[train] for k, v in about.items()})
        return model.transform(people.volumes, **about).read()

    return method


METHODS = {
    "raw": raw,
    "gain": gain,
    "ComBat on raw": combat(raw),
    "ComBat on gain": combat(gain),
    "ours": ours(with_sex=False),
    "ours, sex allowed for": ours(with_sex=True),
}


# -- scores ----------------------------------------------------------------------------------------------


def scanner_scores(
    features: np.ndarray, scanner: np.ndarray, train: np.ndarray, test: np.ndarray
) -> dict[str, float]:
    """Return the balanced accuracy of each of three classifiers, and of the best of them in this fold.

    Which is best is seen on the test participants, so the best of three is above chance by chance alone; the
    mean of one classifier over folds is not. Beside them the best accuracy and AUC of the classifiers of
    Table 1, which are fitted for accuracy: the level of chance is the share of the larger scanner there.
    """
    data = features[train], scanner[train], features[test], scanner[test]
    balanced = {s.classifier: s.balanced_accuracy for s in classify_site(*data, classifiers=BALANCED)}
    plain = classify_site(*data, classifiers=UNWEIGHTED)
    return {
        "scanner": max(balanced.values()),
        **balanced,
        "accuracy": max(score.accuracy for score in plain),
        "AUC": max(score.auc for score in plain),
    }


def best_score(features: np.ndarray, scanner: np.ndarray, train: np.ndarray, test: np.ndarray) -> float:
    """Return the balanced accuracy of the best of three classifiers."""
    return scanner_scores(features, scanner, train, test)["scanner"]


def kernel(rows: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return the inner products of volumes whose voxels are standardised over the training people."""
    scaled = rows - rows[train].mean(axis=0)
    deviation = scaled[train].std(axis=0)
    scaled = scaled / np.where(deviation > 0, deviation, 1)
    return scaled @ scaled.T / scaled.shape[1]


def chosen(models: list, inner: np.ndarray, target: np.ndarray, scoring: str) -> object:
    """Return the model that does best within the training people, fitted on them."""
    scores = [cross_val_score(model, inner, target, cv=4, scoring=scoring).mean() for model in models]
    return models[int(np.argmax(scores))].fit(inner, target)


def biology(rows: np.ndarray, people: People, train: np.ndarray, test: np.ndarray) -> tuple[float, float]:
    """Return the AUC of the sex and R² of the age."""
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.svm import SVC

    products = kernel(rows, train)
    inner, outer = products[np.ix_(train, train)], products[np.ix_(test, train)]
    svms = [SVC(kernel="precomputed", C=c, class_weight="balanced") for c in (0.03, 0.1, 0.3, 1)]
    ridges = [KernelRidge(alpha=a, kernel="precomputed") for a in (0.1, 0.3, 1, 3, 10, 30)]
    sex = chosen(svms, inner, people.sex[train], "roc_auc").decision_function(outer)
    middle = people.age[train].mean()
    age = middle + chosen(ridges, inner, people.age[train] - middle, "r2").predict(outer)
    return roc_auc_score(people.sex[test], sex), r2_score(people.age[test], age)


def codes(people: People, train: np.ndarray, test: np.ndarray, seed: int) -> dict[str, float]:
    """Return how well scanner and sex are predicted from the released codes."""
    pooler = EquivariantPooler(
        encoder="components", steps=300, learning_rate=1e-2, task="class", random_state=seed
    )
    pooler.fit(
        people.volumes[train], people.sex[train], site=people.site[train], covariates=people.age[train]
    )
    scores = scanner_scores(pooler.transform(people.volumes), people.scanner, train, test)
    correct = (pooler.predict(people.volumes[test]) == people.sex[test]).mean()
    return scores | {"sex accuracy": correct}


def fold_scores(
    people: People, train: np.ndarray, test: np.ndarray, seed: int, methods: list[str]
) -> dict[str, dict[str, float]]:
    result = {}
    pairs = None if people.severity is None else (people.paired(train), people.paired(test))
    for name in methods:
        rows = METHODS[name](people, train)
        blocks = block_means(rows, people.volumes.mask)
        result[name] = scanner_scores(blocks, people.scanner, train, test)
        if pairs is not None:
            result[name]["among pairs"] = best_score(blocks, people.scanner, *pairs)
        result[name]["sex AUC"], result[name]["age R²"] = biology(rows, people, train, test)
    result["codes"] = codes(people, train, test, seed)
    result["age alone"] = scanner_scores(people.scaled_age, people.scanner, train, test)
    if pairs is not None:
        given = {"severity alone": people.severity[:, None]}
        given["age and severity alone"] = np.column_stack([people.age, people.severity])
        for name, columns in given.items():
            result[name] = {
                "scanner": best_score(columns, people.scanner, train, test),
                "among pairs": best_score(columns, people.scanner, *pairs),
            }
    mixed = np.random.default_rng(seed).permutation(people.scanner)
    volumes = block_means(gain(people, train), people.volumes.mask)
    result["scanners permuted"] = scanner_scores(volumes, mixed, train, test)
    if pairs is not None:
        result["scanners permuted"]["among pairs"] = best_score(volumes, mixed, *pairs)
    return result


# -- figure ----------------------------------------------------------------------------------------------


def draw(people: People, path: Path) -> None:
    """Draw two people of each scanner: as scanned, harmonized, and the difference."""
    import matplotlib.pyplot as plt

    before = gain(people, np.arange(len(people.scans)))
    after = ours(with_sex=False)(people, np.arange(len(people.scans)))
    after /= np.median(people.scans)
    before, after = (people.volumes.unmask(rows) for rows in (before, after))
    who = np.concatenate([np.flatnonzero(people.scanner == k)[5:7] for k in (0, 1)])
    axial = people.volumes.mask.shape[2] // 2
    figure, axes = plt.subplots(3, len(who), figsize=(3 * len(who), 10))
    shown = (("scanned, gain 1", before), ("harmonized", after), ("difference", after - before))
    for row, (title, images) in zip(axes, shown, strict=True):
        for axis, k in zip(row, who, strict=True):
            part = title == "difference"
            limits = {"vmin": -0.3, "vmax": 0.3, "cmap": "RdBu_r"} if part else {"vmin": 0, "vmax": 1.6}
            axis.imshow(images[k, :, :, axial].T, origin="lower", **({"cmap": "gray"} | limits))
            axis.set_title(f"{title}, scanner {people.scanner[k]}", fontsize=9)
            axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def show(found: pd.DataFrame) -> None:
    """Print means (standard deviations) over folds, and of the classifier that is best in a whole repeat.

    In the folds of one repeat everybody is held out once: its best classifier is picked on all participants,
    not on a fifth of them, and is the less above chance by chance.
    """

    def cell(values: pd.Series) -> str:
        return f"{values.mean():.3f} ({values.std():.3f})"

    table = found.pivot_table(index="row", columns="score", values="value", aggfunc=cell, sort=False)
    single = found[found["score"].isin(BALANCED)].groupby(["row", "repeat", "score"])["value"].mean()
    table.insert(1, "best of a repeat", single.groupby(["row", "repeat"]).max().groupby("row").apply(cell))
    print(table.fillna("").to_string())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0, help="of the folds")
    parser.add_argument("--severity", help="a column of numbers")
    parser.add_argument("--break-at", metavar="ID", help="who was the first after a change of the scanner")
    parser.add_argument("--shuffled", action="store_true", help="shuffle scanners before harmonizing")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    people = people_of(arguments.folder, arguments.severity, arguments.break_at)
    if arguments.figure:
        draw(people, arguments.figure)
    strata = 2 * people.scanner + people.sex
    found = []
    with threadpool_limits(1):
        for repeat in range(arguments.first_seed, arguments.first_seed + arguments.repeats):
            folds = StratifiedKFold(arguments.folds, shuffle=True, random_state=repeat)
            shown = people
            if arguments.shuffled:
                order = np.random.default_rng(1000 + repeat).permutation(len(people.scanner))
                shown = replace(people, scanner=people.scanner[order], site=people.site[order])
            for train, test in folds.split(strata, strata):
                for name, scores in fold_scores(shown, train, test, repeat, arguments.methods).items():
                    about = {"row": name, "repeat": repeat}
                    found += [about | {"score": score, "value": v} for score, v in scores.items()]
    show(pd.DataFrame(found))
    print(f"The larger scanner has {np.bincount(people.scanner).max() / len(people.scanner):.3f} of people.")


if __name__ == "__main__":
    main()
