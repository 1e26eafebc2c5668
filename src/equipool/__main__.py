"""``python -m equipool`` and the ``equipool`` command; an interruption is reported in one line."""

import sys


def main() -> int:
    """Run the command line, which is imported inside ``try`` because that too may be interrupted."""
    try:
        from equipool.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        print("\nequipool: interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
