"""Memory in large pages: what was in it stays, and the kernel counts it as large."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from ddplab.launch import launch

PROGRAM = """
from ddplab._hugepages import collapse

def large():
    return next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages"))

mine = b"0123456789abcdef" * (4 << 20)  # 64 MiB
before = large()
collapse()
print(before, large(), mine == b"0123456789abcdef" * (4 << 20))
"""


def kernel() -> tuple[int, ...]:
    if sys.platform != "linux":
        return (0, 0)
    return tuple(map(int, re.findall(r"\d+", Path("/proc/sys/kernel/osrelease").read_text())[:2]))


@pytest.mark.skipif(kernel() < (6, 1), reason="MADV_COLLAPSE came with Linux 6.1")
def test_small_pages_become_large_ones_and_keep_what_they_hold():
    """64 MiB hold at least 31 whole pages of 2 MiB, wherever they begin."""
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}  # may ask for large ones
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    before, after, same = done.stdout.split()
    assert same == "True" and int(after) - int(before) >= 31 * 2048


def looked_up() -> tuple[bool, int]:
    """In a rank: is numpy.random there already, and how often does a new group read all installed packages?"""
    import importlib.metadata

    import torch.distributed as dist

    before = importlib.metadata.entry_points.cache_info().misses
    dist.new_group([0, 1])
    return "numpy.random" in sys.modules, importlib.metadata.entry_points.cache_info().misses - before


def test_ranks_share_what_each_would_look_up():
    assert launch(looked_up, ranks=2, device="cpu") == [(True, 0)] * 2
