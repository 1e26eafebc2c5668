"""How far a command is, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

__all__ = ["reported"]


def reported(done: Iterable[int], total: int, what: str) -> Iterator[int]:
    """Pass on how many are done and say so with the time left: in place on a terminal, else in tenths."""
    start = time.perf_counter()
    terminal = sys.stderr.isatty()
    for count in done:
        left = (time.perf_counter() - start) / count * (total - count)
        if terminal or count == total or count * 10 // total > (count - 1) * 10 // total:
            end = "\r" if terminal and count < total else "\n"
            text = f"{what}: {count} of {total}, about {_duration(left)} left   "
            print(text.rstrip() if end == "\n" else text, end=end, file=sys.stderr, flush=True)
        yield count


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
