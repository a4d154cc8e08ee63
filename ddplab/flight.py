"""torch's flight recorder: what every rank had called, and how far each call had come, when the job stopped.

The recorder keeps the last calls of a process (TORCH_FR_BUFFER_SIZE, 2000 by default). With NCCL it writes them by
itself when a collective times out, to TORCH_FR_DUMP_TEMP_FILE followed by the rank; by default
~/.cache/torch/comm_lib_trace_rank_<rank>, as a pickle. With gloo somebody has to ask for them: `dump_flight`.

    records = read_flight("dumps/")
    records.entries[["rank", "group", "seq", "collective", "in_bytes", "done"]]

Fields: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (format 2.10 in torch 2.14; older ones are read, too).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab import _plainpickle
from ddplab._files import named_files, open_to_read, words
from ddplab._flightrows import COLUMNS, row, text, whole

if TYPE_CHECKING:
    import pandas as pd

_KEYS = (b'"entries"', b'"pg_config"', b'"pg_status"', b'"comm_lib_version"', b'"nccl_version"')
_LARGEST = 2**30  # bytes of one dump, unpacked; 2000 entries with their frames take about one MB
_RANK = re.compile(r"rank[_-]?(\d+)|(\d+)(?:\.(?:json|pkl|pickle|bin))?(?:\.gz)?$", re.IGNORECASE)


class FlightError(ValueError):
    """No dump could be read; the message names the file and says why."""


@dataclass(frozen=True)
class FlightRecords:
    """What the flight recorders of all ranks hold.

    entries: one row a call, in each rank's order of recording; columns as in `_flightrows`.
    groups: one row a rank and process group: rank, group, desc, ranks (tuple of global ranks), size.
    status: one row a rank and process group: rank, pg_id, last_enqueued, last_started, last_completed (sequence
        numbers, -1 for none; gloo never reports "started").
    versions: (format version, library version) by rank.  notes: what could not be read, a sentence each.
    """

    entries: pd.DataFrame
    groups: pd.DataFrame
    status: pd.DataFrame
    versions: dict[int | None, tuple[str, str]]
    notes: tuple[str, ...]

    @property
    def ranks(self) -> list[int]:
        """Ranks that left a dump, sorted."""
        return sorted(rank for rank in self.versions if rank is not None)


def read_flight(paths: str | Path | Iterable[str | Path]) -> FlightRecords:
    """Read dumps of torch's flight recorder: files, or a folder, in which everything else is left alone.

    JSON or pickle, gzipped or not. A pickle is read by a machine that knows plain containers only, so a dump that asks
    for more is refused and runs nothing. The rank comes from the file's name (its last number, or what follows
    "rank"). Files that cannot be read are listed in `notes`; FlightError if none can, FileNotFoundError for a path
    that does not exist.
    """
    import pandas as pd

    notes: list[str] = []
    found = named_files(paths, lambda p: not p.name.startswith(".") and is_dump(p), "flight recorder dump", FlightError)
    dumps = latest_dumps(found, notes)
    if not dumps:
        raise FlightError("; ".join(notes) or f"no flight recorder dump in {paths}")
    rows, groups, status, versions = [], [], [], {}
    for rank in sorted(dumps, key=lambda r: (r is None, r)):
        path, dump = dumps[rank]
        versions[rank] = text(dump.get("version")), text(dump.get("comm_lib_version", dump.get("nccl_version")))
        known = groups_of(dump)
        groups += [{"rank": rank, "group": g, "desc": d, "ranks": r, "size": len(r)} for g, (d, r) in known.items()]
        status += [{"rank": rank, **one} for one in _status(dump)]
        rows += [{"rank": rank, **one} for one in entry_rows(path, dump, known, notes)]
        if not dump.get("entries"):
            notes.append(f"{path.name}: the recorder was empty")
    # Column by column: on the way through a frame of mixed columns, times since 1970 would be rounded to 256 ns.
    dtypes = {"rank": "Int64", **COLUMNS}
    return FlightRecords(
        pd.DataFrame({name: pd.Series([one[name] for one in rows], dtype=dtype) for name, dtype in dtypes.items()}),
        pd.DataFrame(groups, columns=["rank", "group", "desc", "ranks", "size"]),
        pd.DataFrame(status, columns=["rank", "pg_id", "last_enqueued", "last_started", "last_completed"]),
        versions,
        tuple(notes),
    )


def latest_dumps(paths: Iterable[Path], notes: list[str]) -> dict[int | None, tuple[Path, dict[str, Any]]]:
    """(file, dump) by rank, of two dumps of one rank the later. What is left out is said in `notes`."""
    dumps: dict[int | None, tuple[Path, dict[str, Any]]] = {}
    for path in paths:
        try:
            dump = read_dump(path)
        except FlightError as problem:
            notes.append(str(problem))
            continue
        rank = _rank_of(path, dump)
        if rank in dumps:
            older, newer = sorted((dumps[rank], (path, dump)), key=lambda pair: last_ns(pair[1]))
            who = f"rank {rank}" if rank is not None else "an unknown rank (no number in the file's name)"
            notes.append(f"{who} has two dumps; {newer[0].name} is the later one, {older[0].name} is left out")
            dumps[rank] = newer
        else:
            dumps[rank] = path, dump
    return dumps


def entry_rows(path: Path, dump: dict[str, Any], groups: dict[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    """The calls of one dump as rows of `_flightrows`, with pg_id; how many made no sense is said in `notes`."""
    rows, bad = [], 0
    for entry in _list(dump.get("entries")):
        try:
            rows.append({**row(entry, groups), "pg_id": whole(entry.get("pg_id"))})
        except (TypeError, ValueError, OverflowError):
            bad += 1
    if bad:
        notes.append(f"{path.name}: {bad} entries make no sense and were left out")
    return rows


def is_dump(path: str | Path) -> bool:
    """Does the file begin like a dump of the flight recorder? Other JSON and other pickles do not."""
    try:
        with open_to_read(path) as file:
            head = file.read(65536)
    except OSError:
        return False
    if head.startswith(b"\x1f\x8b"):
        head = _unzip(head, 65536) or b""
    if head.startswith(b"\x80"):
        return b"pg_config" in head or b"entries" in head
    return head.lstrip().startswith(b"{") and b"traceEvents" not in head and any(key in head for key in _KEYS)


def read_dump(path: str | Path) -> dict[str, Any]:
    """One dump as plain containers, as torch wrote it. FlightError names the file and what is wrong with it."""
    path = Path(path)
    try:
        with open_to_read(path) as file:
            data = file.read(_LARGEST + 1)
    except OSError as problem:
        raise FlightError(f"{path}: cannot be read: {words(problem)}") from None
    if len(data) > _LARGEST:
        raise FlightError(f"{path}: larger than {_LARGEST >> 20} MiB, so no dump of the flight recorder")
    if data.startswith(b"\x1f\x8b"):
        unzipped = _unzip(data, _LARGEST)
        if unzipped is None:
            raise FlightError(f"{path}: the gzip file is damaged, or cut off")
        data = unzipped
    if not data.strip():
        raise FlightError(f"{path}: empty; was the job killed while it wrote?")
    try:
        dump = _plainpickle.loads(data) if data.startswith(b"\x80") else json.loads(data)
    except _plainpickle.PlainPickleError as problem:
        raise FlightError(f"{path}: {problem}") from None
    except json.JSONDecodeError as problem:
        where = f"line {problem.lineno}, column {problem.colno}"
        raise FlightError(f"{path}: neither a pickle nor JSON ({problem.msg} at {where})") from None
    except (ValueError, RecursionError) as problem:
        reason = "nested too deeply" if isinstance(problem, RecursionError) else str(problem)[:120]
        raise FlightError(f"{path}: neither a pickle nor JSON ({reason})") from None
    if not isinstance(dump, dict) or not {"entries", "pg_config", "pg_status"} & dump.keys():
        raise FlightError(f"{path}: no dump of the flight recorder (it has neither entries nor process groups)")
    if not isinstance(dump.get("entries", []), list):
        raise FlightError(f"{path}: its entries are no list")
    return dump


def dump_flight(folder: str | Path, stacks: bool = True) -> Path:
    """Inside a rank: write what torch's flight recorder holds to folder/flight_rank_<rank>.json, and return the path.

    For gloo, which writes nothing by itself, and for a look at a job that still runs. torch's own JSON has no stacks;
    this one has (stacks=False leaves them out). The file appears whole or not at all.
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    if not dist.is_initialized():
        raise RuntimeError("dump_flight runs inside a rank, after torch.distributed.init_process_group")
    dump = _plainpickle.loads(c10d._dump_fr_trace(True, stacks, False))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flight_rank_{dist.get_rank()}.json"
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(dump))
    part.replace(path)
    return path


