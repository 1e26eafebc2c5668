"""The public face: every promised name resolves, and unknown ones are answered."""

import importlib
import pkgutil

import pytest

import equipool as ep


def modules():
    found = pkgutil.walk_packages(ep.__path__, prefix="equipool.")
    return [importlib.import_module(module.name) for module in found]


def test_every_public_name_resolves():
    for module in [ep, *modules()]:
        for name in getattr(module, "__all__", []):
            assert getattr(module, name) is not None, f"{module.__name__}.{name}"


def test_every_module_says_what_is_public_and_what_it_is_for():
    for module in modules():
        assert module.__doc__, module.__name__


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'PooledDataset'"):
        ep.PooledDatasets  # noqa: B018
