"""What the variables do together, and what they cannot do on a given transport.

Each rule is a small function over the whole environment; `_not_in_force` looks at the one fact that decides most:
what carries the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddplab.nccl.finding import Finding
from ddplab.nccl.knobs import SCOPES, knobs
from ddplab.nccl.reading import FUNCTIONS, number, parse_list

# Scopes of variables that are in force on each transport, besides those that always are.
_INSIDE = {"p2p", "shm", "nvls", "mnnvl"}
_BETWEEN = {"net", "socket", "ib", "collnet", "gin"}
TRANSPORTS = {
    "nvlink": {"p2p", "nvls", "mnnvl"},
    "p2p": {"p2p", "nvls", "mnnvl"},
    "pcie": {"p2p"},
    "shm": {"shm"},
    "socket": {"net", "socket"},
    "ib": {"net", "ib", "collnet", "gin"},
    "net": {"net", "collnet", "gin"},  # a plugin's network
}
_CHOOSE = {f"NCCL_{what}_{how}" for what in ("P2P", "SHM", "IB") for how in ("DISABLE", "LEVEL")} | {
    "NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_NET", "NCCL_NET_PLUGIN"
}  # fmt: skip
# Switches that close a fast path, each with the value that closes it and what is lost.
_CLOSED = {
    "NCCL_P2P_DISABLE": (1, "closes NVLink and PCIe between the GPUs of a host: their data goes through host memory"),
    "NCCL_SHM_DISABLE": (1, "closes shared memory: GPUs of a host that cannot reach each other go over the network"),
    "NCCL_NVLS_ENABLE": (0, "closes NVLink SHARP: on Hopper and later the switches no longer add"),
    "NCCL_CUMEM_ENABLE": (0, "closes NVLink SHARP, symmetric windows and NVLink across hosts: all need cuMem"),
}
# Algorithms that a function has; PAT is for all-gather and reduce-scatter alone (tuning.cc, ncclTopoTuneModel).
_HAS = {
    "Broadcast": {"Ring"},
    "Reduce": {"Ring"},
    "AllGather": {"Ring", "NVLS", "CollNetDirect", "PAT"},
    "ReduceScatter": {"Ring", "NVLS", "CollNetDirect", "PAT"},
    "AllReduce": {"Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"},
}


def transports(names: str) -> set[str]:
    """Transports from "nvlink", "nvlink+ib" or "shm,socket". Raises ValueError with those that exist."""
    found = {name.strip().lower() for name in names.replace("+", ",").split(",")}
    if unknown := sorted(found - set(TRANSPORTS)):
        raise ValueError(f"unknown transport {unknown[0]!r}; choose from {', '.join(TRANSPORTS)}, joined by +")
    return found


def _not_in_force(environ: Mapping[str, str], carriers: set[str]) -> Iterator[Finding]:
    """Variables that are not in force when these transports carry the data."""
    in_force = set().union(*(TRANSPORTS[name] for name in carriers))
    by = " and ".join(sorted(carriers)) + (" carry" if len(carriers) > 1 else " carries")
    for name, value in environ.items():
        knob = knobs().get(name)
        if knob is None or not value or knob.touch == "gone" or knob.scope in in_force:
            continue
        decides = name in _CHOOSE  # then it may be why these transports are used, which is an effect
        far = bool(in_force & _BETWEEN)
        if knob.scope in _BETWEEN and not (decides and far) or knob.scope in _INSIDE and not decides:
            problem = f"no effect: it belongs to {SCOPES[knob.scope]}, and {by} the data"
            yield Finding(name, value, problem, "unset it", "no effect")


def interplay(environ: Mapping[str, str], carriers: set[str] | None = None) -> Iterator[Finding]:
    """Findings about legal values that are harmful, alone or together, or without effect.

    carriers: the transports in use, or None where they are not known.
    """
    for rule in (_algorithms, _protocols, _switched_off, _disabled, _pairs, _logging):
        yield from rule(environ)
    if carriers is None or "socket" in carriers:
        yield from _sockets(environ)
    if carriers is None:
        yield from _socket_only(environ)
    else:
        yield from _not_in_force(environ, carriers)


def _switched_off(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What a fault search leaves behind: fast paths that somebody closed, and nobody opened again."""
    for name, (closed, problem) in _CLOSED.items():
        if number(environ.get(name, "")) == closed:
            yield Finding(name, environ[name], problem, "unset it once the fault that asked for it is mended", "hurts")


