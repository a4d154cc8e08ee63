"""Check a reader's DDP: run it on real ranks beside one process on the whole batch, and name the first defect.

The models are tiny and float64, so a wrong gradient is no matter of rounding. Every rank builds both sides by itself,
from seeds: what it holds after a step must equal what one process holds that saw the batches of all ranks.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab._defects import compare, order, unequal_end, unequal_start, wrong_gradient, wrong_traffic
from ddplab._reduces import Call, Reduces
from ddplab._tiny import Momentum, add, batch_of, build, gradients, loss_of, state_of, tied, tiny, trained_parameters
from ddplab.checks import CheckError
from ddplab.launch import RankError, launch

STEPS = 20
_LIBRARY = (f"{os.sep}site-packages{os.sep}", os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen")


class Trouble(RuntimeError):
    """The reader's code raised; the message says during what, and in which line."""


class _Planned(Exception):
    """What the checker itself raises inside `no_sync()`."""


@dataclass
class _Report:
    finding: str | None = None
    calls: list[Call] = field(default_factory=list)  # the all-reduces of step 1
    accumulates: bool = False  # is there a no_sync to check?


def check_ddp(factory: Callable[[nn.Module], Any], ranks: int = 2, timeout: float = 30) -> None:
    """Check a DDP wrapper, such as `torch.nn.parallel.DistributedDataParallel` or one that you wrote.

    `factory(module)` runs on every rank and returns something to call like the module. Each rank then does, as in a
    training loop, `loss(ddp(x)).backward()`, `ddp.finish()` if there is a `finish`, and `optimizer.step()`.

    Compared with one process on the whole batch, in float64 and to 1e-10: parameters and buffers at the start (rank 0's
    everywhere), gradients and parameters in 20 steps, with a frozen layer and with tied weights. Where there is
    `no_sync()`: that it keeps gradients local, that the next backward reduces the accumulated sum, and that it
    restores its flag, also when its body raises. Last, from the all-reduces that go through `torch.distributed`:
    that buckets which leave during backward do not all wait for its end.

    Prints what was right. Raises CheckError, one sentence that names the defect, with rank and parameter where it has
    them; ValueError with fewer than 2 ranks.
    """
    if ranks < 2:
        raise ValueError(f"the checker needs at least 2 ranks, got {ranks}")
    if not callable(factory):
        raise TypeError(f"check_ddp takes a class or a function that wraps a module, not {factory!r}")
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        report = launch(_examine, factory, ranks=ranks, timeout=timeout, device="cpu")[0]
    except RankError as error:
        first = str(error).partition("\n")[0].replace("Trouble: ", "")
        if "NotImplementedError: " in first:  # a blank exercise
            raise CheckError(first.partition("NotImplementedError: ")[2]) from None
        if "no answer within" in first:
            first += ". Some rank waits in an all-reduce that another never starts: all must start the same ones"
        raise CheckError(f"{name}: {first}") from error
    if report.finding:
        raise CheckError(f"{name}: {report.finding}")
    print(f"{name}, {ranks} ranks: {STEPS} steps equal one process on the whole batch, tied weights too.")
    if report.accumulates:
        print("no_sync() keeps gradients local, then reduces their sum, and restores its flag.")
    if report.calls:
        ready = [call.ready for call in report.calls]
        early = sum(r < max(ready) for r in ready)
        print(f"All-reduces a step: {len(report.calls)}, of which {early} left before the last gradient was ready.")


# -- in a rank --------------------------------------------------------------------------------------------------------


def _examine(factory: Callable) -> _Report:
    """All checks in turn. The ranks agree after each on whether to go on: none may enter a collective alone."""
    report, own_group = _Report(), dist.new_group()  # a reader's stray collective must not meet one of ours
    for finding in _findings(factory, report):
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, finding, group=own_group)
        report.finding = next(filter(None, everyone), None)
        if report.finding:
            break
    return report


def _findings(factory: Callable, report: _Report) -> Iterator[str | None]:
    yield from _training(factory, tiny, report.calls)
    yield from _training(factory, tied, [])
    yield from _accumulation(factory, report)
    yield from _restoring(factory)
    yield order(report.calls)


