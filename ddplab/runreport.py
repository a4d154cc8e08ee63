"""One page on a run of the notebooks: which failed, with its own error first, and how long each took.

The run writes `_build/report.md`; CI keeps it and shows it as the summary of its job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddplab.results import provenance

if TYPE_CHECKING:
    from ddplab.notebooks import Result

_MOST_LINES = 60  # of a traceback: its end says what happened


def report(results: Sequence[Result], given: Mapping[str, str]) -> str:
    """The page, in Markdown as GitHub shows it. `given`: the parameters of the run, as text."""
    failed = [r for r in results if r.error]
    ran = [r for r in results if not r.kept]
    head = f"{len(failed)} of {len(results)} notebooks failed" if failed else f"{len(results)} notebooks: none failed"
    about = provenance()
    lines = [f"# {head}", ""]
    for result in failed:
        where, error, trace = _parts(result.error)
        lines += [f"**{where}**: {_code(error)}", ""]
        if trace:
            lines += ["<details><summary>Traceback</summary>", "", *_fenced(trace), "", "</details>", ""]
    lines += ["| notebook | seconds | |", "|---|---:|---|"]
    for r in sorted(results, key=lambda r: (r.error is None, -r.seconds)):
        outcome = f"failed: {_code(_parts(r.error)[1])}" if r.error else "unchanged, kept" if r.kept else "ok"
        lines.append(f"| {r.page} | {'' if r.kept else f'{r.seconds:.1f}'} | {outcome} |")
    parameters = ", ".join(f"{name}={value}" for name, value in given.items()) or "the defaults"
    lines += ["", f"{sum(r.seconds for r in ran):.0f} s in {len(ran)} notebooks; parameters: {parameters}."]
    lines += [f"{about['date']}; {about['machine']}; {about['versions']}.", ""]
    return "\n".join(lines)


def write_report(root: Path, results: Sequence[Result], given: Mapping[str, str]) -> Path:
    """Write the page to `_build/report.md`, in one piece, and return its path."""
    path = root / "_build/report.md"
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(report(results, given), "utf8")
    os.replace(part, path)
    return path


def _parts(error: str) -> tuple[str, str, str]:
    """(page and cell, the error in one line, the rest) of a `Result.error`."""
    first, _, rest = error.partition("\n")
    where, _, what = first.partition(": ")
    return where, what, rest.strip()


def _code(text: str) -> str:
    """Text as code, which may stand in a table: no line break, no bar that would end the cell."""
    text = " ".join(text.split()).replace("|", "\\|")
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text[:300]}{pad}{ticks}"


def _fenced(text: str) -> list[str]:
    lines = text.splitlines()
    cut = [f"... {len(lines) - _MOST_LINES} lines before"] * (len(lines) > _MOST_LINES)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}text", *cut, *lines[-_MOST_LINES:], fence]