def _lists(environ: Mapping[str, str], name: str) -> dict[str, set[str]] | None:
    try:
        return parse_list(environ[name], knobs()[name].words) if environ.get(name) else None
    except (LookupError, ValueError):  # said already, as an illegal value
        return None


def _algorithms(environ: Mapping[str, str]) -> Iterator[Finding]:
    allowed = _lists(environ, "NCCL_ALGO")
    if allowed is None:
        return
    value = environ["NCCL_ALGO"]
    without = [name for name in FUNCTIONS if not allowed[name] & _HAS[name]]
    left = sorted(allowed["AllReduce"] & _HAS["AllReduce"])
    if without:
        problem = f"leaves {' and '.join(without)} without an algorithm, and from NCCL 2.24 on that is an error"
        yield Finding("NCCL_ALGO", value, problem, "name only all-reduce, as in allreduce:tree", "hurts")
    elif len(left) == 1:
        lost = "Tree between hosts and NVLS on Hopper and later" if left == ["Ring"] else "the better ones by size"
        problem = f"leaves all-reduce only {left[0]}, so NCCL cannot choose: it loses {lost}"
        yield Finding("NCCL_ALGO", value, problem, "unset it: NCCL's own model takes Ring where Ring is best", "hurts")


def _protocols(environ: Mapping[str, str]) -> Iterator[Finding]:
    allowed = _lists(environ, "NCCL_PROTO")
    if allowed is None:
        return
    value, left = environ["NCCL_PROTO"], allowed["AllReduce"]
    if not left:
        yield Finding("NCCL_PROTO", value, "leaves all-reduce without a protocol", "unset it", "hurts")
    elif left == {"LL"}:
        problem = (
            "LL is a latency protocol: half of what it sends are flags, and DDP's large buckets lose by it "
            "(on 8 A100s NCCL's own model gives LL 88 GB/s, Simple 240)"
        )
        yield Finding("NCCL_PROTO", value, problem, "unset it: NCCL takes LL for small messages by itself", "hurts")
    elif "LL128" in left and "NCCL_PROTO" in environ and not _default_keeps(value):
        problem = "allows LL128 without NCCL's check that the machine supports it; where it does not, data is corrupted"
        yield Finding("NCCL_PROTO", value, problem, "write ^LL128 or Simple or LL,Simple, or unset it", "hurts")
    if "Simple" not in left and number(environ.get("NCCL_BUFFSIZE", "")) is not None:
        problem = f"no effect on all-reduce: only Simple has this buffer, and NCCL_PROTO={value} excludes Simple"
        yield Finding("NCCL_BUFFSIZE", environ["NCCL_BUFFSIZE"], problem, "unset both", "no effect")


def _default_keeps(value: str) -> bool:
    """Does this NCCL_PROTO leave all-reduce as it was? Only an entry for it, or one for all, sets it."""
    return all(":" in entry and not entry.lower().startswith("allreduce:") for entry in value.split(";") if entry)


