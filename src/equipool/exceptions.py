"""The errors and warnings of equipool, and parts of their messages."""

import difflib
from collections.abc import Iterable


class EquipoolError(Exception):
    """Base of every error that equipool raises on purpose."""


class InputError(EquipoolError, ValueError):
    """The data or an argument cannot be used; the message names the cause and the remedy."""


class MissingExtraError(EquipoolError, ImportError):
    """An optional package is needed for this call; the message says what to install."""


class EquipoolWarning(UserWarning):
    """The result is correct, but the user should know something about it."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its type where it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message about an unknown name: the most similar name, or ``otherwise``."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.65)
    return f"did you mean {near[0]!r}?" if near else otherwise
