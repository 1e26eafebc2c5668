"""Phrases of messages: counts, lists of names, rows, times."""

from equipool.checks.findings import listed, plural, rows_text
from equipool.progress import duration


def test_counts_have_a_plural_and_thin_thousands():
    assert [plural(n, "class", "classes") for n in (0, 1, 2)] == ["0 classes", "1 class", "2 classes"]
    assert plural(2000, "row") == "2 000 rows"


def test_long_lists_are_cut():
    assert listed("abc") == "'a', 'b', 'c'"
    assert listed("abcdefg", shown=2) == "'a', 'b' and 5 more"


def test_rows_are_counted_from_one_and_have_their_ids():
    assert rows_text([2]) == "row 3"
    assert rows_text([0, 1], ids=["s1", "s2"]) == "rows 1 (s1), 2 (s2)"
    assert rows_text(range(9)) == "rows 1, 2, 3, 4, 5 and 4 more"


def test_times_have_a_suitable_unit():
    assert [duration(seconds) for seconds in (3.2, 100, 7000)] == ["3 s", "2 min", "1.9 h"]
