"""Models are saved whole and load with the same bits; a damaged or forged one is refused at load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

import equipool as ep
from equipool.data.covariates import Encoding
from equipool.estimators import (
    CAIPooler,
    EquivariantPooler,
    MMDPooler,
    NaivePooler,
    RandMatchPooler,
    SubsamplingPooler,
    persistence,
)
from equipool.exceptions import InputError
from equipool.sites.effect import Composition, SiteEffect, array
from forging import forged, forged_facts

KINDS = [NaivePooler, MMDPooler, CAIPooler, SubsamplingPooler, RandMatchPooler, EquivariantPooler]
FloatArray = NDArray[np.float64]


# -- poolers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    return ep.simulate_table(overlap=0.5, people=40, features=6).pool


def fitted(kind, pool, **settings):
    estimator = kind(**{"steps": 3, "n_latent": 6, "hidden": 8, **settings})
    return estimator.fit(pool.X, pool.y, site=pool.site_labels, covariates=pool.C)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_gives_the_same_numbers(kind, pool, tmp_path):
    estimator = fitted(kind, pool)
    estimator.save(tmp_path / "model")
    again = ep.load(tmp_path / "model")
    np.testing.assert_array_equal(again.transform(pool.X), estimator.transform(pool.X))
    np.testing.assert_array_equal(again.predict(pool.X), estimator.predict(pool.X))
    assert again.get_params() == estimator.get_params()
    assert sorted(path.suffix for path in (tmp_path / "model").iterdir()) == [".json", ".safetensors"]


def test_what_was_learned_of_a_frame_is_kept(pool, tmp_path):
    frame = pd.DataFrame(pool.X, columns=list(pool.feature_names))
    covariates = pd.DataFrame({"age": pool.C[:, 0], "sex": np.resize(["f", "m"], len(pool))})
    estimator = NaivePooler(steps=2, task="number")
    estimator.fit(frame, pool.X[:, 0], site=pool.site_labels, covariates=covariates)
    again = ep.load(estimator.save(tmp_path / "model"))
    assert again.feature_names_in_.tolist() == list(pool.feature_names)
    assert again.covariates_ == estimator.covariates_
    assert again.target_scale_ == estimator.target_scale_
    assert not hasattr(again, "classes_")
    np.testing.assert_array_equal(again.predict(frame), estimator.predict(frame))


def test_classes_keep_their_type_through_a_file(pool, tmp_path):
    sick = pool.y == "AD"
    for k, y in enumerate((sick, sick.astype(np.int8), sick + 0.5, pool.y.astype(str), pool.y)):
        estimator = NaivePooler(steps=2, task="class").fit(pool.X, y, site=pool.site_labels)
        again = ep.load(estimator.save(tmp_path / str(k)))
        assert again.classes_.dtype == estimator.classes_.dtype
        np.testing.assert_array_equal(again.predict(pool.X), estimator.predict(pool.X))


def test_a_folder_with_other_files_is_not_written_into(pool, tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(InputError, match="holds other files"):
        fitted(NaivePooler, pool).save(tmp_path)


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory):
    frame = pd.DataFrame(pool.X, columns=list(pool.feature_names))
    covariates = pd.DataFrame({"age": pool.C[:, 0], "sex": np.resize(["f", "m"], len(pool))})
    estimator = EquivariantPooler(steps=2, n_latent=6, hidden=8)
    estimator.fit(frame, pool.y, site=pool.site_labels, covariates=covariates)
    return estimator.save(tmp_path_factory.mktemp("pooler") / "model")


@pytest.fixture
def model(folder, tmp_path):
    """A copy of a saved model that may be changed."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("damage", ["json", "arrays", "schema", "gone", "nested"])
def test_files_that_are_not_as_they_were_written_are_refused(damage, model):
    facts, arrays = model / "model.json", model / "model.safetensors"
    if damage == "json":
        facts.write_text("{")
    elif damage == "arrays":
        arrays.write_bytes(arrays.read_bytes()[:-1] + b"!")
    elif damage == "schema":
        forged_facts(model, lambda facts: facts | {"schema": 1})
    elif damage == "gone":
        arrays.unlink()
    else:
        facts.write_text("[" * 100_000)
    with pytest.raises(InputError, match="model"):
        ep.load(model)


def changed(facts, path, value):
    """Return facts with one value changed; ``...`` removes it."""
    *above, last = path
    place = facts
    for name in above:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return facts


