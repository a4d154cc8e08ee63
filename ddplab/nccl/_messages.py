"""What a line of NCCL's log means: one pattern a kind of message, and the fields that it gives.

The messages are those of NCCL 2.30.7 (init.cc, transport/*.cc, graph/rings.cc, graph/tuning.cc, enqueue.cc,
misc/param.cc) and, where they differ, of 2.8 to 2.26. Numbers keep their meaning: opCount and busId are hexadecimal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

DATATYPES = {
    0: ("int8", 1),
    1: ("uint8", 1),
    2: ("int32", 4),
    3: ("uint32", 4),
    4: ("int64", 8),
    5: ("uint64", 8),
    6: ("float16", 2),
    7: ("float32", 4),
    8: ("float64", 8),
    9: ("bfloat16", 2),
    10: ("float8_e4m3", 1),
    11: ("float8_e5m2", 1),
}
REDOPS = {0: "sum", 1: "prod", 2: "max", 3: "min", 4: "avg"}
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
_WORDS = {name.upper(): name for name in (*ALGORITHMS, *PROTOCOLS)} | {"COLLNET_DIRECT": "CollNetDirect"}
_WORDS |= {"COLLNET_CHAIN": "CollNetChain", "NVLS_TREE": "NVLSTree"}

_N = r"\d{1,9}"
Fields = dict[str, Any]


def parse(text: str) -> tuple[str, Fields] | None:
    """(kind, fields) of a message, or None for one that says nothing this reader uses."""
    for kind, hint, pattern, fields in _KINDS:
        if hint in text and (match := pattern.match(text)):
            return kind, fields(match)
    return None


def edge_kind(transport: str) -> str:
    """P2P, SHM, NET or the transport's own word: the part before the first "/"."""
    return "SHM" if transport == "direct shared memory" else transport.split("/")[0]


def _comm(m: re.Match) -> Fields:
    """Init START and COMPLETE, and the line that counts nodes; whatever the line does not say is None."""
    rest, found = m["rest"], {"comm": m["comm"], "rank": int(m["rank"]), "nranks": int(m["nranks"])}
    for key, pattern in (("device", "cudaDev"), ("nvml_device", "nvmlDev"), ("nodes", "nNodes")):
        found[key] = int(hit[1]) if (hit := re.search(rf"\b{pattern} ({_N})", rest)) else None
    for key, pattern in (("local_ranks", "localRanks"), ("local_rank", "localRank"), ("color", "color")):
        found[key] = int(hit[1]) if (hit := re.search(rf"\b{pattern} (-?{_N})", rest)) else None
    found["bus_id"] = hit[1] if (hit := re.search(r"\bbusId ([0-9a-f]{1,16})", rest)) else None
    for key, pattern in (("comm_id", "commId"), ("parent", "parent")):
        found[key] = hit[1] if (hit := re.search(rf"\b{pattern} (0x[0-9a-f]{{1,16}})", rest)) else None
    found["state"] = "START" if "Init START" in rest else "COMPLETE" if "Init COMPLETE" in rest else None
    return found


def _ring(m: re.Match) -> Fields:
    words = m["ranks"].split()
    cut = any(not word.isdigit() for word in words)  # a line ends after 127 characters, with "..."
    whole = [word for word in words if word.isdigit()]
    return {
        "channel": int(m["channel"]),
        "channels": int(m["channels"]) if m["channels"] else None,
        "ranks": tuple(int(word[:9]) for word in whole),
        "complete": not cut,
    }


def _trees(m: re.Match) -> Fields:
    """[{channel, rank, parent, children}]; -1 means nobody and is left out."""
    trees = []
    for channel, children, rank, parent in re.findall(
        rf"\[({_N})\] (-?{_N}(?:/-?{_N}){{0,2}})->(-?{_N})->(-?{_N})(?= |$)", m["rest"]
    ):
        below = tuple(int(child) for child in children.split("/") if int(child) >= 0)
        trees.append(
            {
                "channel": int(channel),
                "rank": int(rank),
                "parent": int(parent) if int(parent) >= 0 else None,
                "children": below,
            }
        )
    return {"trees": trees}