def _unzip(data: bytes, most: int) -> bytes | None:
    """At most `most` bytes of a gzip file; None if it is damaged. A cut off head gives what there is."""
    if most < _LARGEST:
        try:
            return zlib.decompressobj(wbits=31).decompress(data, most)
        except zlib.error:
            return None
    import io

    try:
        with gzip.open(io.BytesIO(data)) as file:
            whole = file.read(most + 1)
    except (OSError, EOFError, zlib.error):
        return None
    return whole if len(whole) <= most else None


def _rank_of(path: Path, dump: dict[str, Any]) -> int | None:
    """From "…rank_3…", from "…3.json", or as the dump says itself (torch's does not)."""
    if isinstance(dump.get("rank"), int):
        return int(dump["rank"])
    found = list(_RANK.finditer(path.name))
    return int(found[-1][1] or found[-1][2]) if found else None


def last_ns(dump: dict[str, Any]) -> int:
    times = [e.get("time_created_ns") for e in _list(dump.get("entries")) if isinstance(e, dict)]
    return max((t for t in times if isinstance(t, int)), default=-1)


def groups_of(dump: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(desc, global ranks) of the process groups that this rank knows, by name; torch writes the ranks as "[0, 1]"."""
    known = {}
    config = dump.get("pg_config")
    for name, group in config.items() if isinstance(config, dict) else ():
        if isinstance(group, dict):
            ranks = group.get("ranks", "")
            numbers = re.findall(r"[0-9]+", ranks) if isinstance(ranks, str) else _list(ranks)
            members = tuple(r for r in map(whole, numbers) if r is not None)
            known[text(name)] = text(group.get("desc")), members
    return known


def _status(dump: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    status = dump.get("pg_status")
    for pg_id, one in status.items() if isinstance(status, dict) else ():
        if isinstance(one, dict):
            known = {"pg_id": text(pg_id)}
            for stage in ("enqueued", "started", "completed"):
                number = whole(one.get(f"last_{stage}_collective"))
                known[f"last_{stage}"] = -1 if number is None else number
            found.append(known)
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
