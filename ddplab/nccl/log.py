"""What NCCL said in its log (NCCL_DEBUG=INFO): who talked to whom over what, with which algorithm, and what went wrong.

`parse_log` reads the lines of many ranks, from one text or from a folder of NCCL_DEBUG_FILE files, of NCCL 2.8 to 2.30.
A log holds only what NCCL_DEBUG_SUBSYS let through: where lines are missing the answer is "unknown", not "none".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplab.nccl._lines import VERSION, Line, lines_of
from ddplab.nccl._messages import PROTOCOLS, parse
from ddplab.nccl._read import Source, read

if TYPE_CHECKING:
    import pandas as pd

NEEDS_EDGES = "unknown (needs NCCL_DEBUG_SUBSYS=INIT,GRAPH)"
NEEDS_CALLS = "unknown (needs NCCL_DEBUG_SUBSYS=COLL)"
NEEDS_CHOICES = "unknown (needs NCCL_DEBUG_SUBSYS=TUNING)"

_WHO = ("host", "pid")
_COLUMNS = {
    "comms": (*_WHO, "device", "comm", "comm_id", "rank", "nranks", "nodes", "local_rank", "local_ranks", "nvml_device",
              "bus_id", "parent", "color", "how", "state"),
    "edges": (*_WHO, "comm", "channel", "connection", "src", "dst", "src_device", "dst_device", "end", "kind",
              "transport"),
    "rings": (*_WHO, "comm", "channel", "channels", "ranks", "complete"),
    "trees": (*_WHO, "comm", "channel", "rank", "parent", "children"),
    "channels": (*_WHO, "comm", "coll", "collnet", "nvls", "p2p", "p2p_per_peer"),
    "calls": (*_WHO, "op", "op_count", "count", "datatype", "nbytes", "redop", "root", "comm", "nranks"),
    "choices": (*_WHO, "op", "nbytes", "algorithm", "protocol", "first_channel", "last_channel"),
    "tuning": (*_WHO, "op", "algorithm", "protocol", "latency_us", "algbw_GBps"),
    "env": (*_WHO, "variable", "value"),
    "rejected": (*_WHO, "variable", "value", "used"),
    "connected": (*_WHO, "what"),
    "network": (*_WHO, "name", "what"),
    "warnings": (*_WHO, "device", "time", "place", "function", "text"),
}  # fmt: skip
_WHOLE = {"pid", "device", "rank", "nranks", "nodes", "local_rank", "local_ranks", "nvml_device", "color", "channel",
          "connection", "src", "dst", "channels", "coll", "collnet", "nvls", "p2p", "p2p_per_peer", "op_count", "count",
          "nbytes", "root", "first_channel", "last_channel"}  # fmt: skip


class NcclLog:
    """What a log says, as tables (pandas), each with host and pid of the process that said it; empty where nothing did.

    version: (2, 30, 7), or None.   lines: how many lines of NCCL there were.   processes: (host, pid) seen.
    comms: one row a communicator and process: comm (address), comm_id (the same on all its ranks), rank, nranks,
        device, nodes, local_rank, local_ranks, bus_id (hexadecimal), parent and color of a split, state.
    edges: one row a connection: channel, src -> dst (ranks), kind (P2P, SHM, NET ...), transport in full, end (send or
        receive: the network prints both). src_device is a device number, or in old versions (2.8) a bus id.
    rings: channel, channels, ranks in order, complete (False where NCCL cut the line).   trees: parent, children.
    channels: coll, collnet, nvls, p2p, p2p_per_peer.   connected: "rings" or "trees" are up.
    calls: collectives as called: op, op_count, count, datatype, nbytes, redop, root.
    choices: op, nbytes, algorithm, protocol, channels; only rank 0 prints them.
    tuning: NCCL's own cost model: latency_us and algbw_GBps by op, algorithm and protocol; 0 GB/s means switched off.
    env: variables that took effect.   rejected: those with a value that NCCL did not accept, and what it took.
    network: NET and bootstrap lines.   warnings: NCCL WARN.
    rows: all of these as plain lists of dicts, by name.
    """

    comms: pd.DataFrame
    edges: pd.DataFrame
    rings: pd.DataFrame
    trees: pd.DataFrame
    channels: pd.DataFrame
    calls: pd.DataFrame
    choices: pd.DataFrame
    tuning: pd.DataFrame
    env: pd.DataFrame
    rejected: pd.DataFrame
    connected: pd.DataFrame
    network: pd.DataFrame
    warnings: pd.DataFrame

    def __init__(
        self, version: tuple[int, ...] | None, lines: list[Line], rows: dict[str, list[dict[str, Any]]]
    ) -> None:
        self.version, self.lines, self.rows = version, len(lines), rows
        self.processes = list(dict.fromkeys((line.host, line.pid) for line in lines))

    def __getattr__(self, name: str) -> pd.DataFrame:
        """A table, made when it is first asked for."""
        if name not in _COLUMNS:
            raise AttributeError(f"a log of NCCL has no {name!r}; it has {', '.join(_COLUMNS)}")
        frame = _frame(self.rows[name], _COLUMNS[name])
        setattr(self, name, frame)
        return frame

    @property
    def ranks(self) -> int | None:
        """Ranks of the largest communicator, or None where no line says it."""
        return max((comm["nranks"] for comm in self.rows["comms"]), default=None)

    @property
    def world(self) -> list[dict[str, Any]]:
        """The rows of `comms` of the largest communicator."""
        ranks = self.ranks
        return [comm for comm in self.rows["comms"] if comm["nranks"] == ranks]

    @property
    def world_edges(self) -> list[dict[str, Any]]:
        """The rows of `edges` that belong to the largest communicator, or to one that the log does not tell."""
        world = {(comm["host"], comm["pid"], comm["comm"]) for comm in self.world}
        return [
            edge
            for edge in self.rows["edges"]
            if edge["comm"] is None or not world or (edge["host"], edge["pid"], edge["comm"]) in world
        ]

    @property
    def transports(self) -> dict[tuple[int, int], str] | str:
        """{(src, dst): transport} of the largest communicator's ranks; a sentence where the lines are missing."""
        found: dict[tuple[int, int], dict[str, None]] = {}
        for edge in self.world_edges:
            found.setdefault((edge["src"], edge["dst"]), {})[edge["transport"]] = None
        return {pair: " and ".join(names) for pair, names in sorted(found.items())} or NEEDS_EDGES

    @property
    def networks(self) -> list[str]:
        """Networks in use, as in "Using network IB"; empty where no line says it."""
        return sorted({row["what"] for row in self.rows["network"] if row["name"] == "network"})

    def verdict(self) -> list[str]:
        """What the log says, in sentences; first what is wrong."""
        from ddplab.nccl._verdict import verdict

        return verdict(self)

    def __str__(self) -> str:
        return "\n".join(self.verdict())


