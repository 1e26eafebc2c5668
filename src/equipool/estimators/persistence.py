"""Save and load fitted estimators: safetensors and JSON, nothing that could run code.

A model is a folder with ``model.json`` (settings and small facts, with a schema version) and
``model.safetensors`` (numbers), whose hash the JSON holds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import nn

from equipool import distributed
from equipool.data import Covariate
from equipool.data.covariates import Encoding
from equipool.estimators.site_harmonizer import SiteHarmonizer
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.groups.trend import Trend
from equipool.sites.affine import AffineSites
from equipool.sites.composition import Composition, no_composition
from equipool.sites.coupling import SiteNetwork, no_network
from equipool.sites.model import SiteModel
from equipool.sites.rising_curves import CURVE
from equipool.sites.shift_scale import SPREAD_PEOPLE
from equipool.sites.volume_model import VolumeSites
from equipool.sites.warp import Bend, no_bend

__all__ = ["SCHEMA", "load", "save"]

SCHEMA = 1
ARRAYS = ("feature_mean_", "feature_scale_", "feature_varies_")
HARMONIZER_ARRAYS = ("feature_mean_", "feature_scale_", "moved_", "atoms_", "readers_")
MODEL_PARTS = ("trend", "bend", "composition", "network")
MODEL_ARRAYS = tuple(
    field.name
    for field in fields(SiteModel)
    if field.name not in (*MODEL_PARTS, "mixing", "curvature", "gain", "amount")
)
FRAMES = ("site_effects_", "support_")
GRID = ("mask_", "affine_mm_")  # of estimators fitted on volumes
MODULES = ("encoder", "decoder")
# What rebuilding meets in files that nobody's save wrote.
ODD = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError, MemoryError)
OWN_MODULE = "module"  # what the settings say in place of a torch module, whose code is not saved


class _OutdatedError(Exception):
    """A model of an earlier version that can no longer be read."""


def save(estimator: Any, folder: str | Path) -> Path:
    """Write a fitted estimator into a folder; a folder that holds anything but a model is refused.

    Of several processes that trained it together, one writes and the others wait.
    """
    with distributed.leader_first():
        if distributed.leads():
            _save(estimator, Path(folder))
    return Path(folder)


def _save(estimator: Any, folder: Path) -> None:
    from safetensors.torch import save as to_bytes

    check_is_fitted(estimator)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give the name of a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "model.json").is_file():
        raise InputError(f"{folder} holds other files; give a new folder for the model.")
    if isinstance(estimator, SiteHarmonizer):
        facts, numbers = _harmonizer_state(estimator)
    else:
        facts, numbers = _pooler_state(estimator)
    # A mask read from NIfTI runs the other way, which safetensors refuses.
    content = to_bytes({name: values.contiguous() for name, values in numbers.items()})
    facts = _common_facts(estimator) | facts | {"sha256": hashlib.sha256(content).hexdigest()}
    facts["checksum"] = _checksum(facts)
    folder.mkdir(parents=True, exist_ok=True)
    # The JSON names the numbers by their hash, so a model is whole or is refused.
    write_whole(folder / "model.safetensors", content)
    write_whole(folder / "model.json", json.dumps(facts, indent=1, ensure_ascii=False).encode())


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
    from safetensors.torch import load as from_bytes

    folder = Path(folder)
    if not (folder / "model.json").exists() and (folder / "model" / "model.json").is_file():
        folder = folder / "model"  # what `equipool harmonize` wrote
    try:
        facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        content = (folder / "model.safetensors").read_bytes()
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "its JSON is damaged"
        raise InputError(
            f"{folder} holds no equipool model that can be read ({reason}); give the folder that "
            "`harmonize` or save() wrote."
        ) from error
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        seen = facts.get("schema") if isinstance(facts, dict) else None
        raise InputError(
            f"{folder} holds a model of schema {seen!r}; this release reads schema {SCHEMA}. Load it with "
            f"the release that wrote it ({facts.get('equipool') if isinstance(facts, dict) else 'unknown'})."
        )
    if facts.get("checksum", _checksum(facts)) != _checksum(facts):  # files of early versions have none
        raise InputError(f"{folder} is damaged: model.json is not as it was written. Save the model again.")
    if hashlib.sha256(content).hexdigest() != facts.get("sha256"):
        raise InputError(
            f"{folder} is damaged: model.safetensors is not the file that model.json names; copy the folder "
            "anew, or fit again."
        )
    own = _with_own_modules(folder, facts, {"encoder": encoder, "decoder": decoder})
    try:
        _require_facts(facts)
        rebuild = _rebuild_harmonizer if facts["estimator"] == "SiteHarmonizer" else _rebuild
        return rebuild(facts, from_bytes(content))
    except _OutdatedError as error:
        raise InputError(f"{folder} {error}; fit the model again.") from None
    except (*ODD, SafetensorError) as error:
        if own:
            raise InputError(
                f"{folder} does not fit the {' and '.join(own)} given ({type(error).__name__}); give fresh "
                "modules of the same architecture as at fit."
            ) from error
        raise InputError(
            f"{folder} is damaged: {type(error).__name__} while it was rebuilt; copy it anew, or fit again."
        ) from error


def _checksum(facts: dict[str, Any]) -> str:
    """Return a hash of what model.json says beside the hash itself."""
    said = {name: value for name, value in facts.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _require_facts(facts: dict[str, Any]) -> None:
    """Refuse what no model says of its sites, features and covariates, before anything is built from it."""
    names, sites = facts["feature_names"], facts["sites"]
    _texts(sites), _texts(names or [])
    if (
        type(facts["n_features"]) is not int
        or facts["n_features"] < 1
        or (names is not None and len(names) != facts["n_features"])
    ):
        raise ValueError("features")
    if not sites or len(set(sites)) != len(sites):
        raise ValueError("sites")


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError("names must be text")
    return tuple(value)


def _require_number(value: Any, *, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < np.inf:
        raise ValueError(f"{value!r} is no number from {least}")
    return float(value)


def _require_shapes(model: SiteModel, estimator: SiteHarmonizer) -> None:
    """Refuse arrays that do not belong together or are not finite."""
    n_sites, p = len(estimator.sites_), int(estimator.moved_.sum())
    shapes = {"shift": (n_sites, p), "error": (n_sites, p), "spread": (n_sites, p), "people": (n_sites,)}
    shapes |= {"centre": (p,), "residual": (p,), "between": (p,), "start": (n_sites + 1,)}
    shapes |= {"spread_people": (p,), "far": (n_sites, p), "kept": (n_sites, p)}
    for name, shape in shapes.items():
        array = getattr(model, name)
        if array.shape != shape or not np.isfinite(array).all():
            raise ValueError(f"{name} has shape {array.shape}")
    if estimator.moved_.shape != (estimator.n_features_in_,):
        raise ValueError("features")


def _with_own_modules(folder: Path, facts: dict[str, Any], given: dict[str, nn.Module | None]) -> list[str]:
    """Put the modules given into the settings, and return their names; those missing or idle are refused."""
    settings = facts.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    needed = [name for name in MODULES if settings.get(name) == OWN_MODULE]
    for name in MODULES:
        if name in needed and given[name] is None:
            raise InputError(
                f"The model in {folder} was fitted with a torch module of yours as {name}; give a fresh one "
                f"of the same architecture: load(folder, {name}=...)."
            )
        if name not in needed and given[name] is not None:
            raise InputError(f"The model in {folder} has no {name} of yours; load it without {name}=.")
    settings.update({name: given[name] for name in needed})
    return needed


def _common_facts(estimator: Any) -> dict[str, Any]:
    from equipool.version import __version__

    settings = {k: v for k, v in estimator.get_params().items() if k != "checkpoint"}  # a place, no setting
    settings = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in settings.items()}
    settings = {k: OWN_MODULE if isinstance(v, nn.Module) else v for k, v in settings.items()}
    names = getattr(estimator, "feature_names_in_", None)
    return {
        "schema": SCHEMA,
        "equipool": __version__,
        "estimator": type(estimator).__name__,
        "settings": settings,
        "n_features": int(estimator.n_features_in_),
        "feature_names": None if names is None else [str(name) for name in names],
        "sites": [str(site) for site in estimator.sites_],
    }


def _pooler_state(estimator: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    numbers = {f"network.{k}": v.contiguous().clone() for k, v in estimator.network_.state_dict().items()}
    numbers |= {name: torch.from_numpy(np.asarray(getattr(estimator, name))) for name in ARRAYS}
    if estimator.mask_ is None:
        affine = vars(estimator.affine_) if hasattr(estimator, "affine_") else {}
        return _facts(estimator), numbers | {f"affine.{k}": v.contiguous() for k, v in affine.items()}
    numbers |= {name: torch.from_numpy(np.array(getattr(estimator, name))) for name in GRID}
    if hasattr(estimator, "volume_sites_"):
        sites = vars(estimator.volume_sites_)
        numbers |= {f"sites.{name}": torch.from_numpy(np.array(value)) for name, value in sites.items()}
    return _facts(estimator), numbers


def _facts(estimator: Any) -> dict[str, Any]:
    classes = getattr(estimator, "classes_", None)
    return {
        "covariates": [asdict(covariate) for covariate in estimator.covariates_],
        "task": estimator.task_,
        "classes": None if classes is None else {"dtype": classes.dtype.str, "values": classes.tolist()},
        "target_scale": getattr(estimator, "target_scale_", None),
        "seed": estimator._seed,
        "dropped": getattr(estimator, "dropped_", None),
    }


def _harmonizer_state(estimator: SiteHarmonizer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model, encoding = estimator.model_, estimator.encoding_
    arrays = {f"model.{name}": getattr(model, name) for name in MODEL_ARRAYS}
    for part in MODEL_PARTS:
        arrays |= {f"{part}.{name}": value for name, value in vars(getattr(model, part)).items()}
    arrays |= {name: getattr(estimator, name) for name in HARMONIZER_ARRAYS}
    numbers = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
    frames = {name: getattr(estimator, name).to_dict("split") for name in FRAMES}
    facts = {
        # JSON has no infinity.
        "mixing": model.mixing if np.isfinite(model.mixing) else None,
        "curvature": model.curvature,
        "gain": bool(model.gain),
        "amount": model.amount,
        "encoding": asdict(encoding),
        "frames": frames,
    }
    return facts, numbers


def _rebuild_sites(arrays: dict[str, NDArray[Any]]) -> VolumeSites:
    if "curves" not in arrays:
        raise _OutdatedError("was saved by an earlier version that did not straighten intensities")
    return VolumeSites(**arrays)


def _rebuild_bend(arrays: dict[str, NDArray[Any]], n_sites: int, p: int) -> Bend:
    """Return what sites bend; models saved before they had curves have none, or a quadratic."""
    if "amount" in arrays and arrays["amount"].any():
        raise _OutdatedError("was saved by an earlier version whose way of bending features is gone")
    if not arrays or "amount" in arrays:
        return no_bend(n_sites)
    bend = Bend(**arrays)
    b = len(bend.columns)
    shapes = {"scale": (n_sites, b), "offset": (n_sites, b), "centre": (b,), "width": (b,)}
    shapes |= {"curves": (n_sites, b, CURVE), "pool": (b, CURVE)}
    for name, shape in shapes.items():
        _require_array(getattr(bend, name), shape, f"bend.{name}")
    if bend.columns.dtype.kind != "i" or (np.diff(bend.columns, prepend=-1, append=p) < 1).any():
        raise ValueError("bend.columns")
    for part in (bend.curves[..., 1:], bend.pool[..., 1:], bend.width, bend.scale):
        _require_above_zero(part)
    return bend


def _rebuild_composition(arrays: dict[str, NDArray[Any]], p: int) -> Composition:
    """Return whom sites scanned; models saved before took everything for the scanners'."""
    composition = Composition(**arrays) if arrays else no_composition(p)
    factors = len(composition.beyond)
    shapes = {"loadings": (factors, p), "beyond": (factors,), "believed": (factors,), "between": (p,)}
    for name, shape in shapes.items():
        _require_array(getattr(composition, name), shape, f"composition.{name}")
    for part in (composition.beyond, composition.between, composition.believed, 1 - composition.believed):
        if (part < 0).any():
            raise ValueError("composition")
    return composition


