"""``equipool check``: can the sites of a table or a folder be pooled?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from equipool.cli import options
from equipool.cli.config import check_config_path, write_config
from equipool.cli.participants import preset_roles, read_participants
from equipool.progress import say


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "check",
        help="can the sites of a table or folder be pooled, at what price?",
        description="Look at a table before anything is fitted: sites, overlap of covariates, confounding, "
        "bad values; where there are images, every one of them. Ends with a verdict.",
    )
    option = command.add_argument
    option("table", metavar="TABLE", type=Path, help="a .csv, .tsv or .parquet file, or a folder of images")
    options.add_roles(command)
    options.add_images(command)
    options.add_common(command, "missing", "json")
    option("--figure", type=Path, metavar="FILE", help="also draw it, as .png, .svg or .pdf")
    option(
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
    frame, images = read_participants(arguments)
    report = check(
        frame,
        site=arguments.site,
        images=images,
        mask=arguments.mask,
        missing=arguments.missing,
        progress=True,
        **options.roles(arguments),
    )
    if arguments.subject and not frame[arguments.subject].is_unique:
        participants = f"{frame[arguments.subject].nunique()} participants"
        say(
            f"equipool: {len(frame)} rows are visits of {participants}; what follows counts rows, so sites "
            "have fewer participants than it says."
        )
    if arguments.write_config:
        say(f"Config: {write_config(arguments.write_config, arguments)}")
    print(json.dumps(report.to_dict(), ensure_ascii=False, indent=2) if arguments.json else report)
    if arguments.figure:
        say(f"Figure: {save_figure(preflight_figure(report), arguments.figure)}")
    return 0 if report.ok else 1
