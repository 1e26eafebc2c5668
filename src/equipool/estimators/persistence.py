"""Save and load fitted estimators: safetensors and JSON, nothing that could run code.

A model is a folder with ``model.json`` (settings, and what was learned) and ``model.safetensors`` (arrays),
whose hash the JSON holds. The dataclass ``_learned`` of an estimator's class declares what is learned, and
values are checked against it at load. A field's hint says what its value is: a number, text, ``Literal``,
``X | None``, a tuple, a mapping, an array of numbers or of distinct labels, a torch module, an estimator, or
a frozen dataclass, whose fields are declared likewise. An abstract dataclass stands for its subclasses, which
differ in their ``name``. The field's metadata declare the rest:

- ``dimensions`` of an array (:func:`equipool.sites.effect.array`) or a tuple. ``"features+1"`` is one more
  than ``"features"``, ``"4"`` is 4. Those of ``SHARED`` are of one length in an estimator, others in a class.
- ``positive``: of an array; ``missing``: it may have NaN; ``least``, ``above``, ``most``: of a number.
- ``counts``: the dimension whose length a number is, or the number of true values of a mask.
"""

import dataclasses
import hashlib
import inspect
import json
import math
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import nn

from equipool import distributed
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.version import __version__

SCHEMA = 2
STORED = ("estimator", "settings", "learned")
SHARED = ("sites", "inputs", "features")
LARGEST, SMALLEST = 1e100, 1e-100  # of numbers, and of those that must be positive
MODULE = "module"  # what settings hold in place of a torch module, whose code is not saved
# What rebuilding networks raises on files that save() did not write.
ODD = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError, MemoryError)
Metadata = Mapping[str, Any]


class DamagedError(ValueError):
    """A stored value that is not as it was declared."""


def save(estimator: Any, folder: str | Path) -> Path:
    """Write the fitted estimator as safetensors and JSON; :func:`equipool.load` reads it.

    A folder that holds anything but a model is refused. Of several processes, one writes and the others wait.
    """
    folder = Path(folder)
    with distributed.leader_first():
        if distributed.leads():
            _save(estimator, folder)
    return folder


def _save(estimator: Any, folder: Path) -> None:
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
        For an estimator that was fitted with your torch modules: fresh ones of the same architecture. Their
        weights come from the folder; their code is never saved.
    """
    folder = Path(folder)
    if not (folder / "model.json").exists() and (folder / "model" / "model.json").is_file():
        folder = folder / "model"  # what `equipool harmonize` wrote
    facts, content = _read(folder)
    given = {"encoder": encoder, "decoder": decoder}
    for name, module in given.items():
        asked = isinstance(facts.get("settings"), dict) and facts["settings"].get(name) == MODULE
        if asked and module is None:
            what = f"The model in {folder} was fitted with a torch module of yours as {name}"
            raise InputError(f"{what}; give a fresh one of the same architecture: load(folder, {name}=...).")
        if not asked and module is not None:
            raise InputError(f"The model in {folder} has no {name} of yours; load it without {name}=.")
    modules = {name: module for name, module in given.items() if module is not None}
    try:
        model = Stored(from_bytes(content), _estimators(), modules)
        estimator = model.read_estimator({name: facts.get(name) for name in STORED})
        _require(not model.arrays, f"the array {next(iter(model.arrays), '')}")
    except (*ODD, SafetensorError) as error:
        if modules:
            what = f"{folder} does not fit the {' and '.join(modules)} given ({type(error).__name__})"
            raise InputError(f"{what}; give fresh modules of the same architecture as at fit.") from error
        named = isinstance(error, DamagedError)
        why = str(error) if named else f"{type(error).__name__} while it was rebuilt"
        raise InputError(f"{folder} is damaged: {why}; copy it anew, or fit again.") from error
    return estimator


def checksum(facts: dict[str, Any]) -> str:
    """Return a hash of the content of model.json other than the hash."""
    rest = {name: value for name, value in facts.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _estimators() -> dict[str, type]:
    """Return the classes that a model may be of, by name."""
    from equipool import estimators

    return {name: kind for name, kind in vars(estimators).items() if hasattr(kind, "_learned")}


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Return what a model's files hold, if they are whole and of this schema."""
    try:
        facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        content = (folder / "model.safetensors").read_bytes()
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "its JSON is damaged"
        what = f"{folder} holds no equipool model that can be read ({reason})"
        raise InputError(f"{what}; give the folder that `harmonize` or save() wrote.") from error
    about = facts if isinstance(facts, dict) else {}
    if about.get("schema") != SCHEMA:
        raise InputError(
            f"{folder} holds a model of schema {about.get('schema')!r}; this release reads schema {SCHEMA}. "
            f"Load it with the release that wrote it ({about.get('equipool', 'unknown')})."
        )
    if about.get("checksum") != checksum(about):
        raise InputError(f"{folder} is damaged: model.json is not as it was written. Save the model again.")
    if hashlib.sha256(content).hexdigest() != about.get("sha256"):
        what = f"{folder} is damaged: model.safetensors is not the file that model.json names"
        raise InputError(f"{what}; copy the folder anew, or fit again.")
    return about, content


