"""``equipool check``: can the sites of a table or a folder be pooled?"""

import json
from argparse import Namespace

from equipool.cli.options import check_config_path, write_config
from equipool.cli.source import read_rows, roles
from equipool.data import check
from equipool.progress import say


def run(arguments: Namespace) -> int:
    """Print the pre-flight report; the exit code is its verdict."""
    if arguments.write_config:
        check_config_path(arguments.write_config)
    if arguments.figure:  # for which alone the drawing libraries are imported
        from equipool.report.figures import preflight_figure
        from equipool.report.style import check_figure_path, save_figure

        check_figure_path(arguments.figure)
    frame, images = read_rows(arguments)
    how = {"images": images, "mask": arguments.mask, "missing": arguments.missing, "progress": True}
    report = check(frame, site=arguments.site, **how, **roles(arguments))
    if arguments.subject and not frame[arguments.subject].is_unique:
        say(
            f"equipool: {len(frame)} rows are visits of {frame[arguments.subject].nunique()} participants; "
            "what follows counts rows, so sites have fewer participants than it says."
        )
    if arguments.write_config:
        say(f"Config: {write_config(arguments.write_config, arguments)}")
    print(json.dumps(report.to_dict(), ensure_ascii=False, indent=2) if arguments.json else report)
    if arguments.figure:
        say(f"Figure: {save_figure(preflight_figure(report), arguments.figure)}")
    return 0 if report.ok else 1
