"""``python -m equipool``, and the ``equipool`` command: interrupted at any time, it says so in one line."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; importing it is part of what may be interrupted."""
    try:
        from equipool.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        print("\nequipool: interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
