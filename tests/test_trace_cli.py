"""`ddplab trace`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddplab.cli import main

TRACES = Path(__file__).parents[1] / "labs" / "data" / "traces"
SAMPLES = Path(__file__).parent / "data" / "trace"


def run(capsys, *argv: object) -> tuple[int, str, str]:
    code = main(["trace", *map(str, argv)])
    return code, *capsys.readouterr()


def test_tables_on_a_terminal(capsys, monkeypatch):
    code, out, err = run(capsys, TRACES / "dlrm_8xV100")
    assert (code, err) == (0, "")
    assert "5 of 8" in out and "9.710" in out and "4.50 %" in out
    monkeypatch.setenv("COLUMNS", "80")
    code, narrow, _ = run(capsys, TRACES / "dlrm_8xV100")
    tables = narrow.partition("\nAdvice")[0]
    assert code == 0 and max(map(len, tables.splitlines())) <= 80
    assert "busbw" in tables and "5 of 8" in tables


def test_json_is_json_and_csv_and_html_are_written(capsys, tmp_path):
    code, out, err = run(
        capsys, SAMPLES / "trace_overlap.json", "--json", "--csv", tmp_path / "tables", "--html", tmp_path / "page.html"
    )
    assert code == 0
    found = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found["overlap"][0]["overlap_pct"] == 62.5
    assert (tmp_path / "tables" / "overlap.csv").read_text().splitlines()[1] == "1,80000,50000,30000,62.5"
    assert "62.5" in (tmp_path / "page.html").read_text("utf8")
    assert "page.html" in err and "overlap.csv" in err


def test_own_communication_kernels(capsys, tmp_path):
    text = (
        (SAMPLES / "trace_overlap.json")
        .read_text()
        .replace("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "deep_ep::dispatch")
    )
    (tmp_path / "t.json").write_text(text)
    assert "no communication" in run(capsys, tmp_path / "t.json")[1]
    assert "62.50 %" in run(capsys, tmp_path / "t.json", "--comm", "deep_ep")[1]


@pytest.mark.parametrize(
    "argv, reason",
    [
        ([SAMPLES / "trace_truncated.json"], "line 37, column 8: the file ends early, was the job killed?"),
        ([SAMPLES / "trace_latin1.json"], "line 45, column 16: byte 0xe9 is not UTF-8"),
        ([SAMPLES / "gone.json"], "there is no such file or folder"),
        (["a" * 300], "cannot be read: the name is too long"),
        ([SAMPLES.parent], "holds no .json or .json.gz file; there are some in"),
        ([__file__], "this is no JSON"),
        ([SAMPLES / "trace_overlap.json", "--comm", "("], "no regular expression"),
        (
            [SAMPLES / "trace_overlap.json", "--csv", "/proc/nothing"],
            "cannot write '/proc/nothing': no folder can be made there",
        ),
        ([SAMPLES / "trace_overlap.json", "--html", "/proc/nothing/x.html"], "there is no folder '/proc/nothing'"),
        ([], "PATH"),
    ],
)
def test_one_sentence_for_what_cannot_be_done(capsys, argv, reason):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert reason in err and err.count("\n") == 1 and "Traceback" not in err


def test_partial_reads_what_is_whole(capsys):
    code, out, _ = run(capsys, SAMPLES / "trace_truncated.json", "--partial")
    out = " ".join(out.split())  # a long path breaks the lines elsewhere
    assert code == 0 and "50.00 %" in out and "left out 1 damaged place" in out