def _rebuild_network(arrays: dict[str, NDArray[Any]], n_sites: int, p: int, covariates: int) -> SiteNetwork:
    """Return the network on top; models saved before have none."""
    network = SiteNetwork(**arrays) if arrays else no_network(n_sites, p)
    (learned, hidden), q = network.heads.shape[:2], network.scores.shape[1]
    if network.place.shape != (n_sites,) or network.place.dtype.kind != "i":
        raise ValueError("network.place")
    if not network.active:
        return no_network(n_sites, p)
    planes = max(2 * covariates, 1)
    shapes = {"middle": (covariates,), "reach": (covariates,), "scores": (p, q), "bias": (hidden,)}
    for name, shape in (shapes | {"weights": (planes + q, hidden), "heads": (learned, hidden, p)}).items():
        _require_array(getattr(network, name), shape, f"network.{name}")
    _require_above_zero(network.reach)
    if (network.place < -1).any() or (network.place >= learned).any():
        raise ValueError("network.place")
    size = np.abs(network.heads).max(initial=0.0) * np.abs(network.scores).max(initial=0.0)
    if np.abs(network.heads @ network.scores).max(initial=0.0) > 1e-6 * p * size + 1e-12:
        raise ValueError("network.heads")  # what it takes out could not be put back
    return network


