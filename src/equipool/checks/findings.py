"""What a check finds: a sentence with cause and remedy, its rows and columns; phrases in common."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from equipool.exceptions import InputError
from equipool.files import packaged

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)

SENTENCES: dict[str, str] = packaged("checks", "findings.toml")
SHOWN = 5  # how many names or rows a sentence lists before it only counts the rest


@dataclass(frozen=True)
class Finding:
    """One result of a check."""

    #: ``"error"``: cannot be pooled like this; ``"warning"``: can, but; ``"note"``: for the record
    level: Level
    code: str  #: a short stable name, such as ``"missing-values"``
    text: str  #: the sentence for the user
    columns: tuple[str, ...] = ()  #: names of columns
    rows: tuple[int, ...] = ()  #: row numbers, counted from 1 below the header


def _finding(level: Level, code: str, *columns: str, rows: Iterable[int] = (), **words: Any) -> Finding:
    """Return a finding about columns and 0-based row positions, with its sentence of findings.toml."""
    words = {"name": next(iter(columns), None), "names": listed(columns)} | words
    sentence, positions = SENTENCES[code].format(**words), tuple(int(row) + 1 for row in rows)
    return Finding(level, code.format(**words), sentence, columns, positions)


error, warning, note = (partial(_finding, level) for level in LEVELS)


def plural(count: int, singular: str, many: str | None = None) -> str:
    """Return "1 row", "2 rows"."""
    number = f"{count:,}".replace(",", " ")
    return f"{number} {singular if count == 1 else many or singular + 's'}"


def listed(names: Iterable[object], *, shown: int = SHOWN) -> str:
    """Return "'a', 'b' and 3 more" for the names given."""
    quoted = [repr(str(name)) for name in names]
    return _and_more(quoted[:shown], len(quoted))


def rows_text(rows: Sequence[int], ids: Sequence[object] | None = None) -> str:
    """Return "rows 3 (sub-03), 8 (sub-08) and 4 more" for 0-based row positions."""
    shown = [(row, None if ids is None else ids[row]) for row in rows[:SHOWN]]
    names = [f"{row + 1}" + ("" if id is None else f" ({id})") for row, id in shown]
    return f"row{'s' if len(rows) != 1 else ''} {_and_more(names, len(rows))}"


def _and_more(words: Sequence[str], count: int) -> str:
    return ", ".join(words) + (f" and {count - len(words)} more" if count > len(words) else "")


def raise_first_error(findings: Iterable[Finding]) -> None:
    """Raise :class:`InputError` with the first error, and say how many more there are."""
    errors = [one for one in findings if one.level == "error"]
    if errors:
        more = f" ({plural(len(errors) - 1, 'more problem')}: run equipool check.)" if len(errors) > 1 else ""
        raise InputError(errors[0].text + more)