def _edge(m: re.Match) -> Fields:
    transport = m["transport"].rstrip()
    return {
        "channel": int(m["channel"]),
        "connection": int(m["connection"]) if m["connection"] else None,
        "src": int(m["src"]),
        "dst": int(m["dst"]),
        "src_device": m["src_device"],
        "dst_device": m["dst_device"],
        "end": m["end"],
        "transport": transport,
        "kind": edge_kind(transport),
    }


def _channels(m: re.Match) -> Fields:
    found = {"coll": int(m["coll"])}
    for key in ("collnet", "nvls"):
        found[key] = int(hit[1]) if (hit := re.search(rf"({_N}) {key} channels", m[0])) else None
    found["p2p"] = int(hit[1]) if (hit := re.search(rf"({_N}) p2p channels(?! per peer)", m[0])) else None
    found["p2p_per_peer"] = int(hit[1]) if (hit := re.search(rf"({_N}) p2p channels per peer", m[0])) else None
    return found


def _call(m: re.Match) -> Fields:
    datatype, size = DATATYPES.get(int(m["datatype"]), (f"type {m['datatype']}", None))
    redop = int(m["redop"])
    return {
        "op": m["op"],
        "op_count": int(m["op_count"], 16),
        "count": int(m["count"]),
        "datatype": datatype,
        "nbytes": size and size * int(m["count"]),
        "redop": REDOPS.get(redop, f"op {redop}"),
        "root": int(m["root"]),
        "comm": m["comm"],
        "nranks": int(m["nranks"]) if m["nranks"] else None,
    }


def _choice(m: re.Match) -> Fields:
    def named(text: str, names: tuple[str, ...]) -> str:
        if text.isdigit():
            return names[int(text)] if int(text) < len(names) else text
        return _WORDS.get(text.upper(), text)

    span = re.search(rf"\{{Lo\.\.Hi\}}=\{{({_N})\.\.({_N})\}}", m["rest"])
    return {
        "op": m["op"],
        "nbytes": int(m["nbytes"]),
        "algorithm": named(m["algorithm"], ALGORITHMS),
        "protocol": named(m["protocol"], PROTOCOLS),
        "first_channel": int(span[1]) if span else None,
        "last_channel": int(span[2]) if span else None,
    }


def _other_choice(m: re.Match) -> Fields:
    """Symmetric kernels and copy engines, which have neither algorithm nor protocol."""
    how = "Symmetric" if m["how"] == "Symmetric" else "CopyEngine"
    kernel = re.match(r"Kernel (\S+)", m["rest"])
    return {
        "op": m["op"],
        "nbytes": int(m["nbytes"]),
        "algorithm": how,
        "protocol": kernel[1] if kernel else m["rest"].split(";")[0].strip(),
        "first_channel": None,
        "last_channel": None,
    }


def _env(m: re.Match) -> Fields:
    return {"variable": m["name"], "value": m["value"].strip().removesuffix(".")}


def _row(m: re.Match) -> Fields:
    """One line of the tuning table: cells of latency (us) and algorithm bandwidth (GB/s)."""
    cells = re.findall(r"(\d{1,9}(?:\.\d{1,6})?)/ *(\d{1,9}(?:\.\d{1,6})?)", m["cells"])
    return {"op": m["op"], "cells": [(float(a), float(b)) for a, b in cells]}


