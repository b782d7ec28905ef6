"""Fixtures of the tests of packages: what `make dist` built, and booted machines."""

import os
import pathlib

import pytest

from machine import Machine, remove


@pytest.fixture(scope="session")
def packages():
    """The folder that `make dist` filled."""
    return pathlib.Path(os.environ["MEMLEDGER_TEST_PACKAGES"])


@pytest.fixture(scope="session")
def booted(tmp_path_factory):
    """A booted minimal Debian."""
    machine = Machine(f"{os.environ['MEMLEDGER_TEST_CACHE']}/debian/root.tar", tmp_path_factory.mktemp("machine"))
    yield machine
    machine.stop()


@pytest.fixture
def machine(booted):
    """A booted minimal Debian without memledger."""
    assert booted.status("show", "-p", "LoadState", "--value", "memledger") == "not-found"
    yield booted
    booted.remove_memledger()


@pytest.fixture
def containers():
    """Names of containers, which are removed at the end."""
    names = []
    yield names
    remove(*names)
