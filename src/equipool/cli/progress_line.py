"""How far a command is, on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from equipool.progress import Progress

__all__ = ["reported"]


def reported(done: Iterable[int], total: int, what: str) -> Iterator[int]:
    """Pass on how many are done, and say so with the time left."""
    progress = Progress(what, total)
    for count in done:
        progress(count)
        yield count
