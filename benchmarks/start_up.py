"""CPU time of ``equipool --help`` beside a bare Python's, and what is imported for it.

CPU time, since the wall clock of a busy machine says more about the others.

    python benchmarks/start_up.py
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

CALLS = {
    "python -c pass": ["-c", "pass"],
    "import equipool": ["-c", "import equipool"],
    "equipool --help": ["-m", "equipool", "--help"],
    "equipool check --help": ["-m", "equipool", "check", "--help"],
}
REPEATS = 15
HEAVY = ("torch", "pandas", "numpy", "sklearn", "matplotlib", "nibabel", "scipy")


def seconds(call: list[str]) -> float:
    start = spent()
    subprocess.run([sys.executable, *call], check=True, capture_output=True)
    return spent() - start


def spent() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    taken = {name: statistics.median(seconds(call) for _ in range(REPEATS)) for name, call in CALLS.items()}
    bare = taken["python -c pass"]
    for name, value in taken.items():
        print(f"{name:24} {1000 * value:6.0f} ms  {value / bare:4.1f} times a bare Python")
    code = "import sys, equipool.cli.app\ntry: equipool.cli.app.main(['--help'])\nexcept SystemExit: pass\n"
    code += f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    print(f"heavy modules imported for --help: {found.stderr.strip()}")


if __name__ == "__main__":
    main()