def _training(factory: Callable, make: Callable, first_calls: list[Call]) -> Iterator[str | None]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = build(make, rank), build(make, 0)
    own = state_of(model)
    with Reduces(model) as reduces:
        ddp = _wrap(factory, model)
        yield unequal_start(model, state_of(whole), own)
        mine, reference = (Momentum(trained_parameters(m)) for m in (model, whole))
        finding = None
        for step in range(1, STEPS + 1):
            local, mean = gradients(whole, [rank], step), gradients(whole, range(ranks), step)
            before = state_of(model)
            model.zero_grad()
            with reduces.step(local, mean, ranks):
                _step(ddp, batch_of(rank, step), f"step {step}", reduces.backward)
            finding = finding or wrong_traffic(model, before, reduces.calls, step)
            finding = finding or wrong_gradient(model, local, mean, step)
            if step == 1:
                first_calls += reduces.calls
                yield finding
            mine.step({name: p.grad for name, p in trained_parameters(model).items()})
            reference.step(mean)
        yield finding or unequal_end(model, state_of(whole))


def _accumulation(factory: Callable, report: _Report) -> Iterator[str | None]:
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    model, whole = build(tiny, rank), build(tiny, 0)
    ddp = _wrap(factory, model)
    report.accumulates = hasattr(ddp, "no_sync")
    if not report.accumulates:
        return
    local, mean = ([gradients(whole, who, step) for step in (1, 2)] for who in ([rank], everybody))
    with _reading("in no_sync()"), ddp.no_sync():
        with ddp.no_sync():  # leaving the inner one must not switch the outer one off
            pass
        _backward(ddp, batch_of(rank, 1))
    yield compare(
        model,
        local[0],
        (mean[0], "already holds the mean over the ranks: no_sync() does not keep it local (or not, once nested)"),
        when="after a backward in no_sync()",
    )
    _step(ddp, batch_of(rank, 2), "the backward after no_sync()")
    yield compare(
        model,
        add(*mean),
        (add(local[0], mean[1]), "only the last micro-batch was reduced: reduce the accumulated p.grad"),
        (mean[1], "the first micro-batch is lost: only the last one was reduced"),
        (add(*local), "nothing was reduced: no_sync() must switch synchronisation on again when it ends"),
        when="after two micro-batches",
    )


def _restoring(factory: Callable) -> Iterator[str | None]:
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    model, whole = build(tiny, rank), build(tiny, 0)
    ddp = _wrap(factory, model)
    if not hasattr(ddp, "no_sync"):
        return
    try:
        with _reading("in no_sync()"), ddp.no_sync():
            raise _Planned
    except _Planned:
        pass
    else:
        yield "no_sync() swallows an error raised in its body."
    _step(ddp, batch_of(rank, 1), "the step after an error in no_sync()")
    says = "not reduced: the flag was not restored when the body of no_sync() raised; restore it in a `finally`"
    local = gradients(whole, [rank], 1)
    yield compare(model, gradients(whole, everybody, 1), (local, says), when="after an error in no_sync()")


# -- the reader's code ------------------------------------------------------------------------------------------------


@contextmanager
def _reading(doing: str) -> Iterator[None]:
    """An error of the reader's ends this rank at once, so that the others fail instead of waiting."""
    try:
        yield
    except _Planned:
        raise
    except Exception as error:
        frames = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
        mine = [(code, line) for code, line in frames if not any(part in code.co_filename for part in _LIBRARY)]
        place = f"line {mine[-1][1] - mine[-1][0].co_firstlineno + 1} of {mine[-1][0].co_name}: " if mine else ""
        raise Trouble(f"{doing}: {place}{type(error).__name__}: {error}".partition("\n")[0]) from error


def _wrap(factory: Callable, model: nn.Module) -> Any:
    with _reading("while wrapping the model"):
        return factory(model)


def _step(ddp: Any, x: torch.Tensor, doing: str, watched: Callable | None = None) -> None:
    with _reading(f"in {doing}"):
        _backward(ddp, x, watched)
        getattr(ddp, "finish", lambda: None)()


def _backward(ddp: Any, x: torch.Tensor, watched: Callable | None = None) -> None:
    loss = loss_of(ddp(x))
    if watched is None:
        loss.backward()
        return
    with watched():
        loss.backward()
