"""The report's page: whole, safe against any name in a trace, the same numbers as the tables, readable on a phone."""

from __future__ import annotations

import html.parser
import re
import xml.etree.ElementTree as ET

import pytest
from ddp_traces import MIB, Bucket, Step, gpu_trace, healthy, write

from ddplab.trace import analyze_trace
from ddplab.trace.page import page, write_page
from ddplab.trace.picture import lanes

VOID = {"meta", "br"}


class Checker(html.parser.HTMLParser):
    """Collects tags, attributes and visible text; notes what is left open or closed twice."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.words, self.wrong = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style",):
            self.words.append(data)


def checked(text):
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open and not checker.wrong
    return checker


def report(tmp_path, ranks=2, steps=None):
    return analyze_trace(write(tmp_path, [gpu_trace(r, ranks, steps or healthy(3)) for r in range(ranks)]))


def test_a_whole_page_with_the_tables_numbers(tmp_path):
    found = report(tmp_path)
    path = write_page(found, tmp_path / "report.html", "Two ranks & more")
    assert [p.name for p in tmp_path.iterdir() if "html" in p.name] == ["report.html"]
    text = path.read_text("utf-8")
    seen = checked(text)
    words = " ".join(seen.words)
    assert "Two ranks & more" in words and "<title>Two ranks &amp; more</title>" in text
    for row in found.breakdown.to_dict("records"):
        for name in ("span_ns", "compute_only_ns", "overlapped_ns", "exposed_comm_ns", "idle_ns"):
            assert f"{row[name]:,}" in words
    for value in found.collectives["busbw_GBps"]:
        assert f"{value:.3f}" in words
    assert "What to do" not in words  # a healthy job
    for section in ("Where the time went", "Overlap", "Collectives", "Buckets of DDP", "Steps", "Stragglers", "Lanes"):
        assert section in words


def test_it_asks_nobody_for_anything(tmp_path):
    text = page(report(tmp_path))
    seen = checked(text)
    assert (
        "script" not in seen.tags and "link" not in seen.tags and "img" not in seen.tags and "iframe" not in seen.tags
    )
    assert not [value for name, value in seen.attributes if name in ("src", "srcset", "action", "data", "poster")]
    assert all(value.startswith("#") for name, value in seen.attributes if name == "href")
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    outside = set(re.findall(r"(?:https?:)?//[\w.]+", text))
    assert outside <= {"http://www.w3.org"}, outside  # the name of SVG
    assert "url(" not in text and "@import" not in text


def test_light_dark_and_phone(tmp_path):
    text = page(report(tmp_path))
    assert "prefers-color-scheme:dark" in text and "color-scheme:light dark" in text
    assert 'name="viewport" content="width=device-width' in text
    tables, boxes = text.count("<table>"), text.count('<div class="scroll"><table>')
    assert tables == boxes > 4  # each table scrolls by itself


EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;\u202e\x07"


def test_names_from_the_trace_are_escaped(tmp_path):
    trace = gpu_trace(0, 2, [Step([Bucket(97 * MIB, 900, 910, 9000)], 900.0, [("AllReduce", 20, 30, 64)])] * 3)
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel" and event["name"].startswith("nccl"):
            event["name"] = "ncclDevKernel_Generic" + EVIL
            event["args"] |= {"dtype": EVIL, "Process Group Name": EVIL, "Collective name": EVIL}
    folder = write(tmp_path / "<b>folder", [trace])
    found = analyze_trace(folder)
    found.notes.append(EVIL)
    text = page(found, EVIL)
    seen = checked(text)
    assert {"script", "img", "b"}.isdisjoint(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "&lt;script&gt;" in text


def test_advice_is_on_the_page(tmp_path):
    step = Step([Bucket(97 * MIB, 24_000, 24_012, 40_000)], 24_000.0)
    words = " ".join(checked(page(report(tmp_path, 1, [step] * 3))).words)
    assert "What to do" in words and "All gradients are in one bucket of 97.0 MiB" in words


def test_a_trace_without_communication(tmp_path):
    words = " ".join(checked(page(report(tmp_path, 1, [Step([], 900.0)] * 2))).words)
    assert "No communication in this trace." in words


def test_long_tables_are_folded_and_cut(tmp_path):
    text = page(report(tmp_path, 1, healthy(150)))
    assert "<summary>" in text and "more rows are left out here" in text
    assert len(text) < 600_000


def boxes(svg, name):
    """(left, width) of each box of a lane, of all ranks."""
    found = []
    for path in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        if path.get("class") == f"lane-{name}":
            found += [(float(a), float(w)) for a, w in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v11", path.get("d"))]
    return found


def test_lanes_show_the_breakdown(tmp_path):
    """The boxes' widths, in the picture's own units, are the parts of the step's window."""
    found = report(tmp_path, 1)
    step = found.steps.iloc[1]
    svg = lanes(found, int(step["step"]))
    unit = (1000 - 78 - 8) / step["span_ns"]
    for name, part in (("exposed", "exposed_comm_ns"), ("hidden", "overlapped_ns")):
        drawn = sum(width for _, width in boxes(svg, name))
        assert drawn == pytest.approx(step[part] * unit, abs=0.1 * len(boxes(svg, name)))
    compute = sum(width for _, width in boxes(svg, "compute"))
    assert compute == pytest.approx((step["compute_only_ns"] + step["overlapped_ns"]) * unit, abs=2)
    assert all(78 <= left and left + width <= 993 for name in ("compute", "hidden") for left, width in boxes(svg, name))


def test_lanes_of_the_whole_trace_and_of_none(tmp_path):
    found = report(tmp_path)
    assert "2 ranks over the whole trace" in lanes(found)
    assert lanes(found, ranks=1).count("<text") < lanes(found).count("<text")
    with pytest.raises(ValueError, match="no step 99"):
        lanes(found, 99)


def test_the_real_traces(root):
    for name in ("dlrm_8xV100", "ddp_2xA100_rank0", "resnet_8xMI300X_rank0"):
        text = page(analyze_trace(root / "labs" / "data" / "traces" / name))
        checked(text)
        assert len(text) < 120_000


def test_a_page_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="there is no folder '.*none'; make it first"):
        write_page(report(tmp_path), tmp_path / "none" / "x.html")
    assert not list(tmp_path.glob("*.part"))