def _require_array(array: NDArray[Any], shape: tuple[int, ...], name: str) -> None:
    if array.shape != shape or array.dtype != np.float64 or not np.isfinite(array).all():
        raise ValueError(f"{name} has shape {array.shape}")


def _require_above_zero(array: NDArray[Any]) -> None:
    if not ((array > 1e-100) & (array < 1e100)).all():
        raise ValueError("a number that must be above 0 is not")


def _rebuild_harmonizer(facts: dict[str, Any], numbers: dict[str, torch.Tensor]) -> SiteHarmonizer:
    estimator = SiteHarmonizer(**facts["settings"])
    estimator.n_features_in_ = facts["n_features"]
    if facts["feature_names"] is not None:
        estimator.feature_names_in_ = np.array(facts["feature_names"], dtype=object)
    estimator.sites_ = np.array(facts["sites"])
    arrays = {name: value.numpy() for name, value in numbers.items()}
    for name in HARMONIZER_ARRAYS:
        setattr(estimator, name, arrays[name])
    # Models saved before they were learned had the same number for all features, and nobody was far.
    arrays.setdefault("model.spread_people", np.full_like(arrays["model.between"], SPREAD_PEOPLE))
    for name in ("model.far", "model.kept"):
        arrays.setdefault(name, np.zeros_like(arrays["model.shift"]))
    parts = {
        part: {k[len(part) + 1 :]: v for k, v in arrays.items() if k.startswith(f"{part}.")}
        for part in MODEL_PARTS
    }
    trend, (n_sites, p) = Trend(**parts["trend"]), arrays["model.shift"].shape
    estimator.model_ = SiteModel(
        trend=trend,
        bend=_rebuild_bend(parts["bend"], n_sites, p),
        composition=_rebuild_composition(parts["composition"], p),
        network=_rebuild_network(parts["network"], n_sites, p, len(trend.knots)),
        amount=min(_require_number(facts.get("amount", 0.0), least=0.0), 1.0),
        mixing=np.inf if facts["mixing"] is None else _require_number(facts["mixing"], least=1e-9),
        curvature=_require_number(facts["curvature"], least=0.0),
        gain=facts["gain"] is True,
        **{name: arrays[f"model.{name}"] for name in MODEL_ARRAYS},
    )
    _require_shapes(estimator.model_, estimator)
    _require_above_zero(estimator.model_.spread)
    _require_above_zero(estimator.model_.spread_people)
    _require_above_zero(estimator.feature_scale_)
    _require_above_zero(trend.scale)
    estimator.check_settings()
    known = facts["encoding"]
    estimator.encoding_ = Encoding(
        _texts(known["columns"]),
        {name: _texts(levels) for name, levels in known["categories"].items()},
        _texts(known["names"]),
        tuple(None if levels is None else _texts(levels) for levels in known["levels"]),
    )
    for name in FRAMES:
        frame = facts["frames"][name]
        if any(len(row) != len(frame["columns"]) for row in frame["data"]):
            raise ValueError(name)
        setattr(estimator, name, pd.DataFrame(**frame))
    for name, nothing in (("bent", False), ("far", 0.0), ("kept", 0.0)):  # as models saved before have none
        if name not in estimator.site_effects_:
            estimator.site_effects_[name] = nothing
    return estimator


