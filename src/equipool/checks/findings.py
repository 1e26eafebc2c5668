"""What a check can find: one sentence that names the cause and the remedy, with the rows and columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from equipool.exceptions import InputError

__all__ = ["Finding", "Level", "by_level", "listed", "plural", "raise_first_error", "rows_text"]

Level = Literal["error", "warning", "note"]

SHOWN = 5  # how many names or rows a sentence lists before it only counts the rest


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Parameters
    ----------
    level
        ``"error"``: cannot be pooled like this; ``"warning"``: can, but the user should know;
        ``"note"``: for the record.
    code
        A short stable name, such as ``"missing-values"``.
    text
        The sentence for people.
    columns, rows
        Where: column names, and row numbers counted from 1 below the header.
    """

    level: Level
    code: str
    text: str
    columns: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON-ready values."""
        return {
            "level": self.level,
            "code": self.code,
            "text": self.text,
            "columns": list(self.columns),
            "rows": list(self.rows),
        }


def plural(count: int, singular: str, many: str | None = None) -> str:
    """Return "1 row", "2 rows".

    Examples
    --------
    >>> plural(1, "class", "classes"), plural(2000, "row")
    ('1 class', '2 000 rows')
    """
    number = f"{count:,}".replace(",", " ")
    return f"{number} {singular if count == 1 else many or singular + 's'}"


def listed(names: Iterable[object], *, shown: int = SHOWN) -> str:
    """Return "'a', 'b' and 3 more" for the names given.

    Examples
    --------
    >>> listed("abc"), listed("abcdefg", shown=2)
    ("'a', 'b', 'c'", "'a', 'b' and 5 more")
    """
    quoted = [repr(str(name)) for name in names]
    if len(quoted) <= shown:
        return ", ".join(quoted)
    return f"{', '.join(quoted[:shown])} and {len(quoted) - shown} more"


def rows_text(rows: Sequence[int], ids: Sequence[object] | None = None) -> str:
    """Return "rows 3 (sub-03), 8 (sub-08) and 4 more" for 0-based row positions.

    Examples
    --------
    >>> rows_text([2]), rows_text([0, 1], ids=["s1", "s2"])
    ('row 3', 'rows 1 (s1), 2 (s2)')
    """
    named = [
        f"{row + 1}" if ids is None or ids[row] is None else f"{row + 1} ({ids[row]})" for row in rows[:SHOWN]
    ]
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f"row{'s' if len(rows) != 1 else ''} {', '.join(named)}{more}"


def by_level(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return errors first, then warnings, then notes."""
    rank = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(findings, key=lambda finding: rank[finding.level]))


def raise_first_error(findings: Iterable[Finding]) -> None:
    """Raise :class:`InputError` with the first error, and say how many more there are."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        more = f" ({plural(len(errors) - 1, 'more problem')}: run equipool check.)" if len(errors) > 1 else ""
        raise InputError(errors[0].text + more)
