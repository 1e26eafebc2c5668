"""Saved models that are changed on purpose, with all checksums right."""

import hashlib
import json

from safetensors.numpy import load_file, save_file

from equipool.estimators.persistence import checksum


def forged(folder, path, change):
    """Replace the array at a path of a saved model by what ``change`` makes of it; ``None`` leaves it out."""
    weights = folder / "model.safetensors"
    arrays = load_file(weights)
    before = arrays.pop(path, None)
    if change is not None:
        arrays[path] = change(before)
    save_file(arrays, weights)
    forged_facts(folder, lambda facts: facts | {"sha256": hashlib.sha256(weights.read_bytes()).hexdigest()})


def forged_facts(folder, change):
    """Replace what a saved model's JSON says by what ``change`` makes of it."""
    path = folder / "model.json"
    facts = change(json.loads(path.read_text(encoding="utf-8")))
    if isinstance(facts, dict):
        facts["checksum"] = checksum(facts)
    path.write_text(json.dumps(facts), encoding="utf-8")
