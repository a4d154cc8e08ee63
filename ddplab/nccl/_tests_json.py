"""The JSON that nccl-tests writes with -J: numbers that may be text, truth values that are text, a root with spaces."""

from __future__ import annotations

import json
import math
import re
from typing import Any

# printf("%lf") writes infinity as `inf`, which JSON does not know.
_BARE = re.compile(r"(?<=[:\[,])(\s*)(-?)(?:inf|(nan))(?=\s*[,}\]])")
_SIDES = (("out_of_place", ""), ("in_place", "inplace_"))
_STATS = {"min_us": "min_us", "max_us": "max_us", "p99_us": "p99_us", "cv_pct": "cv_pct"}


def parse_json(text: str, where: str, columns: tuple[str, ...]) -> tuple[dict[str, Any], list[dict], list[dict]]:
    """(facts, rows, devices) in the terms of `tests.parse_nccl_tests`. ValueError, starting with `where`, if broken."""
    try:
        data = json.loads(_BARE.sub(lambda m: f"{m[1]}{'NaN' if m[3] else m[2] + 'Infinity'}", text))
    except RecursionError:
        raise ValueError(f"{where}this JSON is nested too deeply to come from nccl-tests") from None
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        hint = "; the file ends in the middle, so the run ended early" if error.pos >= len(text.rstrip()) - 1 else ""
        raise ValueError(f"{where}broken JSON at {at}: {error.msg}{hint}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{where}broken JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("results"), list):
        raise ValueError(f'{where}no list "results": this JSON is not from nccl-tests (-J)')
    config = data["config"] if isinstance(data.get("config"), dict) else {}
    devices = _devices(data.get("devices") or config.get("devices"))
    found: dict[str, Any] = {"settings": {k: v for k, v in config.items() if isinstance(v, (int, str, float))}}
    per_process = (_whole(config.get("nthreads")) or 1) * (_whole(config.get("ngpus")) or 1)
    if per_process > 1 and devices and all((device["rank"] or 0) % per_process == 0 for device in devices):
        found["ranks"] = len(devices) * per_process  # it lists the first GPU of each process only
    arguments = data.get("args")
    program = arguments[0] if isinstance(arguments, list) and arguments else config.get("collective")
    if isinstance(program, str) and program:
        found["collective"] = program.rpartition("/")[2]
    if isinstance(version := config.get("nccl_tests_version"), str):
        found["version"] = version
    rows = [row for result in data["results"] if isinstance(result, dict) and (row := _row(result, found, columns))]
    bounds, average = data.get("out_of_bounds"), data.get("average_bus_bandwidth")
    if isinstance(bounds, dict) and (count := _whole(bounds.get("count"))) is not None:
        found["out_of_bounds"], found["failed"] = count, _truth(bounds.get("okay")) is False or count > 0
    if isinstance(average, dict) and not math.isnan(number := _number(average.get("bandwidth"))):
        found["averages"] = [number]
    return found, rows, devices


def _row(result: dict[str, Any], found: dict[str, Any], columns: tuple[str, ...]) -> dict[str, Any] | None:
    size, count = _whole(result.get("size")), _whole(result.get("count"))
    if size is None or count is None:
        return None
    row: dict[str, Any] = dict.fromkeys(columns)
    row |= {"run": 0, "size_B": size, "count": count, "root": _whole(result.get("root"))}
    row |= {key: result[key] if isinstance(result.get(key), str) else None for key in ("type", "redop")}
    for key, side in _SIDES:
        placement = result.get(key)
        if isinstance(placement, dict):
            found["cpu_time"] = "cpu_time" in placement
            row[f"{side}time_us"] = _number(placement.get("cpu_time", placement.get("time")))
            row[f"{side}algbw_GBps"] = _number(placement.get("alg_bw"))
            row[f"{side}busbw_GBps"] = _number(placement.get("bus_bw"))
            row[f"{side}wrong"] = _whole(placement.get("nwrong"))
        stats = result.get(f"{key}_per_iter")
        if isinstance(stats, dict):
            row |= {side + name: _number(stats.get(name)) for name in _STATS}
    return row


def _devices(listed: Any) -> list[dict[str, Any]]:
    """Version 3 says hostname, device_hex, device_info; others host."""
    return [
        {
            "run": 0,
            **{key: _whole(one.get(key)) for key in ("rank", "group", "pid", "device")},
            "host": _text(one.get("hostname", one.get("host"))),
            "bus_id": _text(one.get("device_hex")),
            "name": _text(one.get("device_info")),
        }
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict)
    ]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float:
    """A number, or its text ("nan"); NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _whole(value: Any) -> int | None:
    number = _number(value)
    return round(number) if math.isfinite(number) and abs(number) < 2**63 else None


def _truth(value: Any) -> bool | None:
    """nccl-tests writes "true" and "false" as text, and "unchecked" where nothing was compared."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None