LEARNED = [
    (("n_features_in_",), 7),
    (("feature_names_in_",), {"object": ["a"] * 6}),
    (("feature_names_in_",), {"object": ["a", "b"]}),
    (("feature_names_in_",), ["a", "b", "c", "d", "e", "f"]),
    (("sites_",), []),
    (("sites_",), "GE"),
    (("sites_",), ["GE", 2]),
    (("sites_",), ...),
    (("more",), 1),
    (("covariates_",), []),
    (("covariates_", 0, "scale"), 0.0),
    (("covariates_", 0, "scale"), math.nan),
    (("covariates_", 0, "centre"), 1e308),
    (("covariates_", 0, "name"), None),
    (("covariates_", 1, "levels"), "fm"),
    (("covariates_", 1), {}),
    (("task_",), None),
    (("task_",), "number"),
    (("task_",), "classes"),
    (("classes_",), None),
    (("classes_",), {"object": ["AD"]}),
    (("classes_",), {"object": ["AD", 1]}),
    (("classes_",), {"object": ["AD", {}]}),
    (("target_scale_",), [0.0, 1.0]),
    (("dropped_",), "none"),
    (("_seed",), 1.5),
    (("front_",), {}),
    (("front_",), {"estimator": "SiteHarmonizer", "settings": {}}),
    (("network_",), 0),
]
SETTINGS = [
    ("n_latent", 4),
    ("n_latent", 10**30),
    ("hidden", None),
    ("hidden", 0),
    ("encoder", "resnett"),
    ("encoder", "linear"),
    ("encoder", {}),
    ("tau", "learned"),
    ("generator", "spred"),
    ("generator", [1]),
    ("power", "6"),
    ("power", math.nan),
    ("front", "SiteHarmonizer"),
    ("front", {"estimator": "NaivePooler"}),
    ("steps", ...),
    ("magic", 1),
]


@pytest.mark.parametrize(("path", "value"), LEARNED)
def test_learned_values_that_do_not_fit_are_refused(model, path, value):
    forged_facts(model, lambda facts: changed(facts, ("learned", *path), value))
    with pytest.raises(InputError, match=r"is damaged: .*; copy it anew, or fit again"):
        ep.load(model)


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_settings_that_do_not_fit_are_refused(model, name, value):
    forged_facts(model, lambda facts: changed(facts, ("settings", name), value))
    with pytest.raises(InputError, match="is damaged"):
        ep.load(model)


