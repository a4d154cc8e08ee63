"""A report for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddplab.trace.report import TraceReport

_MOST = 20  # rows of a table that are printed; the tables themselves have all
_PARTS = {
    "span_ns": "span_ms",
    "compute_only_ns": "compute",
    "overlapped_ns": "overlapped",
    "exposed_comm_ns": "exposed",
    "memory_only_ns": "memory",
    "idle_ns": "idle",
}


def text(report: TraceReport, width: float = math.inf) -> str:
    """Breakdown, steps, collectives, stragglers, advice and notes; times in ms, rounded.

    width: characters that a line may have. A table that is wider goes without its least important columns.
    """
    blocks = [_breakdown(report, width)]
    if len(report.steps):
        blocks.append(_steps(report, width))
    blocks.append(
        _collectives(report, width) if len(report.collectives) else "no communication: overlap is not defined"
    )
    if len(report.stragglers):
        blocks.append(_stragglers(report, width))
    for title, lines in (("Advice", report.advice), ("Notes", report.notes)):
        if lines:
            blocks.append("\n".join([title, *(_wrapped(str(line), width) for line in lines)]))
    return "\n\n".join(blocks)


def _breakdown(report: TraceReport, width: float) -> str:
    rows = [
        [_known(row["rank"]), row["device"], *(_ms(row[part]) for part in _PARTS), _percent(overlap)]
        for row, overlap in zip(report.breakdown.to_dict("records"), report.overlap["overlap_pct"], strict=True)
    ]
    head = ["rank", "on", *_PARTS.values(), "overlap"]
    return "Where the time went (ms; five parts sum to the span)\n" + _table(head, rows, width, ["on", "memory"])


def _steps(report: TraceReport, width: float) -> str:
    rows = [
        [row["step"], _known(row["rank"]), *(_ms(row[part]) for part in _PARTS), _percent(row["exposed_pct"])]
        for row in report.steps.sort_values("step", kind="stable").to_dict("records")
    ]
    head = ["step", "rank", *_PARTS.values(), "exposed/step"]
    return "Steps (ms)\n" + _table(head, rows, width, ["memory", "idle"])


def _collectives(report: TraceReport, width: float) -> str:
    rows = []
    for row in report.collectives.to_dict("records"):
        name = row["collective"] if row["collective"] != "unknown" else _short(row["kernel"])
        size = None if row["message_bytes"] is None else int(row["message_bytes"])
        times = (_us(row[key]) for key in ("total_us", "median_us", "p99_us", "transfer_us", "wait_us"))
        speed = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("algbw_GBps", "busbw_GBps"))
        rows.append([name, _known(row["group_size"]), _known(row["dtype"]), _known(size), row["count"], *times, *speed])
    head = ["collective", "n", "dtype", "bytes", "count", "total_ms", "median", "p99", "transfer", "waiting"]
    spare = ["p99", "algbw", "median", "dtype", "total_ms", "count"]
    title = "Collectives (ms on a rank; GB/s by the shortest run over the ranks)\n"
    return title + _table([*head, "algbw", "busbw"], rows, width, spare)


def _stragglers(report: TraceReport, width: float) -> str:
    rows = [
        [
            row["rank"],
            *(_us(row[key]) for key in ("lag_us", "worst_us")),
            _known(row["worst_step"]),
            f"{row['held_up']} of {row['collectives']}",
            *(_us(row[key]) for key in ("caused_us", "waited_us")),
            _known(row["cause"]),
        ]
        for row in report.stragglers.to_dict("records")
    ]
    head = ["rank", "late_ms", "worst", "in step", "held up", "others waited", "waited", "cause"]
    title = "Stragglers (ms; late: behind the first rank, summed over the collectives)\n"
    return title + _table(head, rows, width, ["waited", "worst"])


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], width: float, spare: Sequence[str]) -> str:
    """Aligned columns, words left and numbers right; without as many of `spare`, in that order, as do not fit."""
    columns = {name: [str(row[i]) for row in rows] for i, name in enumerate(head)}
    count = len(next(iter(columns.values())))

    def wide(name: str) -> int:
        return max(map(len, [name, *columns[name][:_MOST]]))

    for name in spare:
        if sum(wide(each) + 2 for each in columns) <= width:
            break
        del columns[name]
    lines = []
    for i in range(-1, min(count, _MOST)):
        cells = []
        for name, values in columns.items():
            is_number = any(value[:1].isdigit() for value in values)
            cell = values[i] if i >= 0 else name
            cells.append(cell.rjust(wide(name)) if is_number else cell.ljust(wide(name)))
        lines.append("  " + "  ".join(cells).rstrip())
    if count > _MOST:
        lines.append(f"  ... and {count - _MOST} more")
    return "\n".join(lines)


def _wrapped(line: str, width: float) -> str:
    if width == math.inf:
        return "  " + line
    return textwrap.fill(line, int(width), initial_indent="  ", subsequent_indent="    ", break_long_words=False)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f}"


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.3f}"


def _known(value: Any) -> Any:
    return "-" if value is None else value


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} %"


def _short(kernel: str) -> str:
    name = kernel.split("(")[0]
    return name if len(name) <= 32 else name[:29] + "..."
