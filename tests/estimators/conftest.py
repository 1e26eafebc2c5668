import pytest

import equipool as ep


@pytest.fixture(scope="session")
def split():
    """Participants of one table, of the same three sites: those to train on, and new ones."""
    pool = ep.simulate_table(overlap=1.0, people=200, features=16).pool
    train, new = pool.split(0.4, stratify=("site", "target"), random_state=0)
    return pool[train], pool[new]


@pytest.fixture(scope="session")
def trained(split):
    pool, _ = split
    return ep.EquivariantPooler(random_state=0, steps=300).fit(
        pool.X, pool.y, site=pool.site_labels, covariates=pool.C
    )