def _sockets(environ: Mapping[str, str]) -> Iterator[Finding]:
    threads, each = (number(environ.get(name, "")) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
    if each is not None and threads is None:
        problem = (
            f"no effect except on AWS and GCP: there are threads x {each} sockets, and without "
            "NCCL_SOCKET_NTHREADS there are 0 threads"
        )
        remedy = "unset it, or on TCP set NCCL_SOCKET_NTHREADS too"
        yield Finding("NCCL_NSOCKS_PERTHREAD", environ["NCCL_NSOCKS_PERTHREAD"], problem, remedy, "no effect")
    if each is not None and threads is not None and 1 <= threads <= 16 and threads * each > 64:
        problem = f"becomes {64 // threads}: {threads} threads x {each} sockets are more than 64"
        remedy = f"choose {64 // threads} or less"
        yield Finding("NCCL_NSOCKS_PERTHREAD", environ["NCCL_NSOCKS_PERTHREAD"], problem, remedy)


def _socket_only(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that tune TCP, where it is not known whether TCP carries anything."""
    threads, each = (number(environ.get(name, "")) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
    for name in ("NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS"):
        if number(environ.get(name, "")) is None or (threads is None and name == "NCCL_NSOCKS_PERTHREAD"):
            continue
        problem = "only TCP sockets read it: no effect over NVLink, PCIe, shared memory, InfiniBand or RoCE"
        if threads and each and threads * each < 16:
            problem += f"; on AWS it makes {threads * each} sockets of the default 16"
        remedy = "unset it, unless the log says that NET/Socket carries the data"
        yield Finding(name, environ[name], problem, remedy, "no effect")


def _disabled(environ: Mapping[str, str]) -> Iterator[Finding]:
    off = number(environ.get("NCCL_IB_DISABLE", ""))
    net = environ.get("NCCL_NET", "").lower()
    if off:
        problem = "forces TCP where InfiniBand or RoCE works; where there is none, NCCL takes TCP without being told"
        remedy = "unset it, unless a broken RoCE port must be avoided"
        yield Finding("NCCL_IB_DISABLE", environ["NCCL_IB_DISABLE"], problem, remedy, "hurts")
    for name, value in environ.items():
        knob = knobs().get(name)
        if knob is None or not value or name == "NCCL_IB_DISABLE":
            continue
        why = ""
        if knob.scope == "ib":
            why = "NCCL_IB_DISABLE switches InfiniBand off" if off else f"NCCL_NET={net}" if net == "socket" else ""
        elif knob.scope == "socket":
            why = f"NCCL_NET={net}" if net == "ib" else ""
        elif name == "NCCL_P2P_LEVEL" and number(environ.get("NCCL_P2P_DISABLE", "")) == 1:
            why = "NCCL_P2P_DISABLE comes first"
        if why and knob.touch != "gone":
            yield Finding(name, value, f"no effect: {why}", "unset one of the two", "no effect")


def _pairs(environ: Mapping[str, str]) -> Iterator[Finding]:
    least, most = (number(environ.get(f"NCCL_{side}_CTAS", "")) for side in ("MIN", "MAX"))
    if least is not None and most is not None and least > most > 0:
        problem = f"becomes {most}: it is above NCCL_MAX_CTAS"
        yield Finding("NCCL_MIN_CTAS", environ["NCCL_MIN_CTAS"], problem, f"choose {most} or less")
    if number(environ.get("NCCL_CUMEM_ENABLE", "")) == 0:
        for name in ("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_WIN_ENABLE"):
            if (number(environ.get(name, "")) or 0) > 0:
                problem = "cannot work: NCCL_CUMEM_ENABLE=0 takes away the memory that it needs"
                yield Finding(name, environ[name], problem, "unset NCCL_CUMEM_ENABLE", "no effect")
    if environ.get("NCCL_OOB_NET_IFNAME") and not number(environ.get("NCCL_OOB_NET_ENABLE", "")):
        problem = "no effect without NCCL_OOB_NET_ENABLE=1"
        yield Finding("NCCL_OOB_NET_IFNAME", environ["NCCL_OOB_NET_IFNAME"], problem, "set it too", "no effect")
    orders, mixes = (number(environ.get(f"NCCL_GRAPH_{name}", "")) for name in ("STREAM_ORDERING", "MIXING_SUPPORT"))
    if orders == 0 and mixes == 1:
        problem = "not supported together with NCCL_GRAPH_MIXING_SUPPORT=1"
        yield Finding("NCCL_GRAPH_STREAM_ORDERING", environ["NCCL_GRAPH_STREAM_ORDERING"], problem, "unset it", "hurts")


def _logging(environ: Mapping[str, str]) -> Iterator[Finding]:
    level, subsystems, file = (environ.get(f"NCCL_DEBUG{rest}", "") for rest in ("", "_SUBSYS", "_FILE"))
    if subsystems and level.upper() not in ("INFO", "TRACE", "ABORT"):
        problem = "no effect: it chooses among the lines of NCCL_DEBUG=INFO, which is not set"
        yield Finding("NCCL_DEBUG_SUBSYS", subsystems, problem, "set NCCL_DEBUG=INFO", "no effect")
    if file and not level:
        problem = "no effect: without NCCL_DEBUG nothing is said"
        yield Finding("NCCL_DEBUG_FILE", file, problem, "set NCCL_DEBUG=INFO or WARN", "no effect")
    elif file and "%p" not in file and not file.startswith("/dev/"):
        problem = "all ranks of a host write to this one file, and destroy each other's lines"
        yield Finding("NCCL_DEBUG_FILE", file, problem, "put %h.%p into the name", "hurts")