@pytest.mark.parametrize("name", ["os.system", "PoolingEstimator", "load", None, ["NaivePooler"]])
def test_other_classes_are_not_made(model, name):
    forged_facts(model, lambda facts: facts | {"estimator": name})
    with pytest.raises(InputError, match="is damaged: there is no estimator"):
        ep.load(model)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("feature_mean_", None),
        ("feature_mean_", lambda a: a[:-1]),
        ("feature_mean_", lambda a: a * np.nan),
        ("feature_scale_", lambda a: 0 * a),
        ("feature_scale_", lambda a: a.astype(int)),
        ("feature_varies_", lambda a: a[None]),
        ("network_.one.encoder.0.weight", lambda a: a.T.copy()),
        ("network_.one.encoder.0.weight", lambda a: a * np.inf),
        ("network_.one.encoder.0.weight", None),
        ("network_.three", lambda a: np.ones(2)),
        ("something", lambda a: np.ones(2)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(model, path, change):
    forged(model, path, change)
    with pytest.raises(InputError, match="is damaged"):
        ep.load(model)


# -- harmonizers: every kind of declaration ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Shift(SiteEffect):
    name = "shift"

    shift: FloatArray = array("sites", "features")
    scale: FloatArray = array("features", positive=True)

    @classmethod
    def identity(cls, n_sites, n_features):
        return cls(np.zeros((n_sites, n_features)), np.ones(n_features))

    @property
    def is_identity(self):
        return not self.shift.any()

    def undo(self, rows, at):
        return rows - self.shift[at.site]

    def redo(self, rows, at):
        return rows + self.shift[at.site]

    def add_site(self, rows, at):
        return self


@dataclass(frozen=True, eq=False)
class Curve(Shift):
    name = "curve"

    columns: NDArray[np.intp] = array("curves", neutral=0)
    knots: FloatArray = array("curves", "knots+1")
    strength: float = field(metadata={"least": 0.0, "most": math.inf})

    def require_consistent(self):
        if (np.diff(self.columns) < 1).any():
            raise ValueError("columns")


@dataclass(frozen=True, eq=False)
class Model:
    effects: Composition
    lines: FloatArray = array("covariates", "features")
    spare: FloatArray | None = array("spare")
    masses: FloatArray = field(metadata={"dimensions": ("features",), "missing": True})
    names: tuple[str, ...] | None
    gain: bool
    kind: Literal["a", "b"]


@dataclass(frozen=True, kw_only=True)
class Learned:
    n_features_in_: int = field(metadata={"least": 1, "counts": "inputs"})
    feature_names_in_: NDArray[np.object_] | None = array("inputs")
    sites_: NDArray[np.str_] = array("sites")
    moved_: NDArray[np.bool_] = field(metadata={"dimensions": ("inputs",), "counts": "features"})
    encoding_: Encoding
    model_: Model


class Harmonizer(BaseEstimator):
    _learned = Learned

    def __init__(self, *, mixing: float | None = None, reference: str | None = None, keep: bool = True):
        self.mixing, self.reference, self.keep = mixing, reference, keep

    def fit(self, X, y=None):
        return self

    def require_consistent(self):
        if len(self.encoding_.names) != len(self.model_.lines):
            raise ValueError("covariates")


@pytest.fixture
def harmonizer(monkeypatch):
    monkeypatch.setattr(persistence, "_estimators", lambda: {"Harmonizer": Harmonizer})
    rng, one = np.random.default_rng(0), Harmonizer(mixing=np.inf, keep=np.True_)
    one.n_features_in_, one.sites_ = 4, np.array(["GE", "Siemens"])
    one.moved_ = np.array([True, True, False, True])
    one.encoding_ = Encoding(
        ("age", "hand"), {"hand": ("b", "l", "r")}, ("age", "hand=l", "hand=r"), (None,) * 3
    )
    shift, scale = rng.normal(size=(2, 3)), np.exp(rng.normal(size=3))
    curve = Curve(shift, scale, np.array([0, 2]), rng.normal(size=(2, 6)), math.inf)
    one.model_ = Model(
        effects=Composition((Shift(shift, scale), curve)),
        lines=rng.normal(size=(3, 3)),
        spare=None,
        masses=np.array([0.0, np.nan, 1.0]),
        names=("x",),
        gain=True,
        kind="b",
    )
    return one


def test_every_kind_of_value_comes_back(harmonizer, tmp_path):
    again = ep.load(persistence.save(harmonizer, tmp_path / "model"))
    assert again.get_params() == harmonizer.get_params()
    assert not hasattr(again, "feature_names_in_")
    assert again.sites_.tolist() == ["GE", "Siemens"]
    np.testing.assert_array_equal(again.moved_, harmonizer.moved_)
    assert again.encoding_ == harmonizer.encoding_
    before, after = harmonizer.model_, again.model_
    assert [type(effect) for effect in after.effects] == [Shift, Curve]
    for first, second in zip(before.effects, after.effects, strict=True):
        for name, value in vars(first).items():
            np.testing.assert_array_equal(getattr(second, name), value)
            assert np.asarray(getattr(second, name)).dtype == np.asarray(value).dtype
    np.testing.assert_array_equal(after.lines, before.lines)
    np.testing.assert_array_equal(after.masses, before.masses)
    assert (after.spare, after.names, after.gain, after.kind) == (None, ("x",), True, "b")


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("moved_", lambda a: ~a),
        ("moved_", lambda a: a.astype(float)),
        ("model_.effects.effects.shift.shift", lambda a: a[:1]),
        ("model_.effects.effects.shift.scale", lambda a: -a),
        ("model_.effects.effects.curve.scale", lambda a: a * 0 + 1e-320),
        ("model_.effects.effects.curve.columns", lambda a: a.astype(float)),
        ("model_.effects.effects.curve.columns", lambda a: a[::-1].copy()),
        ("model_.effects.effects.curve.columns", lambda a: a[:1]),
        ("model_.effects.effects.curve.knots", lambda a: a[0]),
        ("model_.effects.effects.curve.knots", None),
        ("model_.effects.effects.other.shift", lambda a: np.ones((2, 3))),
        ("model_.lines", lambda a: a[:2]),
        ("model_.spare", lambda a: np.full(2, np.nan)),
        ("model_.masses", lambda a: a + np.inf),
    ],
)
def test_arrays_of_effects_are_checked(harmonizer, tmp_path, path, change):
    folder = persistence.save(harmonizer, tmp_path / "model")
    forged(folder, path, change)
    with pytest.raises(InputError, match="is damaged"):
        ep.load(folder)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("encoding_", "levels"), [None]),
        (("encoding_", "levels"), [None, None, ["a", 1]]),
        (("encoding_", "names"), ["age", "hand=l", "hand=x"]),
        (("encoding_", "names"), ["age", "hand=l"]),
        (("encoding_", "categories"), {}),
        (("encoding_", "categories"), {"hand": "blr"}),
        (("encoding_", "categories"), None),
        (("encoding_", "columns"), []),
        (("model_", "effects", "effects"), []),
        (("model_", "effects", "effects", 0, "name"), "warp"),
        (("model_", "effects", "effects", 0, "name"), "curve"),
        (("model_", "effects", "effects", 1, "name"), "shift"),
        (("model_", "effects", "effects", 1, "name"), []),
        (("model_", "effects", "effects", 1, "strength"), -1.0),
        (("model_", "effects", "effects", 1, "strength"), "inf"),
        (("model_", "effects", "effects", 1, "strength"), ...),
        (("model_", "effects", "effects", 1), None),
        (("model_", "names"), [1]),
        (("model_", "gain"), None),
        (("model_", "kind"), "c"),
        (("model_", "kind"), ["a"]),
    ],
)
def test_facts_of_effects_are_checked(harmonizer, tmp_path, path, value):
    folder = persistence.save(harmonizer, tmp_path / "model")
    forged_facts(folder, lambda facts: changed(facts, ("learned", *path), value))
    with pytest.raises(InputError, match="is damaged"):
        ep.load(folder)
