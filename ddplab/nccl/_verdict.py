"""From the rows of a log to sentences: what is wrong first, then what NCCL did, then what the log does not tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddplab.nccl.log import NcclLog

_MOST = 8


def verdict(log: NcclLog) -> list[str]:
    """See `NcclLog.verdict`."""
    return [*_warnings(log), *_environment(log), *_ranks(log), *_edges(log), *_collectives(log)]


def _warnings(log: NcclLog) -> list[str]:
    said = Counter(
        f"WARNING of {row['host']} pid {row['pid']}{f' at {place}' if (place := row['place']) else ''}: {row['text']}"
        for row in log.rows["warnings"]
    )
    lines = [line if n == 1 else f"{line} ({n} times)" for line, n in said.items()]
    return lines[:_MOST] + ([f"and {len(lines) - _MOST} other warnings"] if len(lines) > _MOST else [])


def _environment(log: NcclLog) -> list[str]:
    rejected = {(row["variable"], row["value"]): row["used"] for row in log.rows["rejected"]}
    lines = [f"{variable}={value} was not accepted: {used}" for (variable, value), used in rejected.items()]
    values: dict[str, dict[str, set]] = {}
    for row in log.rows["env"]:
        values.setdefault(row["variable"], {}).setdefault(row["value"], set()).add((row["host"], row["pid"]))
    for variable, told in values.items():
        if len(told) > 1:
            lines.append(f"{variable} differs between processes: {_few(told)}")
        else:
            ((value, by),) = told.items()
            lines.append(f"{variable} set to {value} (said by {len(by)} of {_n(len(log.processes), 'process')})")
    return lines


def _ranks(log: NcclLog) -> list[str]:
    version = "NCCL " + ".".join(map(str, log.version)) if log.version else "NCCL of unknown version"
    speakers = f"{_n(len(log.processes), 'process')} on {_n(len({host for host, _ in log.processes}), 'host')}"
    if log.ranks is None:
        return [f"{version}: {speakers}; ranks unknown (needs NCCL_DEBUG_SUBSYS=INIT)"]
    lines = [f"{version}: {_n(log.ranks, 'rank')}, {speakers}"]
    seen = {comm["rank"] for comm in log.world}
    missing = [rank for rank in range(min(log.ranks, 100_000)) if rank not in seen]
    if missing:
        lines.append(f"{len(missing)} of {_n(log.ranks, 'rank')} say nothing here: {_few(missing)}")
    states = {comm["rank"]: comm["state"] for comm in log.world}
    begun = [rank for rank, state in states.items() if state == "START"]
    if begun and "COMPLETE" in states.values():
        lines.append(f"initialisation began and did not end on ranks {_few(begun)}")
    elif begun:
        lines.append("initialisation began and did not end on any rank that speaks here")
    if groups := len(log.rows["comms"]) - len(log.world):
        lines.append(f"smaller communicators too ({_n(groups, 'entry')})")
    return lines


def _edges(log: NcclLog) -> list[str]:
    lines = [f"network: {', '.join(log.networks)}"] if log.networks else []
    pairs = {(edge["src"], edge["dst"]): (edge["kind"], edge["transport"]) for edge in log.world_edges}
    if not pairs:
        return [*lines, f"transports {log.transports}"]
    for kind, count in Counter(kind for kind, _ in pairs.values()).most_common():
        ways = Counter(transport for k, transport in pairs.values() if k == kind)
        common = ", ".join(way for way, _ in ways.most_common(4))
        lines.append(f"{count} of {_n(len(pairs), 'edge')} over {kind}: {common}")
    host = {comm["rank"]: comm["host"] for comm in log.world}
    inside = [pair for pair in pairs if pair[0] in host and host.get(pair[0]) == host.get(pair[1])]
    for kind, why in (
        ("SHM", "through host memory: no peer-to-peer access between these GPUs, or NCCL_P2P_DISABLE is set"),
        ("NET", "through the network although they share a host: neither peer-to-peer nor shared memory"),
    ):
        among = pairs if kind == "SHM" else inside  # shared memory never leaves a host
        if chosen := [pair for pair in among if pairs[pair][0] == kind]:
            lines.append(f"{_few([f'{a}->{b}' for a, b in chosen])} go {why}")
    nets = [transport for kind, transport in pairs.values() if kind == "NET"]
    if any(transport.startswith("NET/Socket") for transport in nets):
        lines.append("NET/Socket is TCP: no RDMA, so each byte passes through the CPU and host memory")
    elif nets and not any("GDRDMA" in transport for transport in nets):
        lines.append("the network does not use GPUDirect RDMA: data goes through host memory")
    return lines


def _collectives(log: NcclLog) -> list[str]:
    from ddplab.nccl.log import NEEDS_CALLS, NEEDS_CHOICES

    counts = list(dict.fromkeys(row["coll"] for row in log.rows["channels"]))
    lines = [f"channels: {_few(counts)}"] if counts else []
    for names, rows in _groups(log.rows["calls"], ("op", "datatype")).items():
        sizes = [row["nbytes"] for row in rows if row["nbytes"] is not None]
        span = f", {_span(sizes)}" if sizes else ""
        lines.append(f"{' of '.join(names)}: {_n(len(rows), 'call')}{span}")
    if not log.rows["calls"]:
        lines.append(f"collectives {NEEDS_CALLS}")
    for names, rows in _groups(log.rows["choices"], ("algorithm", "protocol")).items():
        lines.append(f"{'/'.join(names)} chosen for {_span([row['nbytes'] for row in rows])}")
    if not log.rows["choices"]:
        lines.append(f"algorithm and protocol {NEEDS_CHOICES}")
    return lines


def _groups(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[tuple, list[dict[str, Any]]]:
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _span(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low} bytes" if low == high else f"{low} to {high} bytes"


def _n(count: int, what: str) -> str:
    if count == 1:
        return f"{count} {what}"
    return f"{count} {what[:-1]}ies" if what.endswith("y") else f"{count} {what}{'es' if what.endswith('s') else 's'}"


def _few(items: Iterable) -> str:
    items = list(items)
    return ", ".join(map(str, items[:_MOST])) + (f" and {len(items) - _MOST} more" if len(items) > _MOST else "")