def parse_log(source: Source) -> NcclLog:
    """Read a log of NCCL_DEBUG=INFO (or WARN, or TRACE).

    source: the text, a path, several paths, or a folder of files (NCCL_DEBUG_FILE=.../nccl.%h.%p).
    Raises ValueError where there is no line of NCCL; FileNotFoundError, OSError for the file.
    """
    files = read(source, r" NCCL (?:INFO|WARN|CALL|TRACE)|NCCL version \d")
    lines = lines_of(files)
    version = next((match for _, text in files if (match := VERSION.search(text))), None)
    if not lines and version is None:
        names = ", ".join(name for name, _ in files[:3])
        raise ValueError(
            f"{names}: no line of NCCL in it; start the job with NCCL_DEBUG=INFO "
            "NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,NET,COLL,TUNING NCCL_DEBUG_FILE=nccl.%h.%p"
        )
    return NcclLog(None if version is None else tuple(map(int, version.groups())), lines, _gather(lines))


def _gather(lines: list[Line]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in _COLUMNS}
    comms: dict[tuple[str, int, str], dict[str, Any]] = {}
    current: dict[tuple[str, int, int], str] = {}  # the communicator that a thread sets up
    columns: dict[tuple[str, int], list[str]] = {}  # the algorithms of the tuning table's present block
    for line in lines:
        who = {"host": line.host, "pid": line.pid}
        process, thread = (line.host, line.pid), (line.host, line.pid, line.tid)
        if line.level == "WARN":
            rows["warnings"].append(
                {**who, "device": line.device, "time": line.time, "place": line.place, "function": line.function}
                | {"text": line.text.strip()}
            )
            continue
        if line.level != "INFO" or (message := parse(line.text)) is None:
            continue
        kind, found = message
        here = {**who, "comm": current.get(thread)}
        if kind == "comm":
            current[thread] = found["comm"]
            known = comms.setdefault((*process, found["comm"]), who | {"device": line.device})
            if known.get("state") == "COMPLETE" and found["state"] == "START":  # the address is used again
                rows["comms"].append(comms.pop((*process, found["comm"])))
                known = comms.setdefault((*process, found["comm"]), who | {"device": line.device})
            known.update({key: value for key, value in found.items() if value is not None or key not in known})
        elif kind == "trees":
            rows["trees"] += [here | tree for tree in found["trees"]]
        elif kind == "algorithms":
            columns[process] = found["names"]
        elif kind == "tuning":
            pairs = [(a, p) for a in columns.get(process, []) for p in PROTOCOLS]
            rows["tuning"] += [
                who | {"op": found["op"], "algorithm": a, "protocol": p, "latency_us": us, "algbw_GBps": rate}
                for (a, p), (us, rate) in zip(pairs, found["cells"], strict=False)
            ]
        elif kind in ("network", "net", "bootstrap"):
            what = found["name"] if kind == "network" else found["what"]
            rows["network"].append(who | {"name": found["name"] if kind == "net" else kind, "what": what})
        else:
            name = {"edge": "edges", "ring": "rings", "call": "calls", "choice": "choices"}.get(kind, kind)
            rows[name].append(here | found)
    rows["comms"] += comms.values()
    for name in ("env", "rejected"):  # a process may read a variable several times
        rows[name] = list({tuple(row.items()): row for row in rows[name]}.values())
    return rows


def _frame(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({key: pd.Series([row.get(key) for row in rows], dtype=_dtype(key)) for key in columns})


def _dtype(column: str) -> str:
    return "Int64" if column in _WHOLE else "float64" if column in ("latency_us", "algbw_GBps") else "object"
