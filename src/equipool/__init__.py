"""equipool: pool multi-site datasets so that they can be analysed as one."""

import importlib
from typing import TYPE_CHECKING, Any

from equipool.exceptions import did_you_mean
from equipool.version import __version__

if TYPE_CHECKING:
    from equipool.data import PooledDataset as PooledDataset
    from equipool.data import Volumes as Volumes
    from equipool.data import check as check
    from equipool.data import read_bids as read_bids
    from equipool.data import read_table as read_table
    from equipool.estimators import EquivariantPooler as EquivariantPooler
    from equipool.estimators import ImageHarmonizer as ImageHarmonizer
    from equipool.estimators import SiteHarmonizer as SiteHarmonizer
    from equipool.estimators import load as load
    from equipool.groups import CovariateAction as CovariateAction
    from equipool.simulate import simulate_table as simulate_table
    from equipool.simulate.brains import simulate_brains as simulate_brains

# Public names by module, imported at first use, so that `import equipool` is instant.
_MODULES = {
    "equipool.data": "PooledDataset Volumes check read_bids read_table",
    "equipool.estimators": "EquivariantPooler ImageHarmonizer SiteHarmonizer load",
    "equipool.groups": "CovariateAction",
    "equipool.simulate": "simulate_table",
    "equipool.simulate.brains": "simulate_brains",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    what = f"module 'equipool' has no attribute {name!r}"
    raise AttributeError(f"{what}; {did_you_mean(name, _PUBLIC, 'see dir()')}")


def __dir__() -> list[str]:
    return sorted(__all__)
