"""The checker of DDPs: right ones pass, and each defect is named, with rank and parameter where it has them.

The lab's own classes are tried, as they stand there: four solutions that are right, seven suspects that are not.
"""

from __future__ import annotations

import functools
import re
import sys
from contextlib import contextmanager

import cloudpickle
import nbformat
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddplab.checks import CheckError
from ddplab.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from ddplab.ddp_checks import check_ddp

# The ranks get the classes below by value: importing this file there, with pytest, would take longer than the checks.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@functools.cache
def lab() -> dict:
    """What the lab's cells with imports and classes define; from `__main__` they travel to ranks as a notebook's do."""
    names: dict = {"__name__": "__main__"}
    for cell in nbformat.read(ROOT / "labs/04_ddp_four_steps.ipynb", 4).cells:
        if cell.cell_type == "code" and re.match("class |from ", cell.source):
            exec(cell.source, names)
    return names


SENTENCES = {
    "A": "SuspectA: rank 1, parameter 'first.weight': still its own start value after wrapping: broadcast parameters",
    "B": "SuspectB: rank 0, parameter 'first.weight', in step 1: the sum over the ranks instead of the mean",
    "C": "SuspectC: rank 0, parameter 'embed.weight' (tied to 'out.weight'), step 1: reduced twice in one step",
    "D": "SuspectD: rank 0, parameter 'first.weight', after an error in no_sync(): not reduced: the flag was not",
    "E": "SuspectE: rank 0, parameter 'first.weight', step 1: all-reduces the parameter instead of its gradient",
    "F": "SuspectF: rank 0, parameter 'first.weight', after two micro-batches: only the last micro-batch was reduced",
    "G": "SuspectG: right results, but nothing overlaps: the first of 6 all-reduces ('first.weight')",
}


@pytest.mark.parametrize("letter", SENTENCES)
def test_every_suspect_is_named(letter):
    assert defect(lab()[f"Suspect{letter}"]).startswith(SENTENCES[letter])


@pytest.mark.parametrize(
    ("name", "count", "early"),
    [("NaiveDDP", 6, 0), ("FlatDDP", 1, 0), ("OverlappedDDP", 6, 5), ("BucketedDDP", 3, 2)],
)
def test_the_four_steps_of_the_lab_pass(name, count, early, capsys):
    """The counts follow from the model: six trained tensors; 24+120+40, 240 and 48+192 bytes in buckets of 160."""
    check_ddp(lab()[name])
    said = capsys.readouterr().out
    assert f"{name}, 2 ranks: 20 steps equal one process" in said
    assert f"All-reduces a step: {count}, of which {early} left before" in said
    assert ("restores its flag" in said) == (name in ("OverlappedDDP", "BucketedDDP"))


def small_buckets(module):
    return BucketedDDP(module, bucket_cap_mb=160 / 2**20)


@pytest.mark.parametrize("wrapper", [NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP, small_buckets])
def test_the_packages_own_pass(wrapper, capsys):
    check_ddp(wrapper)
    assert "restores its flag" in capsys.readouterr().out


def test_torchs_passes_on_three_ranks(capsys):
    check_ddp(DistributedDataParallel, ranks=3)
    said = capsys.readouterr().out
    assert "3 ranks: 20 steps equal one process" in said and "restores its flag" in said
    assert "All-reduces" not in said, "torch makes them in C++: nothing was counted, so nothing is said"


def defect(wrapper, **options) -> str:
    with pytest.raises(CheckError) as error:
        check_ddp(wrapper, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


class Right(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.start()

    def start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, x):
        return self.module(x)

    def finish(self):
        for p in self.params:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)


class ForgetsBuffers(Right):
    def start(self):
        for p in self.module.parameters():
            dist.broadcast(p.detach(), src=0)


class FromRankOne(Right):
    def start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), src=1)


class DividesTwice(Right):
    def finish(self):
        super().finish()
        for p in self.params:
            p.grad /= dist.get_world_size()


class ReducesNothing(Right):
    def finish(self):
        pass


class TiedTwiceButRight(Right):
    """Averaging again changes nothing: only the traffic tells."""

    def finish(self):
        for _, p in self.module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


class MovesParameters(Right):
    """No collective carries a parameter, and yet it changes."""

    def finish(self):
        super().finish()
        with torch.no_grad():
            self.params[0] *= 1.5


class OnlyOnce(Right):
    """Right in step 1, idle from then on: a counter that nobody reset."""

    done = False

    def finish(self):
        if not self.done:
            super().finish()
        self.done = True


class LeavesInnerOn(Right):
    """Hooks reduce at once; leaving a nested no_sync switches them on again."""

    def __init__(self, module):
        super().__init__(module)
        self.sync = True
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        if self.sync:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)

    def finish(self):
        pass

    @contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True


class NeverBackOn(LeavesInnerOn):
    @contextmanager
    def no_sync(self):
        self.sync = False
        yield


class Raises(Right):
    def finish(self):
        if dist.get_rank() == 1:
            raise KeyError("first")
        super().finish()


@pytest.mark.parametrize(
    ("wrapper", "sentence"),
    [
        (ForgetsBuffers, "rank 1, buffer 'norm.running_mean': still its own start value"),
        (FromRankOne, "rank 0, parameter 'first.weight': neither its own start value nor rank 0's"),
        (DividesTwice, "rank 0, parameter 'first.weight', in step 1: the mean divided by 2 once more"),
        (ReducesNothing, "rank 0, parameter 'first.weight', in step 1: nobody reduced it"),
        (TiedTwiceButRight, "rank 0, parameter 'embed.weight' (tied to 'out.weight'), step 1: reduced twice"),
        (MovesParameters, "rank 0, parameter 'first.weight', step 1: the parameter changed before optimizer.step()"),
        (OnlyOnce, "rank 0, parameter 'first.weight', in step 2: nobody reduced it"),
        (LeavesInnerOn, "rank 0, parameter 'first.weight', after a backward in no_sync(): already holds the mean"),
        (NeverBackOn, "rank 0, parameter 'first.weight', after two micro-batches: nothing was reduced"),
        (Raises, "rank 1: in step 1: line 3 of finish: KeyError: 'first'"),
    ],
)
def test_other_mistakes_are_named_too(wrapper, sentence):
    assert defect(wrapper).startswith(f"{wrapper.__name__}: {sentence}")


def test_a_rank_that_waits_for_nobody_ends():
    class Alone(Right):
        def finish(self):
            super().finish()
            if dist.get_rank() == 0:
                dist.all_reduce(torch.zeros(1))

    assert "must start the same ones" in defect(Alone, timeout=3)


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        check_ddp(NaiveDDP, ranks=1)
    with pytest.raises(TypeError, match="wraps a module"):
        check_ddp(nn.Linear(1, 1).weight)
