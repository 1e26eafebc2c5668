"""Saved models that are changed on purpose."""

import hashlib
import json

from safetensors.numpy import load_file, save_file

from equipool.estimators import persistence


def forged(folder, name, value):
    """Change one array of a saved model, with all checksums right."""
    weights = folder / "model.safetensors"
    arrays = load_file(weights)
    before = arrays.pop(name, None)
    if value is not None:
        arrays[name] = value(before)
    save_file(arrays, weights)
    facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    facts["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    facts["checksum"] = persistence._checksum(facts)
    (folder / "model.json").write_text(json.dumps(facts), encoding="utf-8")
