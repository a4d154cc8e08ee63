"""The output of nccl-tests (`all_reduce_perf` and its siblings) as a table: text of all versions, and JSON (`-J`).

The text is made for people and changed often: columns came and went, numbers lose their decimals when they grow, the
lines of NCCL_DEBUG and the labels of launchers stand in between, sometimes in the middle of a row. What the columns
mean is in https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ddplab.nccl._lines import PREFIX, strip_labels
from ddplab.nccl._read import Source, read

if TYPE_CHECKING:
    import pandas as pd

_SIDES = ("", "inplace_")
_MEASURED = ("time_us", "algbw_GBps", "busbw_GBps", "wrong", "error")
_PER_ITERATION = ("min_us", "max_us", "p99_us", "cv_pct")
COLUMNS = ("run", "size_B", "count", "type", "redop", "root", *(s + name for s in _SIDES for name in _MEASURED))

_DEVICE = re.compile(
    r"Rank +(?P<rank>\d+) +(?:Group +(?P<group>\d+) +)?Pid +(?P<pid>\d+) +on +(?P<host>\S+) +"
    r"device +(?P<device>\d+) +\[(?P<bus_id>[^\]]*)\] *(?P<name>.*)"
)
_SETTING = re.compile(r"([A-Za-z][A-Za-z ]*?)(?::? )+(-?\d+)(?:\((\w+)\))?(?= |$)")
_HEAD = re.compile(r"\s*(\d+)\s+(\d+)\s+([a-z][\w]*)(?:\s+([a-z]\w*))?(?:\s+(-?\d+))?\s*$")
_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+(\S.*)$")
_STAMP = re.compile(r"\s+\d{4}-\d\d-\d\d\s+\d\d:\d\d:\d\d\s*$")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|nan|inf)|N/A", re.IGNORECASE)


@dataclass
class NcclTests:
    """What one file of nccl-tests says.

    table: one row a size (pandas): run (0, 1 ... where a file holds several), size_B, count, type, redop, root;
        then time_us, algbw_GBps, busbw_GBps, wrong, error of the out-of-place run, and the same with "inplace_" in
        front. wrong is a count of elements, <NA> where nothing was checked; error is what versions up to 2.11 printed,
        the largest difference. What a version does not print is None or NaN. With -I 1: min_us, max_us, p99_us, cv_pct.
    devices: run, rank, group, pid, host, device, bus_id, name (pandas).
    rows, listed: the same as plain lists of dicts.
    ranks: GPUs; None where it is not said or differs between runs.
    collective, version: names as printed, or None.   settings: the line "# nThread ..." (JSON: "config").
    cpu_time: times are of the CPU (-C 1).
    out_of_bounds: (row, placement) pairs with wrong results.   ok: False where results are wrong; None unchecked.
    average_busbw_GBps: as printed, over all rows and both placements; None where the line is missing.
    warnings: what is odd about the file, in sentences.
    """

    rows: list[dict[str, Any]]
    listed: list[dict[str, Any]]
    ranks: int | None = None
    collective: str | None = None
    version: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    cpu_time: bool = False
    out_of_bounds: int | None = None
    ok: bool | None = None
    average_busbw_GBps: float | None = None
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def table(self) -> pd.DataFrame:
        """See above."""
        import pandas as pd

        columns = dict.fromkeys([*COLUMNS, *(key for row in self.rows for key in row)])
        return pd.DataFrame({key: pd.Series([r.get(key) for r in self.rows], dtype=_dtype(key)) for key in columns})

    @cached_property
    def devices(self) -> pd.DataFrame:
        """See above."""
        import pandas as pd

        return pd.DataFrame(self.listed, columns=["run", "rank", "group", "pid", "host", "device", "bus_id", "name"])

    def __str__(self) -> str:
        best = max((row[f"{side}busbw_GBps"] or 0.0 for row in self.rows for side in _SIDES), key=lambda x: (x == x, x))
        checked = {True: "results right", False: "results WRONG", None: "results not checked"}[self.ok]
        where = "ranks not said" if self.ranks is None else f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        sizes = f"{len(self.rows)} size{'s' * (len(self.rows) != 1)}"
        head = f"{self.collective or 'nccl-tests'}: {sizes}, {where}, {checked}, highest busbw {best:.4g} GB/s"
        return "\n".join([head, *(f"warning: {line}" for line in self.warnings)])


def _dtype(column: str) -> str:
    if column.endswith(("_us", "_GBps", "_pct", "error")):
        return "float64"
    return "object" if column in ("type", "redop") else "Int64"


def parse_nccl_tests(source: Source) -> NcclTests:
    """Read what nccl-tests printed (text) or wrote with -J (JSON); which one it is shows in the first character.

    source: the text itself, or the path of a file.
    Raises ValueError where there are no data rows or the JSON is broken; FileNotFoundError, OSError for the file.
    """
    files = read(source, r"^\s*[{#]")
    if len(files) != 1:
        raise ValueError(f"give one file of nccl-tests, not {len(files)}")
    name, text = files[0]
    where = "" if name == "text" else f"{name}: "
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        from ddplab.nccl._tests_json import parse_json

        found, rows, devices = parse_json(text.lstrip("\ufeff"), where, COLUMNS)
    else:
        found, rows, devices = _parse_text(text)
    if not rows:
        raise ValueError(f"{where}no data rows: this is not the output of an nccl-tests run, or the run ended early")
    return _finish(found, rows, devices)


def _parse_text(text: str) -> tuple[dict[str, Any], list[dict], list[dict]]:
    found: dict[str, Any] = {"settings": {}, "starts": 0, "heads": 0, "averages": []}
    rows: list[dict] = []
    devices: list[dict] = []
    pending = ""
    for raw in text.splitlines():
        line = strip_labels(raw)
        if log := PREFIX.search(line):  # NCCL's own line, perhaps in the middle of a row that goes on below
            line = line[: log.start()] + _in_front(log["host"], devices)
        if not line.strip():
            continue
        bare = line.lstrip("# \t")
        if device := _DEVICE.match(bare):
            devices.append({"run": max(0, found["starts"] - 1), **_typed(device.groupdict())})
        elif line.lstrip().startswith("#"):
            _comment(bare.rstrip(), found)
        elif _HEAD.fullmatch(line):
            pending = line.rstrip()
        else:
            row = _row(line, found) or (pending and _row(f"{pending} {line}", found))
            if row:
                rows.append(row)
                pending = ""
    return found, rows, devices


def _in_front(token: str, devices: list[dict]) -> str:
    """What is glued to the name of a host: the root of a row, which stands last before NCCL speaks."""
    for host in {device["host"] for device in devices}:
        if token.endswith(host):
            return token[: -len(host)]
    root = re.match(r"-\d", token)  # no name of a host begins with a dash
    return root[0] if root else ""


def _comment(line: str, found: dict[str, Any]) -> None:
    """A line that starts with "#"."""
    if line.startswith("nThread "):
        found["starts"] += 1
        found["settings"] = {
            name.strip(): int(number) for name, number, _ in _SETTING.findall(line) if len(number) <= 18
        }
    elif line.startswith("size ") and "count" in line:
        found["heads"] += 1
        found["cpu_time"] = "cputime" in line
        found["error"] = line.rstrip().endswith("error")
    elif match := re.match(r"nccl-tests version (\S+)", line):
        found["version"] = match[1]
    elif match := re.match(r"Collective test starting: (\S+)", line):
        found["collective"] = match[1].rpartition("/")[2]
    elif match := re.match(r"Out of bounds values\s*: (\d{1,18})(?: (OK|FAILED))?", line):
        found["out_of_bounds"] = found.get("out_of_bounds", 0) + int(match[1])
        found["failed"] = found.get("failed", False) or match[2] == "FAILED" or int(match[1]) > 0
    elif match := re.match(rf"Avg bus bandwidth\s*: ({_NUMBER.pattern})", line):
        found["averages"].append(_number(match[1]))
    elif match := re.match(r"Reducing maxBytes to (\d+) due to memory limitation", line):
        found.setdefault("notes", []).append(f"the largest size was cut to {match[1]} bytes: too little GPU memory")


def _row(line: str, found: dict[str, Any]) -> dict | None:
    """A data row as a dict of COLUMNS, or None where the line is something else.

    Behind the type stand a reduction (a word, not always), a root (a whole number, not always), and 4 numbers for each
    placement, 8 with per-iteration columns; trace replay leaves the first placement blank.
    """
    match = _ROW.match(_STAMP.sub("", line))
    if not match or len(match[1]) > 18 or len(match[2]) > 18:
        return None
    words = match[4].split()
    redop = words.pop(0) if words and words[0].isalpha() and not _NUMBER.fullmatch(words[0]) else None
    root = words.pop(0) if len(words) % 4 == 1 and re.fullmatch(r"-?\d{1,9}", words[0]) else None
    if len(words) not in (4, 8, 16) or not all(_NUMBER.fullmatch(word) for word in words):
        return None
    per_side = 8 if len(words) == 16 else 4
    sides = [words[i : i + per_side] for i in range(0, len(words), per_side)]
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"run": max(0, found["heads"] - 1), "size_B": int(match[1]), "count": int(match[2]), "type": match[3]}
    row |= {"redop": redop, "root": None if root is None else int(root)}
    for side, numbers in zip(_SIDES[-len(sides) :], sides, strict=True):
        time, algbw, busbw, wrong = numbers[:4]
        row |= {f"{side}time_us": _number(time), f"{side}algbw_GBps": _number(algbw)}
        row |= {f"{side}busbw_GBps": _number(busbw), **_wrong(wrong, side, found.get("error"))}
        row |= {side + name: _number(text) for name, text in zip(_PER_ITERATION, numbers[4:], strict=False)}
    return row


def _wrong(text: str, side: str, is_error: bool | None) -> dict[str, Any]:
    """The last column: a count of wrong elements, or in old versions the largest error. Without a header it shows."""
    value = _number(text)
    if is_error is None:
        is_error = not math.isnan(value) and not value.is_integer()
    if is_error:
        return {f"{side}error": value}
    return {f"{side}wrong": round(value) if math.isfinite(value) else None}


def _number(text: str) -> float:
    return math.nan if text.upper() == "N/A" else float(text)


def _typed(device: dict[str, str | None]) -> dict[str, Any]:
    return {k: int(v[:18]) if v and k in ("rank", "group", "pid", "device") else v for k, v in device.items()}


def _finish(found: dict[str, Any], rows: list[dict], devices: list[dict]) -> NcclTests:
    by_run: dict[int, set] = {}
    for device in devices:
        by_run.setdefault(device["run"], set()).add(device["rank"])
    counts = {len(ranks) for ranks in by_run.values()}
    ranks = found.get("ranks") or (counts.pop() if len(counts) == 1 else None)
    runs, warnings = max(found.get("starts", 1), len({row["run"] for row in rows})), list(found.get("notes", []))
    if runs > 1 and ranks == 1:
        warnings.append(
            f"{runs} separate runs of 1 rank: nccl-tests was built without MPI (make MPI=1) but started {runs} times, "
            "so nothing was communicated and busbw is 0"
        )
    elif runs > 1:
        warnings.append(f"the file holds {runs} runs; the column run tells them apart")
    counted = [row[f"{side}wrong"] for row in rows for side in _SIDES if row.get(f"{side}wrong") is not None]
    checked = bool(counted) or any(row.get(f"{side}error") is not None for row in rows for side in _SIDES)
    wrong = sum(count > 0 for count in counted)
    if counted and runs == 1 and found.get("out_of_bounds", wrong) != wrong:
        warnings.append(
            f"it says {found['out_of_bounds']} out of bounds values, but {wrong} placements have wrong ones"
        )
    averages = found.get("averages", [])
    return NcclTests(
        rows,
        devices,
        ranks,
        found.get("collective"),
        found.get("version"),
        found["settings"],
        found.get("cpu_time", False),
        found.get("out_of_bounds"),
        None if not checked else not (found.get("failed", False) or wrong > 0),
        averages[0] if len(averages) == 1 else None,
        warnings,
    )
