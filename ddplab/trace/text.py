"""A report for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddplab.trace.report import TraceReport

_MOST = 20  # rows of a table that are printed; the tables themselves have all


def text(report: TraceReport) -> str:
    """Breakdown, steps, collectives, stragglers and notes, each as an aligned table; times in ms, rounded."""
    blocks = [_breakdown(report)]
    if len(report.steps):
        blocks.append(_steps(report))
    blocks.append(_collectives(report) if len(report.collectives) else "no communication: overlap is not defined")
    if len(report.stragglers):
        blocks.append(_stragglers(report))
    if report.advice:
        blocks.append("Advice\n" + "\n".join(f"  {piece}" for piece in report.advice))
    if report.notes:
        blocks.append("Notes\n" + "\n".join(f"  {note}" for note in report.notes))
    return "\n\n".join(blocks)


def _breakdown(report: TraceReport) -> str:
    rows = [
        (
            _known(row["rank"]),
            row["device"],
            *(f"{row[name] / 1e6:.3f}" for name in ("span_ns", *_PARTS)),
            _percent(overlap),
        )
        for row, overlap in zip(report.breakdown.to_dict("records"), report.overlap["overlap_pct"], strict=True)
    ]
    head = ["rank", "on", "span_ms", "compute", "overlapped", "exposed", "memory", "idle", "overlap"]
    return "Where the time went (ms; five parts sum to the span)\n" + _table(head, rows)


_PARTS = ("compute_only_ns", "overlapped_ns", "exposed_comm_ns", "memory_only_ns", "idle_ns")


def _steps(report: TraceReport) -> str:
    rows = [
        (
            row["step"],
            _known(row["rank"]),
            *(f"{row[name] / 1e6:.3f}" for name in ("span_ns", *_PARTS)),
            _percent(row["exposed_pct"]),
        )
        for row in report.steps.sort_values("step", kind="stable").to_dict("records")
    ]
    head = ["step", "rank", "span_ms", "compute", "overlapped", "exposed", "memory", "idle", "exposed/step"]
    return "Steps\n" + _table(head, rows)


def _collectives(report: TraceReport) -> str:
    rows = []
    for row in report.collectives.to_dict("records"):
        name = row["collective"] if row["collective"] != "unknown" else _short(row["kernel"])
        size = None if row["message_bytes"] is None else int(row["message_bytes"])
        times = (
            "-" if row[key] is None else f"{row[key] / 1e3:.3f}"
            for key in ("total_us", "median_us", "p99_us", "transfer_us", "wait_us")
        )
        speed = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("algbw_GBps", "busbw_GBps"))
        rows.append((name, _known(row["group_size"]), _known(row["dtype"]), _known(size), row["count"], *times, *speed))
    head = [
        "collective",
        "n",
        "dtype",
        "bytes",
        "count",
        "total_ms",
        "median",
        "p99",
        "transfer",
        "waiting",
        "algbw_GB/s",
        "busbw",
    ]
    return "Collectives (ms on a rank; bandwidth by the shortest run over the ranks)\n" + _table(head, rows)


def _stragglers(report: TraceReport) -> str:
    rows = [
        (
            row["rank"],
            f"{row['lag_us'] / 1e3:.3f}",
            f"{row['worst_us'] / 1e3:.3f}",
            _known(row["worst_step"]),
            f"{row['held_up']} of {row['collectives']}",
            f"{row['caused_us'] / 1e3:.3f}",
            f"{row['waited_us'] / 1e3:.3f}",
            _known(row["cause"]),
        )
        for row in report.stragglers.to_dict("records")
    ]
    head = ["rank", "late_ms", "worst", "in step", "held up", "others waited", "waited", "cause"]
    return "Stragglers (late: behind the first rank, summed over the collectives)\n" + _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    body = [[str(value) for value in row] for row in rows]
    shown = [list(head), *body[:_MOST]]
    widths = [max(len(line[i]) for line in shown) for i in range(len(head))]
    left = [not any(line[i][:1].isdigit() for line in body) for i in range(len(head))]
    lines = (
        "  ".join(
            cell.ljust(width) if words else cell.rjust(width)
            for cell, width, words in zip(line, widths, left, strict=True)
        )
        for line in shown
    )
    more = [f"… {len(body) - _MOST} more"] if len(body) > _MOST else []
    return "\n".join("  " + line.rstrip() for line in [*lines, *more])


def _known(value: Any) -> Any:
    return "-" if value is None else value


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} %"


def _short(kernel: str) -> str:
    name = kernel.split("(")[0]
    return name if len(name) <= 32 else name[:31] + "…"
