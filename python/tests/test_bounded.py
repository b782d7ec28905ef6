"""The bound of a measurement on the CPU: what would take more memory than is left fails, and nothing keeps the bound."""

import mmap
import os
import resource
import types

import pytest
from memledger_client import _bounded
from memledger_client._bounded import HostMemoryError, bounded

MIB = 1 << 20


@pytest.fixture(autouse=True)
def without_torch(monkeypatch):
    monkeypatch.setattr(_bounded, "_start_threads", lambda: None)


def limit():
    return resource.getrlimit(resource.RLIMIT_DATA)


def memory(mib):
    return types.SimpleNamespace(for_measurement=mib * MIB)


def private(size):
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("allocate", [bytearray, private])
def test_what_takes_more_than_is_left_fails_and_the_limit_is_as_before(allocate):
    before = limit()
    with bounded(memory(64)):
        allocate(16 * MIB)
    with pytest.raises(HostMemoryError, match="does not fit") as raised, bounded(memory(64)):
        allocate(1024 * MIB)
    assert raised.value.__context__.__traceback__ is None, "its frames would hold what was made"
    assert limit() == before


def test_other_errors_are_the_programs():
    before = limit()
    with pytest.raises(FileNotFoundError), bounded(memory(64)):
        open("/nonexistent/file")
    assert limit() == before


def test_forked_child_has_the_limit_of_before_and_can_search_too():
    before = limit()
    with bounded(memory(64)):
        assert limit() != before
        child = os.fork()
        if child == 0:
            is_right = limit() == before and _bounded._lock.acquire(blocking=False)
            os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert limit() == before


def test_nothing_is_tried_where_the_kernel_bounds_nothing(monkeypatch):
    monkeypatch.setattr(_bounded, "_can_map", lambda size: True)
    before, tried = limit(), []
    with pytest.raises(HostMemoryError, match="does not bound"), bounded(memory(64)):
        tried.append(1)
    assert (tried, limit()) == ([], before)