def _rebuild(facts: dict[str, Any], numbers: dict[str, torch.Tensor]) -> Any:
    from equipool import estimators as models

    kinds = {name: getattr(models, name) for name in models.__all__ if name.endswith("Pooler")}
    estimator = kinds[facts["estimator"]](**facts["settings"])
    estimator.n_features_in_ = facts["n_features"]
    if facts["feature_names"] is not None:
        estimator.feature_names_in_ = np.array(facts["feature_names"], dtype=object)
    estimator.sites_ = np.array(facts["sites"])
    estimator.covariates_ = tuple(
        Covariate(**{**fact, "levels": fact["levels"] and tuple(fact["levels"])})
        for fact in facts["covariates"]
    )
    estimator.task_, estimator._seed = facts["task"], facts["seed"]
    if facts["classes"] is not None:
        values = facts["classes"]["values"]
        estimator.classes_ = np.array(values, dtype=np.dtype(facts["classes"]["dtype"]))
    if facts.get("dropped") is not None:
        estimator.dropped_ = facts["dropped"]
    if facts["target_scale"] is not None:
        estimator.target_scale_ = tuple(facts["target_scale"])
    for name in ARRAYS:
        setattr(estimator, name, numbers[name].numpy())
    for name in GRID:
        setattr(estimator, name, numbers[name].numpy() if name in numbers else None)
    sites = {k[6:]: v.numpy() for k, v in numbers.items() if k.startswith("sites.")}
    if sites:
        estimator.volume_sites_ = _rebuild_sites(sites)
    affine = {k[7:]: v for k, v in numbers.items() if k.startswith("affine.")}
    if affine:
        estimator.affine_ = AffineSites(**affine)
    network = estimator._build(facts["n_features"], len(facts["covariates"]), estimator._n_outputs())
    network = network.double()
    network.load_state_dict({k[8:]: v for k, v in numbers.items() if k.startswith("network.")})
    estimator.network_ = network.eval()
    if estimator.mask_ is None:
        row = pd.DataFrame(np.zeros((1, facts["n_features"])), columns=facts["feature_names"])
        estimator.transform(row if facts["feature_names"] else row.to_numpy())  # odd settings fail here
    return estimator