def write(value: Any, path: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """Return a value as JSON holds it; numeric arrays go to ``arrays``, named by their path."""
    prefix = f"{path}." if path else ""
    value = value.item() if isinstance(value, np.generic) else value
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.ndarray() if value.dtype.kind in "OU":
            labels = [write(one, path, {}) for one in value]
            return {"object": labels} if value.dtype == object else labels
        case np.ndarray():
            arrays[path] = np.array(value, order="C")
            return None
        case nn.Module():
            arrays |= {f"{prefix}{name}": part.numpy().copy() for name, part in value.state_dict().items()}
            return None
        case BaseEstimator():
            names = [one.name for one in dataclasses.fields(value._learned)]
            learned = {name: write(getattr(value, name, None), prefix + name, arrays) for name in names}
            return {**_settings(value), "learned": learned}
        case tuple() | list():
            return [write(one, f"{prefix}{getattr(one, 'name', k)}", arrays) for k, one in enumerate(value)]
        case _ if dataclasses.is_dataclass(value):
            name = {"name": value.name} if hasattr(value, "name") else {}
            value = name | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {name: write(one, prefix + name, arrays) for name, one in value.items()}


def _settings(estimator: BaseEstimator) -> dict[str, Any]:
    """Return class and settings; a checkpoint is a place and no setting."""

    def plain(value: Any) -> Any:
        if isinstance(value, BaseEstimator):
            return _settings(value)
        return MODULE if isinstance(value, nn.Module) else getattr(value, "tolist", lambda: value)()

    settings = {k: plain(v) for k, v in estimator.get_params(deep=False).items() if k != "checkpoint"}
    return {"estimator": type(estimator).__name__, "settings": settings}


@dataclass
class Stored:
    """A model while it is read."""

    arrays: dict[str, NDArray[Any]]  # by path; each is removed when it is read
    kinds: Mapping[str, Any]  # the estimators' classes, by name
    modules: Mapping[str, nn.Module]  # the user's torch modules, by setting
    shared: dict[str, int] = field(default_factory=dict)  # lengths of dimensions
    free: dict[str, int] = field(default_factory=dict)
    estimator: Any = None

    def read_estimator(self, stored: Any, path: str = "") -> Any:
        """Return an estimator, fitted if what it learned is there."""
        where = path or "the model"
        fitted = isinstance(stored, dict) and "learned" in stored
        _require_keys(stored, STORED[: 2 + fitted], where)
        kind = self.kinds.get(str(stored["estimator"]))
        if kind is None:
            raise DamagedError(f"there is no estimator {stored['estimator']!r}")
        settings = stored["settings"]
        _require_keys(settings, {*kind._get_param_names()} - {"checkpoint"}, f"settings of {where}")
        settings |= {name: one for name, one in self.modules.items() if settings.get(name) == MODULE}
        hints = get_type_hints(kind if dataclasses.is_dataclass(kind) else kind.__init__)
        estimator = kind(**{k: self.read(hints[k], v, k, {"most": math.inf}) for k, v in settings.items()})
        if fitted:
            inner = dataclasses.replace(self, shared={}, estimator=estimator)
            for name, value in inner._fields(kind._learned, stored["learned"], path):
                if value is not None:
                    setattr(estimator, name, value)
            getattr(estimator, "require_consistent", lambda: None)()
        return estimator

    def _fields(self, kind: Any, stored: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the values that a dataclass declares, in its order."""
        declared, hints, prefix = dataclasses.fields(kind), get_type_hints(kind), f"{path}." if path else ""
        _require_keys(stored, [f.name for f in declared], path or "the model")
        inner = dataclasses.replace(self, free={})
        for f in declared:
            yield f.name, inner.read(hints[f.name], stored[f.name], prefix + f.name, f.metadata)

    def read(self, hint: Any, stored: Any, path: str, about: Metadata) -> Any:
        """Return a value of the kind that a hint and metadata declare."""
        origin, inside = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._one_of(inside, stored, path, about)
        if origin is np.ndarray:
            return self._array(get_args(inside[1])[0], stored, path, about)
        if origin is tuple:
            return self._tuple(inside, stored, path, about)
        if origin is dict:
            _require(isinstance(stored, dict), path)
            return {name: self.read(inside[1], one, f"{path}.{name}", {}) for name, one in stored.items()}
        if origin is Literal:
            _require(any(type(stored) is type(one) and stored == one for one in inside), path)
            return stored
        if hint in (bool, int, float, str):
            return self._scalar(hint, stored, path, about)
        return stored if hint is Any else self._instance(hint, stored, path)

    def _instance(self, kind: Any, stored: Any, path: str) -> Any:
        if issubclass(kind, nn.Module):
            return stored if isinstance(stored, nn.Module) else self._network(stored, path)
        _require(isinstance(stored, dict), path)
        if issubclass(kind, BaseEstimator):
            return self.read_estimator(stored, path)
        if hasattr(kind, "name") or inspect.isabstract(kind):  # a class variable, not a field
            kind = next((one for one in _concrete(kind) if one.name == stored.get("name")), None)
            _require(kind is not None, path)
            stored = {name: value for name, value in stored.items() if name != "name"}
        value = kind(**dict(self._fields(kind, stored, path)))
        getattr(value, "require_consistent", lambda: None)()  # refuses by a ValueError
        return value

    def _one_of(self, hints: tuple[Any, ...], stored: Any, path: str, about: Metadata) -> Any:
        there = any(f"{name}.".startswith(f"{path}.") for name in self.arrays)
        if stored is None and types.NoneType in hints and not there:
            return None
        *others, last = (hint for hint in hints if hint is not types.NoneType)
        for hint in others:
            with suppress(DamagedError):
                return self.read(hint, stored, path, about)
        return self.read(last, stored, path, about)

    def _tuple(self, hints: tuple[Any, ...], stored: Any, path: str, about: Metadata) -> tuple[Any, ...]:
        _require(isinstance(stored, list), path)
        hints = hints[:1] * len(stored) if hints[-1] is Ellipsis else hints
        _require(len(hints) == len(stored), path)
        if "dimensions" in about:
            self._require_shape((len(stored),), path, about["dimensions"])
        names = [one.get("name", k) if isinstance(one, dict) else k for k, one in enumerate(stored)]
        paths = [f"{path}.{name}" for name in names]
        return tuple(self.read(*each, {}) for each in zip(hints, stored, paths, strict=True))

    def _array(self, scalar: Any, stored: Any, path: str, about: Metadata) -> NDArray[Any]:
        array = self.arrays.pop(path, None)
        if array is None:
            as_object = isinstance(stored, dict) and list(stored) == ["object"]
            labels, kind = (stored["object"], str | int | float) if as_object else (stored, str)
            _require(isinstance(labels, list) and all(isinstance(label, kind) for label in labels), path)
            array = np.array(labels, dtype=object if as_object else str)
        kinds = "bifUO" if scalar is Any else np.dtype(scalar).kind
        _require(array.dtype.kind in kinds, path)
        self._require_shape(array.shape, path, about["dimensions"])
        if array.dtype.kind in "fi":
            _require((np.isfinite(array) | (np.isnan(array) & about.get("missing", False))).all(), path)
            _require(not (about.get("positive") and (array < SMALLEST).any()), path)
        if len(kinds) > 1 or kinds in "UO":
            labels = array.tolist()
            _require(len({type(v) for v in labels}) == 1 and len(set(labels)) == len(labels), path)
        if "counts" in about:
            self._require_shape((int(array.sum()),), path, (about["counts"],))
        return array

    def _network(self, stored: Any, path: str) -> nn.Module:
        """Return the estimator's network with its weights."""
        _require(stored is None and self.estimator is not None, path)
        names = [name for name in self.arrays if name.startswith(f"{path}.")]
        state = {name.removeprefix(f"{path}."): torch.from_numpy(self.arrays.pop(name)) for name in names}
        _require(all(weights.isfinite().all() for weights in state.values()), path)
        with torch.random.fork_rng(devices=[]):
            network: nn.Module = self.estimator._new_network()
        network.load_state_dict(state)
        return network.eval()

    def _scalar(self, kind: type, stored: Any, path: str, about: Metadata) -> Any:
        if kind is not str and isinstance(stored, bool | int | float) and kind(stored) == stored:
            stored = kind(stored)
        _require(type(stored) is kind, path)
        if kind in (int, float):
            most = about.get("most", LARGEST)
            _require(about.get("least", -most) <= stored <= most, path)
            _require("above" not in about or stored > about["above"], path)
        if "counts" in about:
            self._require_shape((stored,), path, (about["counts"],))
        return stored

    def _require_shape(self, shape: tuple[int, ...], path: str, dimensions: tuple[str, ...]) -> None:
        """Refuse a length other than the dimension's, which the first one that is read decides."""
        _require(len(shape) == len(dimensions), path)
        for length, dimension in zip(shape, dimensions, strict=True):
            name, _, more = dimension.partition("+")
            lengths, length = self.shared if name in SHARED else self.free, length - int(more or 0)
            _require(length == (int(name) if name.isdigit() else lengths.setdefault(name, length)), path)


def _require(holds: Any, path: str) -> None:
    if not holds:
        raise DamagedError(f"{path} is not what it must be")


def _require_keys(stored: Any, names: Any, path: str) -> None:
    _require(isinstance(stored, dict) and set(stored) == set(names), path)


def _concrete(kind: Any) -> list[Any]:
    """Return a class and those derived from it, without the abstract ones."""
    derived = [one for child in kind.__subclasses__() for one in _concrete(child)]
    return derived if inspect.isabstract(kind) else [kind, *derived]
