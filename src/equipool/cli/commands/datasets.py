"""``equipool datasets``: the datasets of the benchmark, and which of them are in the cache."""

import json
from argparse import Namespace

from equipool.benchmark.datasets import list_datasets, load_dataset, require_dataset
from equipool.cli.outputs import announce
from equipool.exceptions import InputError


def run(arguments: Namespace) -> int:
    """List or fetch."""
    if arguments.action == "list" and arguments.names:
        raise InputError(f"`datasets list` takes no names; fetch with: datasets fetch {arguments.names[0]}.")
    if arguments.action == "fetch" and not arguments.names:
        raise InputError("Name the datasets to fetch, such as german; `equipool datasets` lists them.")
    for name in arguments.names:
        require_dataset(name)
    if arguments.action == "fetch":
        splits = {name: load_dataset(name) for name in arguments.names}
        rows = {
            name: f"{len(one.train)} training rows, {len(one.test)} test rows" for name, one in splits.items()
        }
        announce(arguments, rows)
        return 0
    table = list_datasets()
    if arguments.json:
        print(json.dumps({"datasets": table.to_dict("records")}))
    else:
        print(table.replace({"cached": {True: "yes", False: "no"}}).to_string(index=False))
    return 0
