"""Save and load fitted estimators: safetensors and JSON, nothing that could run code.

A model is a folder with ``model.json`` (settings, and what was learned) and ``model.safetensors`` (arrays),
whose hash the JSON holds. The dataclass ``_learned`` of an estimator's class declares what it learned, see
:mod:`equipool.estimators.schema`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sklearn.utils.validation import check_is_fitted
from torch import nn

from equipool import distributed
from equipool.estimators.schema import MODULE, DamagedError, Stored, write
from equipool.exceptions import InputError
from equipool.files import write_whole

__all__ = ["SCHEMA", "load", "save"]

SCHEMA = 2
STORED = ("estimator", "settings", "learned")
# What rebuilding networks meets in files that save() did not write.
ODD = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError, MemoryError)


def save(estimator: Any, folder: str | Path) -> Path:
    """Write a fitted estimator into a folder; a folder that holds anything but a model is refused.

    Of several processes that trained it together, one writes and the others wait.
    """
    with distributed.leader_first():
        if distributed.leads():
            _save(estimator, Path(folder))
    return Path(folder)


def _save(estimator: Any, folder: Path) -> None:
    from safetensors.numpy import save as to_bytes

    from equipool.version import __version__

    check_is_fitted(estimator)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give the name of a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "model.json").is_file():
        raise InputError(f"{folder} holds other files; give a new folder for the model.")
    arrays: dict[str, Any] = {}
    facts = {"schema": SCHEMA, "equipool": __version__, **write(estimator, "", arrays)}
    content = to_bytes(arrays)
    facts["sha256"] = hashlib.sha256(content).hexdigest()
    facts["checksum"] = checksum(facts)
    folder.mkdir(parents=True, exist_ok=True)
    # The JSON names the arrays by their hash, so a model is whole or is refused.
    write_whole(folder / "model.safetensors", content)
    write_whole(folder / "model.json", json.dumps(facts, indent=1, ensure_ascii=False))


def load(folder: str | Path, *, encoder: nn.Module | None = None, decoder: nn.Module | None = None) -> Any:
    """Read a fitted estimator from a folder written by :func:`save`.

    Parameters
    ----------
    folder
        Where the model is, or the result of ``equipool harmonize``.
    encoder, decoder
        For an estimator that was fitted with torch modules of yours: fresh ones of the same architecture.
        Their weights come from the folder; their code is never saved.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load as from_bytes

    folder = Path(folder)
    if not (folder / "model.json").exists() and (folder / "model" / "model.json").is_file():
        folder = folder / "model"  # what `equipool harmonize` wrote
    facts, content = _read(folder)
    modules = _needed_modules(folder, facts, {"encoder": encoder, "decoder": decoder})
    try:
        model = Stored(from_bytes(content), _estimators(), modules)
        estimator = model.read_estimator({name: facts.get(name) for name in STORED})
        if model.arrays:
            raise DamagedError(f"there is no place for {next(iter(model.arrays))}")
    except (*ODD, SafetensorError) as error:
        if modules:
            raise InputError(
                f"{folder} does not fit the {' and '.join(modules)} given ({type(error).__name__}); give "
                "fresh modules of the same architecture as at fit."
            ) from error
        why = (
            str(error) if isinstance(error, DamagedError) else f"{type(error).__name__} while it was rebuilt"
        )
        raise InputError(f"{folder} is damaged: {why}; copy it anew, or fit again.") from error
    return estimator


def checksum(facts: dict[str, Any]) -> str:
    """Return a hash of what model.json says beside the hash itself."""
    rest = {name: value for name, value in facts.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _estimators() -> dict[str, type]:
    """Return the classes that a model may be of, by name."""
    from equipool import estimators

    classes = {name: getattr(estimators, name) for name in estimators.__all__}
    return {name: one for name, one in classes.items() if hasattr(one, "_learned")}


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Return what a model's files hold, if they are whole and of this schema."""
    try:
        facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        content = (folder / "model.safetensors").read_bytes()
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "its JSON is damaged"
        raise InputError(
            f"{folder} holds no equipool model that can be read ({reason}); give the folder that "
            "`harmonize` or save() wrote."
        ) from error
    about = facts if isinstance(facts, dict) else {}
    if about.get("schema") != SCHEMA:
        raise InputError(
            f"{folder} holds a model of schema {about.get('schema')!r}; this release reads schema {SCHEMA}. "
            f"Load it with the release that wrote it ({about.get('equipool', 'unknown')})."
        )
    if about.get("checksum") != checksum(about):
        raise InputError(f"{folder} is damaged: model.json is not as it was written. Save the model again.")
    if hashlib.sha256(content).hexdigest() != about.get("sha256"):
        raise InputError(
            f"{folder} is damaged: model.safetensors is not the file that model.json names; copy the folder "
            "anew, or fit again."
        )
    return about, content


def _needed_modules(
    folder: Path, facts: dict[str, Any], given: dict[str, nn.Module | None]
) -> dict[str, nn.Module]:
    """Return the user's modules that the settings ask for; those missing or not asked for are refused."""
    settings = facts.get("settings")
    for name, module in given.items():
        asked = isinstance(settings, dict) and settings.get(name) == MODULE
        if asked and module is None:
            raise InputError(
                f"The model in {folder} was fitted with a torch module of yours as {name}; give a fresh one "
                f"of the same architecture: load(folder, {name}=...)."
            )
        if not asked and module is not None:
            raise InputError(f"The model in {folder} has no {name} of yours; load it without {name}=.")
    return {name: module for name, module in given.items() if module is not None}
