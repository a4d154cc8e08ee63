"""Communication hooks when a run is resumed, when it takes long, and when it ends."""

from __future__ import annotations

import gc
import io
import os
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from ddp_cases import batch, outcome
from hook_cases import CORE, Given, equal, hooked, many_buckets, soak, step

from ddplab.hooks.lane import Lane
from ddplab.launch import RankError, launch


def resumed(method):
    """Six steps in a row, and three, a checkpoint, three in a new process group's worth of objects: the same bits?"""
    rank = dist.get_rank()

    def build():
        ddp = many_buckets(find_unused_parameters=True)  # no rebuild: the buckets of a resumed run are the same
        state, hook = CORE[method]()
        ddp.register_comm_hook(state, hook)
        return ddp, state

    def train(ddp, steps):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for k in steps:
            optimizer.zero_grad()
            (ddp(batch(rank, k, 4, (5,), torch.float32)).sin() ** 2).mean().backward()
            optimizer.step()

    whole, state = build()
    train(whole, range(6))
    ddp, half = build()
    train(ddp, range(3))
    file = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "hook": half.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    trip = equal(loaded["hook"], half.state_dict())
    ddp, again = build()
    ddp.module.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["hook"])
    trip = trip and equal(again.state_dict(), half.state_dict())
    train(ddp, range(3, 6))
    found = dict(
        trip=trip,
        weights=equal(ddp.module.state_dict(), whole.module.state_dict()),
        state=equal(again.state_dict(), state.state_dict()),
        stranger=outcome(lambda: again.load_state_dict(loaded["hook"] | {"rank": 7})),
        other=outcome(lambda: again.load_state_dict({"residuals": {}})),
        method=outcome(lambda: again.load_state_dict(loaded["hook"] | {"method": "TopK"})),
        nothing=outcome(lambda: again.load_state_dict(None)),
    )
    for s in (state, half, again):
        s.close()
    return found


def ended():
    """Threads after close(), after the last reference is gone, and after a shape that does not fit."""
    found = {}
    ddp, state = hooked(CORE["onebit"], Given((3,)))
    step(ddp, torch.ones(3))
    during = [t.name for t in threading.enumerate() if t.name == "ddplab-hook"]
    saved = state.state_dict()
    state.close()
    state.close()
    found["closed"] = len(during), sum(t.name == "ddplab-hook" for t in threading.enumerate())
    ddp, state = hooked(CORE["onebit"], Given((3,)))
    step(ddp, torch.ones(3))
    gone = weakref.ref(state)
    del ddp, state
    gc.collect()
    found["collected"] = gone() is None, sum(t.name == "ddplab-hook" for t in threading.enumerate())
    ddp, state = hooked(CORE["onebit"], Given((4,)))
    state.load_state_dict(saved)
    found["misfit"] = outcome(lambda: step(ddp, torch.ones(4)))
    return found


@pytest.fixture(scope="module")
def runs():
    def run():
        soaked = {
            (m, unused): soak(make, 6, seed=i, longest=0.004, find_unused_parameters=unused)
            for i, (m, make) in enumerate(CORE.items())
            for unused in (False, True)
        }
        return dict(resumed={m: resumed(m) for m in CORE}, ended=ended(), soaked=soaked)

    return launch(run, ranks=4, timeout=300)


@pytest.mark.parametrize("method", CORE)
def test_a_resumed_run_is_the_same_to_the_bit(runs, method):
    for found in (found["resumed"][method] for found in runs):
        assert found["trip"] and found["weights"] and found["state"]
        assert found["stranger"].startswith("ValueError: rank was 7 when this state was saved")
        assert found["other"].startswith("ValueError: this is no state of ")
        assert found["method"].endswith(", it is that of TopK")
        assert found["nothing"].endswith("it is no state_dict() of a hook, but NoneType")


def test_no_thread_is_left(runs):
    for found in (found["ended"] for found in runs):
        assert found["closed"] == (1, 0)
        assert found["collected"] == (True, 0)
        assert "has 3 elements, the parameter has 4" in found["misfit"]


@pytest.mark.parametrize("method", CORE)
@pytest.mark.parametrize("unused", [False, True])
def test_random_delays_neither_hang_nor_part_the_ranks(runs, method, unused):
    for same, buckets in (found["soaked"][method, unused] for found in runs):
        assert same and buckets >= 6


def test_a_rank_that_dies_in_a_step_is_the_one_that_is_named():
    def run():
        ddp, state = hooked(CORE["onebit"], Given((3,), (4,)))
        step(ddp, torch.ones(3), torch.ones(4))
        if dist.get_rank() == 1:
            os._exit(3)
        step(ddp, torch.ones(3), torch.ones(4))

    with pytest.raises(RankError) as caught:
        launch(run, ranks=2, timeout=300)
    assert caught.value.rank == 1


def test_the_lane_runs_tasks_in_order_and_ends():
    lane, seen = Lane("test-lane"), []
    for i in range(100):
        lane.submit(lambda i=i: seen.append(i))
    lane.drain()
    assert seen == list(range(100))
    lane.close()
    assert not any(t.name == "test-lane" for t in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        lane.submit(seen.clear)
    Lane().close()  # never started


def test_a_lane_that_is_dropped_in_its_own_thread_ends():
    lane, done = Lane("dropped-lane"), threading.Event()
    holder = [lane]
    lane.submit(lambda holder=holder: (holder.clear(), done.set()))
    thread = next(t for t in threading.enumerate() if t.name == "dropped-lane")
    del lane, holder
    assert done.wait(10)
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
