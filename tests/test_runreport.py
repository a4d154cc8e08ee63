"""The one-page report on a run of the notebooks."""

from pathlib import Path

from ddplab.notebooks import Result
from ddplab.runreport import report, write_report

ERROR = (
    "labs/02_ring.ipynb, cell 7: CheckError: rank 2, step 1: got A3 | expected `A3+D3`\n"
    "Traceback (most recent call last)\n```\nCheckError: rank 2"
)


def results() -> list[Result]:
    return [
        Result("book/ring.md", 8.04, None, Path("x")),
        Result("labs/02_ring.ipynb", 1.5, ERROR, Path("x")),
        Result("book/knobs.md", 0.0, None, Path("x"), kept=True),
        Result("book/hang.md", 12.3, None, Path("x")),
    ]


def test_what_failed_comes_first_with_its_own_error():
    lines = report(results(), {"RANKS": "8"}).splitlines()
    assert lines[0] == "# 1 of 4 notebooks failed"
    assert lines[2] == (r"**labs/02_ring.ipynb, cell 7**: `` CheckError: rank 2, step 1: got A3 \| expected `A3+D3` ``")
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| labs/02_ring.ipynb", "| book/hang.md", "| book/ring.md", "| book/knobs.md"
    ]  # fmt: skip
    assert rows[0].startswith("| labs/02_ring.ipynb | 1.5 | failed: `` CheckError: rank 2")
    assert rows[2] == "| book/ring.md | 8.0 | ok |" and rows[3] == "| book/knobs.md |  | unchanged, kept |"
    assert "22 s in 3 notebooks; parameters: RANKS=8." in lines


def test_a_traceback_cannot_break_out_of_its_box():
    lines = report(results(), {}).splitlines()
    assert lines.count("````text") == lines.count("````") == 1
    long = Result("a.md", 1.0, "a.md, line 3: E: x\n" + "\n".join(map(str, range(500))), Path("x"))
    text = report([long], {})
    assert "... 440 lines before\n440\n" in text and "\n499\n" in text and "\n439\n" not in text


def test_a_good_run(tmp_path):
    path = write_report(tmp_path, results()[:1], {})
    assert path == tmp_path / "_build/report.md"
    text = path.read_text("utf8")
    assert text.startswith("# 1 notebooks: none failed\n") and "parameters: the defaults." in text
    assert [p.name for p in path.parent.iterdir()] == ["report.md"]
