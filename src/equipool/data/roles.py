"""Guess by their names what the columns of a table are: its site, covariates, target and ids."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from equipool.exceptions import InputError
from equipool.files import packaged

ROLES = ("site", "covariates", "target", "id")

# Usual names, and those of the presets' tables.
COLUMNS = packaged("data", "columns.toml")
NAMES: dict[str, list[str]] = COLUMNS["roles"]

# What may follow such a name: age_months, sex_code.
ENDINGS = ("", "id", "code", "name", "group", "label", "number", "years", "months", "days")


def guess_roles(
    columns: Iterable[str], *, roles: Sequence[str] = ROLES, taken: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the column of each role by its name; upper case and separators do not matter.

    A role that no name fits is not in the result. Columns that are ``taken`` have a role already.

    Examples
    --------
    >>> guess_roles(["Subject ID", "Scanner", "AGE", "Sex", "volume"])
    {'site': 'Scanner', 'covariates': ['AGE', 'Sex'], 'id': 'Subject ID'}
    """
    taken = {*taken}
    free = {name: plain_name(name) for name in map(str, columns) if name not in taken}
    guessed: dict[str, Any] = {}
    for what in NAMES:
        role = "covariates" if what in ("age", "sex") else what
        groups = ([n for n, plain in free.items() if plain in group.split()] for group in NAMES[what])
        fits = next(filter(None, groups), []) if role in roles else []
        if len(fits) > 1:
            flag = "--covariate" if role == "covariates" else f"--{role}"
            names = " and ".join(map(repr, fits))
            raise InputError(f"Columns {names} could each be the {what}; choose one with {flag}.")
        if fits:
            guessed[role] = [*guessed.get(role, []), *fits] if role == "covariates" else fits[0]
    return guessed


def named_like_a_role(name: str) -> bool:
    """Return whether a column is called as ids, sites, covariates or targets are."""
    words = {word for groups in NAMES.values() for group in groups for word in group.split()}
    plain = plain_name(name)
    return any(plain.endswith(ending) and plain.removesuffix(ending) in words for ending in ENDINGS)


def plain_name(name: str) -> str:
    """Return a column's name in lower case, without separators."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
