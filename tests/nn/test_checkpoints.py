"""A fit that was killed goes on from its checkpoint and ends with the bits of one that was not."""

import json
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load, load_file, save_file

import equipool as ep
from equipool.data import Volumes
from equipool.estimators import CAIPooler, EquivariantPooler, NaivePooler, RandMatchPooler
from equipool.exceptions import EquipoolError, InputError
from equipool.nn import training

SETTINGS = {"steps": 24, "batch_size": 64, "n_latent": 8, "hidden": 16}
KINDS = {
    "ours": (EquivariantPooler, {"patience": 3}),
    "frozen": (EquivariantPooler, {"finetune": False, "adversary": 0.0}),
    "naive": (NaivePooler, {"patience": 2}),
    "cai": (CAIPooler, {}),
    "rm": (RandMatchPooler, {}),
}


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def pool():
    return ep.simulate_table(overlap=0.5, people=70, features=8).pool


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """A checkpoint after every step."""
    monkeypatch.setattr(training, "SECONDS", 0.0)


def fit(pool, kind="ours", **changes):
    make, settings = KINDS[kind]
    return make(**{**SETTINGS, **settings, **changes}).fit(
        pool.X, pool.y, site=pool.site_labels, covariates=pool.C
    )


def killed_after(steps, monkeypatch, pool, kind, folder):
    """Fit until some step of the loop, wherever it is, and end there."""
    remaining = iter(range(steps))
    write = training.Checkpoints.write

    def step(self, *state):
        write(self, *state)
        if next(remaining, None) is None:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(training.Checkpoints, "write", step)
        with pytest.raises(KilledError):
            fit(pool, kind, checkpoint=folder)


def same(a, b):
    states = a.network_.state_dict(), b.network_.state_dict()
    assert all((states[0][name] == states[1][name]).all() for name in states[0])
    assert a.history_ == b.history_


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_fit_ends_with_the_same_bits(pool, kind, tmp_path, monkeypatch):
    whole = fit(pool, kind)
    for step in random.sample(range(18), 2):
        folder = tmp_path / str(step)
        killed_after(step, monkeypatch, pool, kind, folder)
        if step > 3:
            killed_after(2, monkeypatch, pool, kind, folder)  # and once more
        same(fit(pool, kind, checkpoint=folder), whole)
        same(fit(pool, kind, checkpoint=folder), whole)  # one that had come to its end


def test_it_stops_in_the_second_stage_too(pool, tmp_path, monkeypatch):
    killed_after(30, monkeypatch, pool, "ours", tmp_path)
    done = {}
    for path in tmp_path.glob("*.safetensors"):
        facts = json.loads(bytes(load_file(path)["facts"].tolist()))
        done[path.name.partition(".")[0]] = facts["done"]
    assert done == {"stage-one": True, "stage-two": False}
    same(fit(pool, checkpoint=tmp_path), fit(pool))


