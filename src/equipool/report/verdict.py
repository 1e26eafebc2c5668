"""The verdict on a harmonization: what predictions in held-out participants mean, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from equipool.judge.scores import Columns

CONFOUNDED = 0.9  # balanced accuracy from covariates alone above which a site effect cannot be assessed
CLOSE = 0.03  # of a balanced accuracy, R² or AUC: a smaller difference is not worth a sentence
LEVELS = ("bad", "fair", "good")


def rows_of(table: Columns) -> Iterator[dict[str, Any]]:
    """Return a table's rows, each by the names of its columns."""
    for row in zip(*table.values(), strict=True):
        yield dict(zip(table, row, strict=True))


def best(site_scores: Columns, stage: str, fitted_on: str) -> dict[str, Any] | None:
    """Return the classifier with the highest mean at one stage."""
    rows = [row for row in rows_of(site_scores) if row["stage"] == stage and row["fitted_on"] == fitted_on]
    return max(rows, key=lambda row: row["mean"]) if rows else None


def verdict(judged: dict[str, Any] | None, covariates: str = "") -> list[dict[str, str]]:
    """Return what ``Account.held_out`` means, in sentences that name the covariates; it may be bad news."""
    if judged is None:
        text = "Harmonization cannot be judged: the sites are too small to hold participants out."
        return [{"level": "fair", "text": text}]
    return [_site_verdict(judged, covariates), *_signal_verdicts(judged)]


def _site_verdict(judged: dict[str, Any], covariates: str) -> dict[str, str]:
    """Judge by classifiers fitted on training and on held-out participants, and say the worse."""
    both = [_site(judged, who) for who in dict.fromkeys(judged["site_scores"]["fitted_on"])]
    sites = [site for site in both if site is not None]
    sites = [site for site in sites if site["floor"] < CONFOUNDED] or sites
    site = min(sites, key=lambda one: (LEVELS.index(one["level"]), -one["after"]))
    level, before, after, floor = site["level"], site["before"], site["after"], site["floor"]
    by_covariates = site["covariates"] is not None and site["covariates"] >= site["chance"]
    others = f"from {covariates} alone" if by_covariates else "by chance"
    if site["worse"]:
        text = "Bad news: the site is easier to predict than before"
    elif floor >= CONFOUNDED and by_covariates:
        level = "fair"
        text = f"Removal of the site effect cannot be assessed: the site can be predicted {others}"
    elif not site["shown"]:
        text = f"There was little to remove: the site could hardly be predicted better than {others}"
    elif level == "good":
        text = f"The site can no longer be predicted better than {others}"
    elif site["unclear"] and before - after < 0.5 * (before - floor):
        text = "There are too few participants to say whether the site effect is removed"
    elif site["unclear"]:
        text = "The site effect may be removed: the rest is within the sampling error of so few participants"
    elif level == "fair":
        gone = (before - after) / (before - floor)
        text = f"The site effect is reduced, not removed: {gone:.0%} of the excess over {floor:.2f} is gone"
    else:
        text = "Bad news: the site can be predicted nearly as well as before"
    given = "" if site["covariates"] is None else f"; given {covariates} alone: {site['covariates']:.2f}"
    numbers = (
        "A classifier predicts the site of held-out participants with a balanced accuracy of "
        f"{after:.2f} (as measured: {before:.2f}){given}; chance: {site['chance']:.2f}."
    )
    return {"level": level, "text": f"{text}. {numbers}"}


def _site(judged: dict[str, Any], who: str) -> dict[str, Any] | None:
    """Return how well the best classifier predicts the site; the floor: covariates alone, or chance."""
    stages = ("before", "after", "covariates", "shuffled")
    rows = {stage: best(judged["site_scores"], stage, who) for stage in stages}
    before, after, covariates, chance = (row["mean"] if row else None for row in rows.values())
    if before is None or after is None or chance is None:
        return None
    noise = {stage: _noise(row["sd"], judged["folds"]) for stage, row in rows.items() if row}
    floor = max(chance, covariates or 0.0)
    unclear, worse = after <= floor + noise["after"], after > max(before, floor) + noise["after"]
    shown, little = before > floor + noise["before"], before - after < 0.25 * (before - floor)
    level = "good" if after <= floor + CLOSE else "fair"
    if worse or (shown and little and not unclear):
        level = "bad"
    site = {"level": level, "before": before, "after": after, "covariates": covariates, "chance": chance}
    return site | {"floor": floor, "shown": shown, "unclear": unclear, "worse": worse}


def _noise(sd: float | None, folds: int) -> float:
    """Return by how much a mean over folds must differ to count: two standard errors, at least 0.03."""
    return max(CLOSE, 2 * (sd or 0.0) / folds**0.5)


def _signal_verdicts(judged: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Judge what is predicted within sites, where knowing the site does not help."""
    for row in rows_of(judged["signals"]):
        if row["where"] != "within sites" or row["change"] is None:
            continue
        what, change, noise = row["what"], row["change"], _noise(row["change_sd"], judged["folds"])
        hardly = (0.5 if row["measure"] == "AUC" else 0.0) + CLOSE  # chance, or little more
        level, text = "good", f"The signal of {what} was preserved"
        if change > noise and row["after"] > hardly:
            text = f"{what} is predicted better than before"
        elif row["before"] <= hardly:
            level, why = "fair", "so a loss of its signal could not be detected"
            text = f"{what} could hardly be predicted before, {why}"
        elif change < -noise:
            level, text = "bad", f"Bad news: part of the signal of {what} was lost"
        elif change < -CLOSE:
            level, why = "fair", "the change is within its sampling error"
            text = f"The signal of {what} may be reduced; {why}"
        numbers = f"{row['before']:.2f} as measured, {row['after']:.2f} harmonized".replace("-", "−")
        yield {"level": level, "text": f"{text} ({row['measure']} within sites {numbers})."}
