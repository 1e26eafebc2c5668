"""The progress of a run and its remaining time: one line on a terminal, nothing in a pipe or a log."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Progress:
    """A line on stderr with the number of items done of ``total``, and the time remaining."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.start = time.perf_counter()

    def __call__(self, done: int) -> None:
        """Update the line."""
        if sys.stderr.isatty():
            text = f"{self.what}: {done} of {self.total}, about {duration(self.remaining(done))} left"
            print(f"\r\x1b[K{text}", end="\n" * (done == self.total), file=sys.stderr, flush=True)

    def remaining(self, done: int) -> float:
        """Return the seconds that the other items take, by the mean of those done."""
        return (time.perf_counter() - self.start) / done * (self.total - done)


def counted(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """Yield the items, and show their progress."""
    progress = Progress(what, total)
    for done, item in enumerate(items, start=1):
        progress(done)
        yield item


def duration(seconds: float) -> str:
    """Return a time as text, in a suitable unit: "3 s", "2 min", "1.9 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def say(text: str) -> None:
    """Print a line on stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)
