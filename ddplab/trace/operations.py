"""What communicated on one rank: each operation, when it ran, and what is known of its message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from ddplab.trace import kernels
from ddplab.trace.annotations import at_launch, communication
from ddplab.trace.breakdown import gloo
from ddplab.trace.columns import COMM, Message, RankTrace

KEY = ["collective", "group", "group_size", "dtype", "message_bytes"]


def operations(trace: RankTrace) -> pd.DataFrame:
    """Every communication kernel of one rank, or every operation that gloo ran where there is none, in time order.

    start_ns, end_ns, launch_ns (-1: unknown), name; collective ("unknown" if nothing tells it), group, group_size,
    dtype, message_bytes, ranks, seq (None where not told); source, where the message came from: "kernel" (its own
    arguments), "annotation" (the nccl:… that its launch stands in, or gloo's own), "name".
    """
    if len(trace.gpu) and (trace.gpu.kind == COMM).any():
        rows = communication(trace)
        marks, launch = at_launch(trace, rows), rows.launch_ns
        outer = np.full(len(rows), -1)
        outer[marks >= 0] = trace.marks.message[marks[marks >= 0]]
    else:
        rows = trace.marks.where(gloo(trace))
        outer, launch = np.full(len(rows), -1), np.full(len(rows), -1)
    known: dict[tuple[int, int], dict] = {}
    columns = []
    for pair in zip(rows.message.tolist(), outer.tolist(), strict=True):
        if pair not in known:
            known[pair] = _described(trace, *pair)
        columns.append(known[pair])
    table = {"start_ns": rows.start_ns, "end_ns": rows.end_ns, "launch_ns": launch}
    table["name"] = [trace.names[i] for i in rows.name.tolist()]
    for name in [*KEY, "ranks", "seq", "source"]:
        table[name] = np.fromiter((column[name] for column in columns), object, len(columns))
    return pd.DataFrame(table)


def _described(trace: RankTrace, own: int, outer: int) -> dict:
    """`own`: the operation's message, `outer`: that of the annotation it was launched in; -1 where there is none."""
    message, source = trace.messages[own] if own >= 0 else Message(), "kernel"
    if message.in_elements is None and outer >= 0:
        around, source = trace.messages[outer], "annotation"
        told = {name: getattr(message, name) for name in ("group", "group_size", "ranks", "seq")}
        told["collective"] = around.collective or message.collective
        message = replace(around, **{name: value for name, value in told.items() if value is not None})
    elif message.in_elements is None:
        source = "name"
    elif message.out_elements is None:  # only an annotation's shapes lack it
        source = "annotation"
    group_size = message.group_size
    if group_size is None and message.in_elements is not None:
        group_size = trace.world_size  # without a process group's name: the whole job
    return {
        "collective": message.collective or "unknown",
        "group": message.group,
        "group_size": group_size,
        "dtype": message.dtype,
        "message_bytes": _message_bytes(message, group_size),
        "ranks": message.ranks,
        "seq": message.seq,
        "source": source,
    }


def _message_bytes(message: Message, group_size: int | None) -> int | None:
    """The message as nccl-tests counts it: the larger of what a rank gives and what it gets."""
    size = kernels.element_bytes(message.dtype)
    elements = message.in_elements
    if message.collective == "all_gather":
        if message.out_elements:
            elements = message.out_elements
        elif elements is not None:
            elements = elements * group_size if group_size else None
    elif not elements and message.out_elements:
        elements = message.out_elements  # the receiving side of a broadcast, scatter or recv
    return elements * size if elements is not None and size is not None else None
