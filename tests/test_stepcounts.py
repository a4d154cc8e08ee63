"""Counting a step: against closed forms of torch's DDP, its own sequence numbers, and collectives made by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddplab.launch import launch
from ddplab.stepcounts import StepCounts

WIDTH = 512  # a layer of 512 x 512 float32 is 1 MiB
LAYER = WIDTH * WIDTH * 4


def by_hand():
    with StepCounts() as counts:
        dist.all_reduce(torch.ones(3, dtype=torch.float64))
        dist.broadcast(torch.ones(5, dtype=torch.int32), 0)
        dist.all_gather([torch.empty(2) for _ in range(2)], torch.ones(2))
    dist.all_reduce(torch.ones(1))  # outside
    return [(c.name, c.nbytes, c.dtype) for c in counts.collectives], counts.nbytes


def of_ddp(**options):
    """Per iteration: collectives, whether torch's own counter agrees, gradient memory, copies. Nothing is hooked."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=2, **options)
    number, found = dist.group.WORLD._get_sequence_number_for_group, []
    for _ in range(3):
        ddp.zero_grad()
        before = number()
        with StepCounts() as counts:
            ddp(torch.ones(2, WIDTH)).sum().backward()
        agrees = number() - before == len(counts.collectives)
        found.append(([(c.name, c.nbytes) for c in counts.collectives], agrees, counts.gradient_bytes(ddp)))
    return found, dict(counts.copies)


def everything():
    found = {"hand": by_hand(), "plain": of_ddp(), "view": of_ddp(gradient_as_bucket_view=True)}
    with pytest.raises(KeyError), StepCounts() as counts:
        raise KeyError
    dist.all_reduce(torch.ones(1))
    found["after an error"] = len(counts.collectives)
    return found


@pytest.fixture(scope="module")
def ranks():
    return launch(everything, ranks=2, device="cpu")


def test_collectives_by_hand(ranks):
    for found in ranks:
        made, total = found["hand"]
        assert made[:2] == [("allreduce", 24, "float64"), ("broadcast", 20, "int32")]
        assert made[2][0] == "allgather" and len(made) == 3 and total == sum(n for _, n, _ in made)
        assert found["after an error"] == 0


def test_the_buckets_of_ddp(ranks):
    for found in ranks:
        (first, _, last), _ = found["plain"]
        assert first[0] == [("allreduce", 4 * LAYER)]  # one bucket until they are rebuilt
        assert last[0] == [("allreduce", 2 * LAYER)] * 2
        assert all(agrees for steps, _ in (found["plain"], found["view"]) for _, agrees, _ in steps)


def test_memory_and_copies_of_gradients(ranks):
    for found in ranks:
        (_, _, (_, _, twice)), plain = found["plain"]
        (_, _, (_, _, once)), view = found["view"]
        assert (twice, once) == (8 * LAYER, 4 * LAYER)  # gradients and buckets; buckets alone
        assert plain == {"aten.mul.out": 4, "aten.copy_.default": 4}  # in and out
        assert view == {"aten.mul.out": 4}  # in: zero_grad() had set the gradients to None