_KINDS: list[tuple[str, str, re.Pattern, Callable[[re.Match], Fields]]] = [
    ("comm", "comm 0x", re.compile(
        rf"(?:\[Rank {_N}\] )?(?P<how>\w+ )?comm (?P<comm>0x[0-9a-f]{{1,16}}) rank (?P<rank>{_N}) "
        rf"n[rR]anks (?P<nranks>{_N})(?P<rest>.*)"), lambda m: _comm(m) | {"how": (m["how"] or "").strip() or None}),
    ("edge", " via ", re.compile(
        rf"Channel (?P<channel>{_N})(?:/(?P<connection>{_N}))? ?: (?P<src>{_N})\[(?P<src_device>[0-9a-f]{{1,16}})\] -> "
        rf"(?P<dst>{_N})\[(?P<dst_device>[0-9a-f]{{1,16}})\] (?:\[(?P<end>send|receive)\] )?"
        r"via (?P<transport>direct shared memory|[A-Z][\w+-]*(?:/\S*| pointer\S*)*(?: pointer\S*)?)"), _edge),
    ("ring", "Channel ", re.compile(
        rf"Channel (?P<channel>{_N})(?:/(?P<channels>{_N}))? ?:(?P<ranks>(?: +{_N})+[ \d]*\.{{0,3}})\s*$"), _ring),
    ("trees", "Trees", re.compile(r"Trees(?P<rest>(?: \[.*)?)$"), _trees),
    ("connected", "Connected all", re.compile(r"Connected all (?P<what>rings|trees)"), lambda m: {"what": m["what"]}),
    ("channels", "coll channels", re.compile(rf"(?P<coll>{_N}) coll channels.*"), _channels),
    ("network", "Using network", re.compile(r"Using network (?P<name>\S+)"), lambda m: {"name": m["name"]}),
    ("net", "", re.compile(r"(?P<name>NET/\S+?) ?: (?P<what>Using .*|No device found\.?)"),
     lambda m: {"name": m["name"], "what": m["what"].strip()}),
    ("bootstrap", "Bootstrap", re.compile(r"Bootstrap ?: Using (?P<what>\S+)"), lambda m: {"what": m["what"]}),
    ("env", "set by environment to", re.compile(r"(?P<name>NCCL_\w+) set by environment to (?P<value>.*)"), _env),
    ("rejected", "NCCL_", re.compile(
        r"Invalid value (?P<value>.*?) for (?P<name>NCCL_\w+), using default (?P<used>\S+?)\.?$"),
     lambda m: {"variable": m["name"], "value": m["value"], "used": m["used"]}),
    ("rejected", "Invalid NCCL_", re.compile(r"Invalid (?P<name>NCCL_\w+) (?P<value>-?\d+) \((?P<why>[^)]*)\)\.?$"),
     lambda m: {"variable": m["name"], "value": m["value"], "used": m["why"]}),
    ("call", "opCount", re.compile(
        r"(?P<op>\w+): opCount (?P<op_count>[0-9a-f]{1,16}) .*?\bcount (?P<count>\d{1,18}) "
        rf"datatype (?P<datatype>{_N}) op (?P<redop>{_N}) root (?P<root>-?{_N}) "
        rf"comm (?P<comm>0x[0-9a-f]{{1,16}})(?: \[nranks=(?P<nranks>{_N})\])?"), _call),
    ("choice", "Bytes -> Algo", re.compile(
        r"(?:(?P<op>\w+): )?(?P<nbytes>\d{1,18}) Bytes -> "
        r"Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)(?P<rest>.*)"), _choice),
    ("choice", "Bytes ->", re.compile(
        r"(?P<op>\w+) \[(?P<how>Symmetric|Copy Engine|Hierarchical CE)\]: (?P<nbytes>\d{1,18}) Bytes -> (?P<rest>.*)"),
     _other_choice),
    ("algorithms", "|", re.compile(r"  ?Algorithm +\|(?P<rest>.*)"),
     lambda m: {"names": [w for w in m["rest"].replace("|", " ").split() if w in ALGORITHMS]}),
    ("tuning", "|", re.compile(r" *(?P<op>Broadcast|Reduce|AllGather|ReduceScatter|AllReduce) \|(?P<cells>.*)"), _row),
]  # fmt: skip
