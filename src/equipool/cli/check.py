"""``equipool check``: can the sites of a table or a folder be pooled?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from equipool.cli.config import check_config_path, write_config
from equipool.cli.participants import add_images, add_roles, preset_roles, read_people, roles

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "check",
        help="can the sites of a table or folder be pooled, at what price?",
        description="Look at a table before anything is fitted: sites, overlap of covariates, confounding, "
        "bad values; where there are images, every one of them. Ends with a verdict.",
    )
    command.add_argument(
        "table", metavar="TABLE", type=Path, help="a .csv, .tsv or .parquet file, or a folder of images"
    )
    add_roles(command)
    add_images(command)
    command.add_argument(
        "--missing",
        choices=("error", "impute"),
        default="error",
        help="whether missing feature values stand in the way (default: error)",
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--figure", type=Path, metavar="FILE", help="also draw it, as .png, .svg or .pdf")
    command.add_argument(
        "--write-config",
        type=Path,
        metavar="FILE",
        help="also write the options to a TOML file, for --config",
    )
    command.set_defaults(command=run, go_on="Nothing was written; run it again.")


def run(arguments: argparse.Namespace) -> int:
    """Print the pre-flight report; the exit code is its verdict."""
    preset_roles(arguments)
    from equipool.data import check

    if arguments.write_config:
        check_config_path(arguments.write_config)
    if arguments.figure:
        from equipool.report.figures import preflight_figure
        from equipool.report.style import check_figure_path, save_figure

        check_figure_path(arguments.figure)
    people, images = read_people(arguments)
    report = check(
        people,
        site=arguments.site,
        images=images,
        mask=arguments.mask,
        missing=arguments.missing,
        progress=True,
        **roles(arguments),
    )
    if arguments.subject and not people[arguments.subject].is_unique:
        print(
            f"equipool: {len(people)} rows are visits of {people[arguments.subject].nunique()} people; what "
            "follows counts rows, so sites have fewer people than it says.",
            file=sys.stderr,
        )
    if arguments.write_config:
        print(f"Config: {write_config(arguments.write_config, arguments)}", file=sys.stderr)
    print(json.dumps(report.to_dict(), ensure_ascii=False, indent=2) if arguments.json else report)
    if arguments.figure:
        written = save_figure(preflight_figure(report), arguments.figure)
        print(f"Figure: {written}", file=sys.stderr)
    return 0 if report.ok else 1
