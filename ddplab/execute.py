"""A schedule, run for real: all-reduce over the point-to-point messages of `torch.distributed`.

Steps are synchronised within each rank: step s + 1 starts when the sends and receives of step s are over. That is
what `ddplab.cost.predict` assumes, so a measured time can be held against its prediction. Within a step, chunks
travel in segments and the sum of one segment hides behind the transfer of the next.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
import torch.distributed as dist

from ddplab._p2p import Combine, run_batched, run_posted, segment_elements
from ddplab._plan import rank_plan
from ddplab.schedule import Schedule, ring

_COMBINE: dict[str, Combine] = {
    "sum": torch.Tensor.add_,
    "mean": torch.Tensor.add_,
    "max": lambda ours, theirs: torch.maximum(ours, theirs, out=ours),
    "min": lambda ours, theirs: torch.minimum(ours, theirs, out=ours),
    "product": torch.Tensor.mul_,
}
REDUCE_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}
_FLOAT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_DTYPES = {  # what torch can combine, and what a mean makes sense for
    "sum": _FLOAT + _COMPLEX + _INTEGER,
    "mean": _FLOAT + _COMPLEX,
    "max": _FLOAT + _INTEGER,
    "min": _FLOAT + _INTEGER,
    "product": _FLOAT + _COMPLEX + _INTEGER,
}
_RECORD_BYTES = 256

_ring = lru_cache(maxsize=16)(ring)


def all_reduce(
    tensor: torch.Tensor,
    schedule: Schedule | None = None,
    op: str | dist.ReduceOp.RedOpType = "sum",
    group: dist.ProcessGroup | None = None,
    check: bool = True,
) -> torch.Tensor:
    """All-reduce `tensor` in place over `group`, along `schedule`; every rank of the group calls it.

    Afterwards the tensor holds the same bytes on every rank, if the schedule is right: a wrong schedule is run too,
    and gives the wrong sums that it says (`schedule.verify()` tells beforehand).

    Args:
        tensor: any shape, strided in any way (elements between the strides stay as they are), empty or scalar, on
            the CPU or on CUDA. One tensor that needs a gradient is fine: nothing is recorded for autograd.
        schedule: one for as many ranks as the group has; the default is `ring(n)`.
        op: "sum", "mean", "max", "min", "product", or torch's ReduceOp of that meaning.
            Integers wrap as torch's do (uint8: 200 + 200 = 144). For bool, sum and max are OR, product and min AND.
            A mean multiplies by 1/n *before* the sum, in the tensor's dtype, as DistributedDataParallel does: no
            fp16 sum overflows on the way. (torch's ReduceOp.AVG on gloo divides after it; the last bit may differ.)
        group: a process group; its own ranks 0 to n - 1 are the schedule's. Default: all ranks.
        check: first compare shape, dtype, op and schedule between the ranks, one small message each. Without it,
            ranks that disagree hang or get garbage, as with any collective.

    Returns:
        The tensor.

    Raises:
        TypeError: op and dtype do not go together (a mean of integers, the sum of fp8); before any communication.
        ValueError: a schedule for another number of ranks, a caller outside the group, an unknown op, a tensor
            whose elements share memory. With `check`, ranks that disagree: raised on every rank, listing them all.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "all_reduce runs inside ranks: call it in a function given to ddplab.launch, or under torchrun."
        )
    group = dist.group.WORLD if group is None else group
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"Rank {dist.get_rank()} is not in this group, so it has no part in its all_reduce.")
    schedule = _ring(n) if schedule is None else schedule
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a ddplab Schedule such as ddplab.ring({n}), not {type(schedule).__name__}.")
    if schedule.ranks != n:
        raise ValueError(f"Schedule {schedule.name} is for {schedule.ranks} ranks, but this group has {n}.")
    op = _operation(op)
    require_reducible(tensor, op)
    run = transport(tensor.device, group)
    if n == 1:
        return tensor
    if check:
        along = f"schedule {schedule.name} {_digest(schedule)}"
        require_same(tensor, op, along, group, tensor.device if run is run_batched else "cpu")
    if tensor.numel() == 0:
        return tensor
    with torch.no_grad():
        flat = flatten(tensor, host=run is run_posted)
        if op == "mean":
            flat.mul_(1.0 / n)
        segment = segment_elements(-(-flat.numel() // schedule.chunks), flat.element_size())
        run(flat, rank_plan(schedule, rank, flat.numel(), segment), _COMBINE[op], group)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
    return tensor


def _operation(op: str | dist.ReduceOp.RedOpType) -> str:
    name = op if isinstance(op, str) else next((name for known, name in REDUCE_OPS.items() if known == op), None)
    if name not in _COMBINE:
        raise ValueError(f"op must be one of {', '.join(_COMBINE)} (or torch's ReduceOp of that name), not {op!r}.")
    return name


def require_reducible(tensor: torch.Tensor, op: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"all_reduce takes a torch.Tensor, not {type(tensor).__name__}.")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise TypeError(f"all_reduce takes dense tensors with data, not {tensor.layout} on {tensor.device.type}.")
    if tensor.dtype not in _DTYPES[op]:
        names = ", ".join(_name(d) for d in _DTYPES[op])
        raise TypeError(f'all_reduce with op "{op}" does not take {_name(tensor.dtype)}; it takes {names}.')
    if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError("Elements of this tensor share memory (an expanded tensor); reduce tensor.clone() instead.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def transport(device: torch.device, group: dist.ProcessGroup):
    """How the group moves tensors of this device: gloo through host memory, anything else as NCCL does."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if device.type not in backends:
        raise ValueError(
            f"The tensor is on {device.type}, but this group's backends serve {', '.join(backends)}; "
            f"move the tensor, or use a group with gloo."
        )
    return run_posted if backends[device.type] == "gloo" else run_batched


def flatten(tensor: torch.Tensor, host: bool) -> torch.Tensor:
    """The elements in logical order, one-dimensional: the caller's own memory where it can be, else a copy."""
    tensor = tensor.detach()
    if host and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor).view(-1)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


@lru_cache(maxsize=64)
def _digest(schedule: Schedule) -> str:
    state = hashlib.blake2b(f"{schedule.ranks} {schedule.chunks}".encode(), digest_size=8)
    for column in (schedule.step, schedule.src, schedule.dst, schedule.chunk, schedule.reduce):
        state.update(column.tobytes())
    return state.hexdigest()


def require_same(
    tensor: torch.Tensor, op: str, along: str, group: dist.ProcessGroup, device: torch.device | str
) -> None:
    """Every rank tells the others what it is about to reduce, in a message on `device`; all raise where they differ."""
    what = [f"{tuple(tensor.shape)} {_name(tensor.dtype)}", f"op {op}", along]
    text = "\n".join(what)
    text = hashlib.blake2b(text.encode(), digest_size=8).hexdigest() + "\n" + text  # a long text is cut, its hash not
    record = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
    data = text.encode()[:_RECORD_BYTES]
    record[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    record = record.to(device)
    records = [torch.empty_like(record) for _ in range(dist.get_world_size(group))]
    dist.all_gather(records, record, group=group)
    texts = [bytes(r.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for r in records]
    if len(set(texts)) == 1:
        return
    fields = [(text.split("\n")[1:] + ["", "", ""])[:3] for text in texts]
    differing = [0] + [i for i in (1, 2) if len({f[i] for f in fields}) > 1]
    listed = "; ".join(
        f"rank {dist.get_global_rank(group, r)}: {', '.join(f[i] for i in differing)}" for r, f in enumerate(fields)
    )
    raise ValueError(f"The ranks do not agree on what to reduce: {listed}.")
