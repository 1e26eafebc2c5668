"""How far something is and how long it still takes: one line on a terminal, nothing in a pipe or a log."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress", "duration", "say"]


class Progress:
    """Called with how many are done, says so on stderr with the time left.

    Parameters
    ----------
    what, total
        What is done, and how many of it there are.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.start = time.perf_counter()

    def __call__(self, done: int) -> None:
        """Replace the line."""
        if sys.stderr.isatty():
            text = f"{self.what}: {done} of {self.total}, about {duration(self.left(done))} left"
            end = "\n" if done == self.total else ""
            print(f"\r\x1b[K{text}", end=end, file=sys.stderr, flush=True)

    def left(self, done: int) -> float:
        """Return the seconds that are left, if the rest goes as what is done."""
        return (time.perf_counter() - self.start) / done * (self.total - done)


def duration(seconds: float) -> str:
    """Return a time in the unit that people would say it in.

    Examples
    --------
    >>> [duration(seconds) for seconds in (3.2, 100, 7000)]
    ['3 s', '2 min', '1.9 h']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def say(text: str) -> None:
    """Print a line on stderr at once, so that what goes to stdout can be read by a program."""
    print(text, file=sys.stderr, flush=True)