def test_volumes_go_on_too(brains, brain_folder, tmp_path, monkeypatch):
    people = ep.read_bids(brain_folder)
    volumes = Volumes.build(people["path"], mask=brains.anatomy.mask)

    def fit_volumes(**more):
        pooler = EquivariantPooler(encoder="components", steps=6, n_latent=8, hidden=16, **more)
        return pooler.fit(volumes, people["dx"], site=people["site"], covariates=people[["age"]])

    monkeypatch.setattr(training.Checkpoints, "write", lambda *state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit_volumes(checkpoint=tmp_path)
    monkeypatch.undo()
    same(fit_volumes(checkpoint=tmp_path), fit_volumes())
    moved = volumes.with_values(volumes.read() + 1)
    volumes = moved
    with pytest.raises(InputError, match="other data: X is not the same"):
        fit_volumes(checkpoint=tmp_path)


def test_other_data_and_settings_are_refused(pool, tmp_path):
    fit(pool, checkpoint=tmp_path)
    with pytest.raises(InputError, match="other settings: steps was 24 and is 25"):
        fit(pool, steps=25, checkpoint=tmp_path)
    with pytest.raises(InputError, match="other settings: estimator was 'EquivariantPooler'"):
        fit(pool, "naive", checkpoint=tmp_path)
    names = {"X": {"X": pool.X + 1e-3}, "y": {"y": pool.y[::-1]}, "covariates": {"covariates": pool.C[::-1]}}
    for name, change in names.items():
        given = {"X": pool.X, "y": pool.y, "site": pool.site_labels, "covariates": pool.C, **change}
        with pytest.raises(InputError, match=f"other data: {name} is not the same.*give another folder"):
            EquivariantPooler(**SETTINGS, **KINDS["ours"][1], checkpoint=tmp_path).fit(**given)
    fit(pool, checkpoint=tmp_path, verbose=True)  # what decides nothing may differ


def test_damage_is_one_clear_sentence(pool, tmp_path):
    fit(pool, "naive", checkpoint=tmp_path)
    (numbers,) = tmp_path.glob("*.safetensors")
    content = numbers.read_bytes()
    for broken in (content[:-1], content[: len(content) // 2], b"", bytes([content[0] ^ 1]) + content[1:]):
        numbers.write_bytes(broken)
        with pytest.raises(InputError, match=f"The checkpoint .*{numbers.name} is damaged"):
            fit(pool, "naive", checkpoint=tmp_path)
    arrays = load(content)
    save_file({name: np.asarray(a + (a.dtype.kind == "f"), a.dtype) for name, a in arrays.items()}, numbers)
    with pytest.raises(InputError, match=r"is damaged \(another checksum\)"):
        fit(pool, "naive", checkpoint=tmp_path)
    numbers.unlink()  # a stage without a file begins anew
    same(fit(pool, "naive", checkpoint=tmp_path), fit(pool, "naive"))
    facts = tmp_path / "checkpoint.json"
    other = facts.read_text().replace('"equipool": "', '"equipool": "99')
    for text in (facts.read_text()[:-30], "[]", other):
        facts.write_text(text)
        with pytest.raises(InputError, match=r"is damaged or no checkpoint|equipool was '99"):
            fit(pool, "naive", checkpoint=tmp_path)


def test_files_of_others_stay_and_ours_do_not_pile_up(pool, tmp_path):
    other = tmp_path / "weights.safetensors"
    other.write_text("mine")
    fit(pool, checkpoint=tmp_path)
    assert other.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.json",
        "stage-one.checkpoint.safetensors",
        "stage-two.checkpoint.safetensors",
        "weights.safetensors",
    ]


def test_a_folder_that_cannot_be_written_is_said(pool, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EquipoolError, match=r"file.*(cannot be read|could not be written)"):
        fit(pool, "naive", checkpoint=tmp_path / "file" / "folder")


def test_a_saved_model_does_not_name_the_folder(pool, tmp_path):
    saved = fit(pool, "naive", checkpoint=tmp_path / "kept").save(tmp_path / "model")
    assert "kept" not in (saved / "model.json").read_text()
    assert ep.load(saved).checkpoint is None


def test_a_process_ended_by_force_goes_on(pool, tmp_path):
    """SIGKILL at a random moment, in another process; no stray file remains."""
    np.savez(tmp_path / "pool.npz", X=pool.X, y=pool.y.astype(str), site=pool.site, C=pool.C)
    script = (
        "import sys, numpy as np\n"
        "from equipool.estimators import NaivePooler\n"
        "from equipool.nn import training\n"
        "training.SECONDS = 0\n"
        "with np.load(sys.argv[1]) as p:\n"
        "    NaivePooler(steps=120, patience=99, checkpoint=sys.argv[2]).fit(\n"
        "        p['X'], p['y'], site=p['site'], covariates=p['C'])\n"
    )
    folder = tmp_path / "kept"
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "pool.npz"), str(folder)])
    while process.poll() is None and not (folder / "checkpoint.json").is_file():
        time.sleep(0.01)
    time.sleep(0.4 * random.random())
    process.kill()
    process.wait()
    given = pool.X, pool.y.astype(str)
    more = {"site": pool.site, "covariates": pool.C}
    naive = NaivePooler(steps=120, patience=99)
    gone_on = NaivePooler(steps=120, patience=99, checkpoint=folder).fit(*given, **more)
    same(gone_on, naive.fit(*given, **more))
    assert len(list(folder.iterdir())) == 2


def test_two_runs_do_not_share_a_folder(tmp_path, pool):
    """The second gets an error; after a kill of the first, nothing keeps it out."""
    folder = tmp_path / "kept"
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from equipool.nn.training import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    estimator = NaivePooler(**SETTINGS, checkpoint=folder)
    with pytest.raises(InputError, match=r"Another run is training with the checkpoint .*; wait for it"):
        estimator.fit(pool.X, pool.y, site=pool.site)
    assert list(folder.iterdir()) == []
    other.kill()
    other.communicate()
    estimator.fit(pool.X, pool.y, site=pool.site)
    estimator.fit(pool.X, pool.y, site=pool.site)  # and it is given back
