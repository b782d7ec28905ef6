"""What the client costs, in processor time, so that a busy machine does not fail it."""

import json
import shutil

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

COST = """
import json, os, resource, sys, time
def used(call, count):
    before = time.thread_time()
    for _ in range(count):
        call()
    return 1e6 * (time.thread_time() - before) / count
import torch
torch.cuda.init()
torch.cuda.standin_allocate(1 << 20)
import memledger
from memledger import _torch
def tracked():
    with memledger.track("model", "forward"):
        pass
tracked()
def best(function, calls):
    return min(used(function, calls) for _ in range(3))
result = {"sample": best(_torch.devices, 10_000), "step": best(memledger.step, 10_000), "track": best(tracked, 3_000)}
print(json.dumps(result))
"""
IMPORT = """
import contextlib, functools, json, socket, sys, threading, typing  # as torch has
import time
before = time.process_time()
import memledger
print(time.process_time() - before)
"""


def test_calls_cost_microseconds(receiver, run):
    code, out, err = run(COST).end()
    assert (code, err) == (0, "")
    microseconds = json.loads(out)
    print(f"microseconds of processor time: {microseconds}")
    assert microseconds["sample"] < 20
    assert microseconds["step"] < 5
    assert microseconds["track"] < 100


def mount(tmp_path):
    """Returns a copy of the client without bytecode, as in a read-only mount."""
    path = tmp_path / "mount"
    shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns("tests", "__pycache__", "sitecustomize.py"))
    return path


def test_import_costs_milliseconds_without_bytecode(run, tmp_path):
    path = mount(tmp_path)
    imported = min(1000 * float(run(IMPORT, path=(path,)).end()[1]) for _ in range(5))
    assert not list(path.rglob("*.pyc"))
    print(f"milliseconds of processor time: import {imported:.1f}")
    assert imported < 40
