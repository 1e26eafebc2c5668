"""Thousands of damaged and hostile files: each is read correctly or refused with an EquipoolError.

``make fuzz`` runs them; ``make fuzz SEED=7`` damages them in other places.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import resource
import signal
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

import equipool as ep
from equipool.exceptions import EquipoolError, EquipoolWarning
from forging import forged_facts

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("quick_models")]

INPUTS = 2000
SECONDS, KIBIBYTES = 10, 2**20  # that one input may take, and that all may add to memory
SEED = int(os.environ.get("EQUIPOOL_FUZZ_SEED", "0"))


def generator(purpose: str) -> random.Random:
    """Return the random numbers of one purpose; a failing test shows the seed."""
    print(f"EQUIPOOL_FUZZ_SEED={SEED}")
    return random.Random(f"{purpose} {SEED}")


@contextmanager
def in_bounds():
    """Stop what hangs, and fail on what eats memory; ``yield`` gives the context of one input."""

    said = []

    def stop(*_):
        raise TimeoutError(f"an input took more than {SECONDS} s")

    @contextmanager
    def one():
        signal.alarm(SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EquipoolWarning)
                yield
        except EquipoolError as error:
            said.append(str(error))
        finally:
            signal.alarm(0)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    usual = signal.signal(signal.SIGALRM, stop)
    try:
        yield one
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert all(10 < len(sentence) < 2000 for sentence in said)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < KIBIBYTES


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Flip bytes, cut, insert or overwrite: what disks, transfers and editors do."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        where = rng.randrange(len(data) or 1)
        match rng.randrange(6):
            case 0 if data:
                data[where] ^= 1 << rng.randrange(8)
            case 1:
                del data[where:]
            case 2:
                data[where:where] = rng.randbytes(rng.randrange(1, 20))
            case 3:
                data[where : where + 8] = b"\xff" * 8
            case 4:
                data[where : where + 4] = bytes(4)
            case _:
                del data[where : where + rng.randrange(1, 40)]
    return bytes(data)


# -- models ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    pool = ep.simulate_table(people=30, features=5).pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    folders = []
    pooler = ep.EquivariantPooler(steps=2, random_state=0)
    for name, model in (("harmonizer", ep.SiteHarmonizer()), ("pooler", pooler)):
        folder = tmp_path_factory.mktemp(name) / "model"
        model.fit(pool.X, pool.y, **given).save(folder)
        folders.append(folder)
    return pool, folders


def _use(model, pool):
    """Use a model as a user would; what it gives is finite."""
    results = [model.transform(pool.X[:5])]
    if isinstance(model, ep.SiteHarmonizer):
        results += [model.transform(pool.X[:5], site=pool.site_labels[:5], covariates=pool.C[:5])]
    else:
        results += [model.predict_proba(pool.X[:5]), model.transport(pool.X[:5], to=50.0)]
    assert all(np.isfinite(np.asarray(result)).all() for result in results)


@pytest.mark.parametrize("kind", [0, 1])
def test_damaged_models(models, tmp_path, kind):
    pool, folders = models
    files = {name: (folders[kind] / name).read_bytes() for name in ("model.json", "model.safetensors")}
    rng = generator(f"damaged models {kind}")
    with in_bounds() as one:
        for k in range(INPUTS // 2):
            for name, content in files.items():
                hit = name == ("model.json", "model.safetensors")[k % 2]
                (tmp_path / name).write_bytes(damaged(rng, content) if hit else content)
            with one():
                _use(ep.load(tmp_path), pool)


ODD = (None, True, -1, 0, 10**30, 1e308, float("nan"), "", "x" * 1000, "../../etc", [], {}, [[]], "__class__")


def _altered(rng: random.Random, value):
    """Put something odd somewhere into a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _altered(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        k = rng.randrange(len(value))
        return [*value[:k], _altered(rng, value[k]), *value[k + 1 :]]
    return rng.choice(ODD)


@pytest.mark.parametrize("kind", [0, 1])
def test_forged_models(models, tmp_path, kind):
    """The JSON is whole and its checksum right, but what it says is odd."""
    pool, folders = models
    facts = (folders[kind] / "model.json").read_bytes()
    (tmp_path / "model.safetensors").write_bytes((folders[kind] / "model.safetensors").read_bytes())
    rng = generator(f"forged models {kind}")
    with in_bounds() as one:
        for _ in range(INPUTS // 2):
            (tmp_path / "model.json").write_bytes(facts)
            forged_facts(tmp_path, lambda facts: _altered(rng, facts))
            with one():
                _use(ep.load(tmp_path), pool)


def test_nested_json_is_refused(models, tmp_path):
    (tmp_path / "model.json").write_text("[" * 100_000)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(EquipoolError):
        ep.load(tmp_path)


# -- tables ------------------------------------------------------------------------------------------------

CELLS = ("", " ", "nan", "NA", "inf", "-inf", "1e999", "0x10", "1,5", "=1+1", "<b>", '"', "'", "\\", "\x00",
         "é", "٣", "1_000", "--", "true", "2020-01-01", "9" * 400, "🧠", "\r", "1;2")  # fmt: skip


def _odd_table(rng: random.Random) -> bytes:
    """Return a small table with odd names and cells."""
    names = ["site", "age", "dx", "id", *(f"f{k}" for k in range(4))]
    if rng.random() < 0.3:
        names[rng.randrange(len(names))] = rng.choice(CELLS)
    mark = rng.choice(",\t;|")
    lines = [mark.join(names)]
    for k in range(rng.choice((0, 1, 2, 12, 40))):
        row = [f"s{k % 3}", str(20 + k), str(k % 2), str(k), *(f"{rng.gauss(0, 1):.4f}" for _ in range(4))]
        if rng.random() < 0.1:
            row[rng.randrange(len(row))] = rng.choice(CELLS)
        if rng.random() < 0.01:
            row = row[: rng.randrange(len(row))]
        lines.append(mark.join(row))
    return rng.choice(("\n", "\r\n")).join(lines).encode()


def test_odd_tables(tmp_path):
    rng = generator("tables")
    with in_bounds() as one:
        for k in range(INPUTS):
            content = _odd_table(rng)
            content = damaged(rng, content) if k % 2 else content
            kind = rng.choice((".csv", ".tsv", ".csv.gz"))
            path = tmp_path / f"t{kind}"
            path.write_bytes(gzip.compress(content) if kind.endswith("gz") and k % 3 else content)
            with one():
                report = ep.check(path, site="site", covariates="age", target="dx", id="id")
                json.dumps(report.to_dict(), allow_nan=False)
                str(report)
            with one():
                pool = ep.PooledDataset.read(path, site="site", covariates="age", target="dx", id="id")
                clean = ep.SiteHarmonizer().fit_transform(pool.X, site=pool.site_labels, covariates=pool.C)
                assert np.isfinite(np.asarray(clean)).all()


# -- images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_damaged_images(tmp_path, ending):
    import nibabel

    from equipool.data import Volumes

    rng, numbers = generator("images"), np.random.default_rng(SEED)
    paths = []
    for k in range(3):
        values = numbers.uniform(1, 2, (6, 7, 5)).astype(np.float32)
        paths.append(tmp_path / f"sub-{k}{ending}")
        nibabel.Nifti1Image(values, np.diag([4, 4, 4, 1])).to_filename(paths[-1])
    content = paths[1].read_bytes()
    with in_bounds() as one:
        for k in range(INPUTS // 2):
            # Every other hit falls into the header, which is where a file can lie.
            head = gzip.decompress(content) if ending.endswith("gz") else content
            if k % 2:
                head = damaged(rng, head[:352]) + head[352:]
                hit = gzip.compress(head, 1) if ending.endswith("gz") else head
            else:
                hit = damaged(rng, content)
            paths[1].write_bytes(hit)
            with one():
                volumes = Volumes.build(paths, cache=tmp_path / "cache")
                values = volumes.read()
                assert np.isfinite(values).all()
                assert math.prod(volumes.mask.shape) < 10**6


# -- config files ------------------------------------------------------------------------------------------

VALUES = ("1", "-1", "1.5", "nan", "inf", "true", '"age"', '""', '"\\u0000"', '"../x"', "[]",
          '["age"]', "[[1]]", "{}", "1979-05-27", "0x7fffffffffffffffff", '"""\n"""', "[" * 2000,
          "9" * 5000)  # fmt: skip


def test_odd_config_files(tmp_path, capsys):
    from equipool.cli.app import main
    from equipool.cli.options import read_config

    rng = generator("config files")
    table, written = tmp_path / "t.csv", tmp_path / "written.toml"
    ep.simulate_table(people=10, features=3).pool.to_frame().to_csv(table, index=False)
    assert main(["check", str(table), "--write-config", str(written)]) in (0, 1)
    whole = written.read_bytes()
    keys = [line.split(" = ")[0].lstrip("# ") for line in whole.decode().splitlines() if " = " in line]
    path = tmp_path / "c.toml"
    with in_bounds() as one:
        for k in range(INPUTS):
            if k % 2:
                lines = [
                    f"{rng.choice([*keys, 'x'])} = {rng.choice(VALUES)}" for _ in range(rng.choice((1, 2, 3)))
                ]
                path.write_text("\n".join(lines))
            else:
                path.write_bytes(damaged(rng, whole))
            with one():
                found = read_config(path, rng.choice(("check", "harmonize", "report", "benchmark")))
                assert all(isinstance(name, str) for name in found)
            if k % 20 == 0:  # the whole command is slow
                signal.alarm(SECONDS)
                assert main(["check", str(table), "--config", str(path)]) in (0, 1, 2)
                signal.alarm(0)
    assert "Traceback" not in capsys.readouterr().err
