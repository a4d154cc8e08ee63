"""A report as one HTML page that needs nothing else: no script, no network, light and dark, also on a phone."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab import __version__
from ddplab._files import Draft
from ddplab.trace.picture import LANES, MOST_RANKS, lanes

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.trace.advice import Advice
    from ddplab.trace.report import TraceReport

_MOST = 400  # rows of one table; the CSV files have all
_CSS = """
:root{color-scheme:light dark;--ink:#1c2430;--ground:#fff;--soft:#f1f4f8;--line:#cfd6df;--link:#1d5fc4;
--compute:#4b83d6;--hidden:#2e9e5b;--exposed:#d94a55;--memory:#9a60d0;--input:#c98a12}
@media (prefers-color-scheme:dark){:root{--ink:#e4e9f0;--ground:#14181d;--soft:#20262e;--line:#3c4652;--link:#8ab4f8;
--compute:#6ea0ea;--hidden:#43b874;--exposed:#ee6a73;--memory:#b488e4;--input:#dda63a}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem clamp(.8rem,3vw,2.5rem) 3rem;max-width:76rem;color:var(--ink);background:var(--ground);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:.6rem 0}h2{font-size:1.2rem;margin:2rem 0 .4rem}
p,li{max-width:62rem}.dim{opacity:.8;font-size:.9em}
nav a{color:var(--link);margin-right:1rem;white-space:nowrap}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;width:100%;overflow-wrap:normal}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{background:var(--soft);position:sticky;top:0}tr:last-child td{border-bottom:0}
.text{text-align:left;white-space:normal;min-width:5rem;max-width:26rem}
.advice{border-left:4px solid var(--exposed);background:var(--soft);padding:.5rem .8rem;margin:.5rem 0;
border-radius:0 6px 6px 0}
figure{margin:1rem 0}figcaption{font-size:.92em;margin-top:.4rem;max-width:62rem}
svg.lanes{display:block;width:100%;min-width:640px;height:auto;font:12px system-ui,sans-serif}
svg.lanes text{fill:currentColor}.lane-ground{fill:var(--soft)}.lane-tick{stroke:var(--line);stroke-width:1;fill:none}
.bars{display:grid;grid-template-columns:max-content 1fr;gap:.25rem .7rem;align-items:center;font-size:13px}
.bar{display:flex;height:1.2rem;border-radius:3px;overflow:hidden;background:var(--soft)}
.key{display:inline-block;margin:0 1rem 0 0;font-size:13px}
.key::before{content:"";display:inline-block;width:1em;height:.8em;border-radius:2px;margin-right:.35em;background:var(--c)}
summary{cursor:pointer;margin:.4rem 0}
@media print{nav{display:none}.scroll{overflow:visible}}
""" + "".join(f".lane-{name}{{fill:var(--{name})}}.is-{name}{{--c:var(--{name})}}" for name, _ in LANES)  # fmt: skip

_PARTS = (
    ("compute_only_ns", "compute", "compute only"),
    ("overlapped_ns", "hidden", "compute and communication"),
    ("exposed_comm_ns", "exposed", "exposed communication"),
    ("memory_only_ns", "memory", "memory only"),
)
_HIDDEN = ("begin_ns", "start_ns", "kernel")  # moments since 1970, and names that are longer than a phone is wide
_ABOUT = {
    "breakdown": "Where each rank's time went. The five parts sum to the span exactly.",
    "overlap": "Communication hidden behind compute, in parts of all communication.",
    "steps": "The same for each step of each rank.",
    "collectives": "What communicated. Bandwidth counts the shortest run over the ranks: who came early also waits.",
    "buckets": "DDP's buckets, in microseconds since backward began. Exposed lies after backward's own work.",
    "stragglers": "Who was late, summed over the collectives that several ranks' traces hold.",
    "holdups": "For each collective the rank that came last, and what the others paid.",
}


def page(report: TraceReport, title: str = "Trace report") -> str:
    """The whole page as text. Every name that comes from a trace is escaped."""
    sections = [*_sections(report)]
    jumps = "".join(f'<a href="#{key}">{html.escape(heading)}</a>' for key, heading, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{html.escape(head)}</h2>{inner}</section>' for key, head, inner in sections
    )
    ranks = f"{len(report.traces)} rank{'s' * (len(report.traces) != 1)}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{_CSS}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{ranks}. Made by ddplab {__version__}.</p><nav>{jumps}</nav>"
        f"{body}</body></html>\n"
    )


def write_page(report: TraceReport, path: str | Path, title: str = "Trace report") -> Path:
    """Write the page; it appears whole or not at all. Returns its path. OSError in words where it cannot be written."""
    with Draft(path) as place:
        place.write(page(report, title))
    return Path(path)


def _sections(report: TraceReport) -> Iterable[tuple[str, str, str]]:
    """(anchor, heading, HTML) of each part that the report has something for."""
    if report.advice:
        yield "advice", "What to do", "".join(map(_advice, report.advice))
    yield "breakdown", "Where the time went", _bars(report) + _table(report.breakdown, "breakdown")
    picture = _picture(report)
    if picture:
        yield "lanes", "Lanes", picture
    has = report.overlap["overlap_pct"].notna().any()
    yield "overlap", "Overlap", _table(report.overlap, "overlap") if has else "<p>No communication in this trace.</p>"
    for key, heading in (("stragglers", "Stragglers"), ("collectives", "Collectives"), ("buckets", "Buckets of DDP"),
                         ("steps", "Steps"), ("holdups", "Who held up which collective")):  # fmt: skip
        table = getattr(report, key)
        if len(table):
            yield key, heading, _table(table, key)
    if report.notes:
        notes = "".join(f"<li>{html.escape(str(note))}</li>" for note in report.notes)
        yield "notes", "Notes", f"<ul>{notes}</ul>"


def _advice(advice: Advice) -> str:
    return f'<div class="advice"><p>{html.escape(advice.says)}</p><p>{html.escape(advice.do)}</p></div>'


def _bars(report: TraceReport) -> str:
    """One stacked bar a rank, all on the scale of the longest."""
    rows = report.breakdown.to_dict("records")
    longest = max([row["span_ns"] for row in rows] + [1])
    out = []
    for row in rows:
        cells = "".join(
            f'<span class="lane-{name} is-{name}" style="width:{100 * row[part] / longest:.3f}%;background:var(--c)" '
            f'title="{words}: {row[part] / 1e6:.3f} ms"></span>'
            for part, name, words in _PARTS
        )
        out.append(f"<span>{_label(row['rank'])}</span><div class='bar'>{cells}</div>")
    keys = "".join(f'<span class="key is-{name}">{words}</span>' for _, name, words in _PARTS)
    return f'<p>{keys}<span class="dim">the rest of a bar is idle</span></p><div class="bars">{"".join(out)}</div><br>'


def _picture(report: TraceReport) -> str:
    """Lanes of the step in the middle, or of the whole trace where no steps are annotated."""
    known = sorted(set(report.steps["step"].tolist()))
    step = known[len(known) // 2] if known else None
    try:
        svg = lanes(report, step)
    except ValueError:
        return ""
    keys = "".join(f'<span class="key is-{name}">{words}</span>' for name, words in LANES)
    what = f"Step {step}, the one in the middle" if step is not None else "The whole trace"
    cut = f" The first {MOST_RANKS} of {len(report.traces)} ranks." if len(report.traces) > MOST_RANKS else ""
    return (
        f'<figure><div class="scroll">{svg}</div><figcaption>{what}; each rank by its own clock.{cut} '
        f"What is exposed, the rank waits for.<br>{keys}</figcaption></figure>"
    )


def _table(table: pd.DataFrame, key: str) -> str:
    shown = table.head(_MOST).drop(columns=[name for name in _HIDDEN if name in table])
    text = [name for name in shown.columns if not all(_is_number(v) for v in shown[name] if v is not None)]
    head = "".join(_cell("th", name.replace("_", " "), name in text) for name in shown.columns)
    body = "".join(
        "<tr>" + "".join(_cell("td", _shown(v, n), n in text) for n, v in row.items()) + "</tr>"
        for row in shown.to_dict("records")
    )
    more = f'<p class="dim">{len(table) - _MOST} more rows are left out here.</p>' if len(table) > _MOST else ""
    about = f"<p>{html.escape(_ABOUT[key])}</p>"
    inner = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'
    if len(table) > 24:
        return f"{about}<details><summary>{len(table)} rows</summary>{inner}</details>"
    return about + inner


def _cell(tag: str, value: str, text: bool) -> str:
    return f"<{tag}{' class=text' if text else ''}>{html.escape(value)}</{tag}>"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "dtype")


def _shown(value: Any, column: str) -> str:
    """A number as its column wants it: counts and nanoseconds whole, the others with three decimals; a file's name."""
    if value is None or value != value or str(value) == "<NA>":
        return "–"
    if column.endswith("_ns") or isinstance(value, int) or (hasattr(value, "dtype") and value.dtype.kind in "iu"):
        return f"{int(value):,}" if column.endswith(("_ns", "_bytes")) else str(int(value))
    if column == "file":
        return Path(value).name
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _label(rank: int | None) -> str:
    return f"rank {rank}" if rank is not None else "trace"
