"""The command line: what it prints, what it refuses, and that it never shows its insides."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddplab.cli import COMMANDS, main, output, values

ROOT = Path(__file__).parents[1]


def call(*argv: str, **keywords) -> subprocess.CompletedProcess:
    """`python -m ddplab ...` as a user types it."""
    # Python's own environment: readline, which pytest loads, has put COLUMNS into the one that a child would inherit.
    keywords = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT, "env": dict(os.environ), **keywords}
    return subprocess.run([sys.executable, "-m", "ddplab", *argv], **keywords)


def strict_json(text: str):
    """Parse JSON as the standard has it: Python's reader would let NaN and Infinity pass."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


# ---------------------------------------------------------------- help


def test_help_of_every_command_loads_nothing_heavy_and_shows_an_example():
    script = """
import contextlib, io, json, sys
from ddplab.cli import COMMANDS, main
texts = {}
for command in ("", *COMMANDS):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*command.split(), "--help"]) == 0
    texts[command] = out.getvalue()
heavy = {"torch", "pandas", "numpy", "matplotlib", "papermill", "nbformat"} & set(sys.modules)
print(json.dumps([texts, sorted(heavy)]))
"""
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    texts, heavy = json.loads(done.stdout)
    assert heavy == []
    for command, text in texts.items():
        assert f"example:\n  ddplab {command}" in text
        assert max(map(len, text.splitlines())) <= 80, text
    for command in COMMANDS:
        assert command in texts[""]


def test_version_is_the_package_version(capsys):
    import ddplab

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddplab {ddplab.__version__}\n"


def test_no_command_shows_the_overview_and_help_takes_a_command(capsys):
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out
    assert main(["help", "predict"]) == 0
    assert "usage: ddplab predict" in capsys.readouterr().out


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("predct", "did you mean 'predict'"),
        ("frobnicate", "commands are doctor"),
        ("--ranks 4", "a command comes first"),
        ("predict --rank 4", "did you mean '--ranks'"),
        ("predict --ranks 0", "--ranks: '0' is not a count"),
        ("predict --ranks -3", "--ranks: '-3' is not a count"),
        ("predict --ranks four", "--ranks: 'four' is not a count"),
        ("predict --ranks", "--ranks: expected one argument"),
        ("predict --size 12Q", "--size: '12Q' is not a size"),
        ("predict --size 1K:2K", "'1K:2K' is more than one size"),
        ("predict --size -1K", "--size: '-1K' is not a size"),
        ("predict --size 1e3", "--size: '1e3' is not a size"),
        ("predict --size 2000000G", "--size: '2000000G' is too large: a size is at most 1 PiB"),
        ("bench all_reduce --sizes 1K:2000000G", "'2000000G' is too large"),
        ("predict --size nan", "'nan' is not a size"),
        ("predict --link fast", "--link: "),
        ("predict --link -1gbit", "--link: Link '-1gbit' is not a rate"),
        ("predict --link -.5gbit", "--link: Link '-.5gbit' is not a rate"),
        ("predict -1gbit", "unknown option '-1gbit'"),
        ("predict --latency-us 0", "--latency-us: '0' is not a time"),
        ("predict --schedule rnig", "did you mean 'ring'"),
        ("predict --schedule halving_doubling --ranks 6", "power of two"),
        ("predict --ranks 6 --ranks-per-host 4", "6 ranks do not fill hosts of 4"),
        ("predict --ranks 8 --ranks-per-host 4", "--inner-link"),
        ("predict --ranks 5000 --schedule star", "closed form"),
        ("predict extra", "unknown argument 'extra'"),
        ("bench all_redcue", "did you mean 'all_reduce'"),
        ("bench all_reduce --ranks 0", "--ranks: '0' is not a count"),
        ("bench all_reduce --sizes 64M:1K", "run backwards"),
        ("bench all_reduce --sizes 1K:64M:1", "is not a size"),
        ("bench all_reduce --sizes 1K:2K:3:4", "is not a size"),
        ("bench all_reduce --sizes 1K,,2K", "is not a size"),
        ("bench all_reduce --algorithms ring,strar", "did you mean 'star'"),
        ("bench all_reduce --link fast", "--link: "),
        ("bench all_reduce --csv /nowhere/at/all.csv", "cannot write '/nowhere/at/all.csv'"),
        ("bench all_reduce --csv /", "cannot write '/'"),
        ("labs cpy", "did you mean 'copy'"),
        ("book opn", "did you mean 'open'"),
        ("book --timeout 0", "--timeout: '0' is not a time"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(capsys, line, says):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith("ddplab") and err.count("\n") == 1


def test_a_mistake_as_a_user_sees_it():
    done = call("predict", "--link", "fast")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_under_torchrun_one_rank_reports_a_mistake(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["predct"]) == 2
    assert capsys.readouterr().err == ""


def test_an_interrupt_ends_with_130_and_no_traceback(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("ddplab.cli.predict.run", interrupted)
    assert main(["predict"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_left_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = call("predict", capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_said_in_one_sentence():
    with open("/dev/full", "w") as full:
        done = call("predict", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "ddplab: cannot write to standard output: the disk is full\n"


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("64K", 65536),
        ("64KiB", 65536),
        ("64KB", 64000),
        ("1.5M", 1572864),
        ("102.4MB", 102_400_000),
    ],
)
def test_sizes_are_binary_unless_a_decimal_unit_is_written(text, nbytes):
    assert values.size(text) == nbytes


def test_a_sweep_multiplies_until_its_end():
    assert values.sizes("1K:8K") == [1024, 2048, 4096, 8192]
    assert values.sizes("1K:9K") == [1024, 2048, 4096, 8192]
    assert values.sizes("1K:64K:4") == [1024, 4096, 16384, 65536]
    assert values.sizes("5,1K") == [5, 1024]


def test_names_may_be_written_with_dashes():
    assert values.many_of(values.SCHEDULES, "algorithm")("ring, halving-doubling,ring") == ["ring", "halving_doubling"]


# ---------------------------------------------------------------- output


def test_json_never_holds_nan(capsys):
    import numpy as np

    output.print_json({"a": math.nan, "b": [np.float64("inf"), np.int64(3)], 4: np.float32(0.5), "c": True, "d": "x"})
    assert strict_json(capsys.readouterr().out) == {"a": None, "b": [None, 3], "4": 0.5, "c": True, "d": "x"}


def test_a_table_aligns_and_shows_unknown_as_a_dash():
    rows = [{"name": "ring", "n": 1.5}, {"name": "halving", "n": math.nan}, {"name": "x", "n": 123456.789}]
    lines = output.table(rows, {"name": "name", "n": "time_ms"}).splitlines()
    assert lines == ["name     time_ms", "ring       1.500", "halving        -", "x         123457"]


def test_csv_is_whole_or_absent(tmp_path):
    place = tmp_path / "rows.csv"
    place.write_text("old")
    with pytest.raises(RuntimeError), output.csv_file(str(place)) as rows:
        rows.append({"a": 1})
        raise RuntimeError
    assert place.read_text() == "old" and os.listdir(tmp_path) == ["rows.csv"]
    with output.csv_file(str(place)) as rows:
        rows += [{"size_B": 1024, "time_us": 1.5}, {"size_B": 2048, "time_us": math.nan}]
    assert place.read_text() == "size_B,time_us\n1024,1.5\n2048,\n"
    assert os.listdir(tmp_path) == ["rows.csv"]


def test_csv_through_a_link_keeps_the_link_and_a_device_stays_a_device(tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    with output.csv_file(str(tmp_path / "link.csv")) as rows:
        rows.append({"a": 1})
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "real.csv").read_text() == "a\n1\n"
    with output.csv_file(os.devnull) as rows:
        rows.append({"a": 1})
    assert Path(os.devnull).is_char_device()


# ---------------------------------------------------------------- predict


def predicted(capsys, line: str) -> dict:
    assert main(["predict", "--json", *line.split()]) == 0
    return strict_json(capsys.readouterr().out)


def test_predict_gives_the_closed_forms(capsys):
    """Ring, star, tree, halving-doubling on 8 hosts, 100 MiB, from the textbook's formulas with the printed link."""
    found = predicted(capsys, "--ranks 8 --size 100M --link 10gbit")
    rows = {row["schedule"]: row for row in found["rows"]}
    alpha, rate, nbytes = found["link"]["latency_s"], found["link"]["payload_Bps"], 100 * 2**20
    assert found["size_B"] == nbytes and found["link"]["rate_Bps"] == 1.25e9
    want = {
        "ring": 14 * (alpha + nbytes / 8 / rate),
        "star": 2 * (alpha + 7 * nbytes / rate),
        "tree": 6 * (alpha + nbytes / rate),
        "halving_doubling": 6 * alpha + 2 * nbytes * 7 / 8 / rate,
        "direct": 2 * (alpha + nbytes * 7 / 8 / rate),
    }
    for name, seconds in want.items():
        assert rows[name]["seconds"] == pytest.approx(seconds, rel=0.01), name
    assert rows["ring"]["sent_max_B"] == 2 * 7 / 8 * nbytes
    assert rows["star"]["sent_max_B"] == 7 * nbytes
    assert rows["ring"]["busbw_GBps"] == pytest.approx(rows["ring"]["algbw_GBps"] * 7 / 4)
    assert "hierarchical" not in rows


def test_predict_of_one_schedule_and_of_one_rank(capsys):
    found = predicted(capsys, "--schedule ring --ranks 4")
    assert [row["schedule"] for row in found["rows"]] == ["ring"]
    alone = predicted(capsys, "--ranks 1")
    assert all(row["seconds"] == 0 and row["algbw_GBps"] is None for row in alone["rows"])


def test_predict_of_many_ranks_uses_the_closed_form(capsys):
    found = predicted(capsys, "--ranks 100000 --size 100M --link 100gbit")
    alpha, rate, n = found["link"]["latency_s"], found["link"]["payload_Bps"], 100_000
    (row,) = found["rows"]
    assert row["seconds"] == pytest.approx(2 * (n - 1) * (alpha + 100 * 2**20 / n / rate), rel=0.01)


def test_predict_of_hosts_with_several_ranks_has_the_two_level_ring(capsys):
    found = predicted(capsys, "--ranks 8 --ranks-per-host 4 --link 1gbit --inner-link 100GB/s")
    rows = {row["schedule"]: row for row in found["rows"]}
    # Two hosts: each host's link carries 2 (hosts - 1) / hosts of the buffer.
    assert rows["hierarchical"]["busiest_link_B"] == pytest.approx(100 * 2**20, rel=1e-6)


def test_predict_leaves_out_what_the_ranks_do_not_allow_and_says_why(capsys):
    assert main(["predict", "--ranks", "6"]) == 0
    out = capsys.readouterr().out
    assert "power of two" in out and max(map(len, out.splitlines()[:10])) <= 80


def test_predict_reads_on_an_ascii_terminal_without_torch():
    done = call(
        "predict", "--size", "25.6MB", env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPROFILEIMPORTTIME": "1"}
    )
    assert done.returncode == 0 and "ring" in done.stdout and "\033" not in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "numpy" in loaded and not {"torch", "pandas"} & loaded


# ---------------------------------------------------------------- bench


def test_bench_measures_real_ranks_and_writes_the_same_rows_twice(tmp_path, capfd):
    place = tmp_path / "rows.csv"
    line = "bench all_reduce --ranks 2 --sizes 1K:4K:4 --algorithms ring,backend --iters 3 --json --csv"
    assert main([*line.split(), str(place)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    found = strict_json(out)
    rows = found["rows"]
    assert (found["basis"], found["ranks"], found["backend"]) == ("measured", 2, "gloo")
    assert [(row["size_B"], row["algorithm"]) for row in rows] == [
        (size, name) for size in (1024, 4096) for name in ("ring", "backend")
    ]
    for row in rows:
        assert row["errors"] == 0 and row["sent_B"] is None and row["busbw_pct"] is None
        assert row["algbw_GBps"] == pytest.approx(row["size_B"] / row["time_us"] / 1e3)
        assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"])  # 2 (n - 1) / n is 1 for two ranks
    with place.open(newline="") as file:
        again = [{key: text for key, text in row.items()} for row in csv.DictReader(file)]
    assert [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows] == again


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--ranks 4", "torchrun started 2"),
        ("--link 1gbit", "leave it out under torchrun"),
    ],
)
def test_bench_refuses_what_contradicts_the_torchrun_job(capsys, monkeypatch, line, says):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "all_reduce", *line.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--op maximum", "'maximum'"),
        ("--dtype float12", "'float12'"),
        ("--dtype int32 --op mean", "int32"),
        ("--algorithms halving_doubling --ranks 6", "power of two"),
        ("--ranks 6 --ranks-per-host 4", "do not fill"),
        ("--ranks 4 --ranks-per-host 2", "needs --link"),
        ("--json --csv -", "standard output"),
        ("--link 100gbit", "34 Gbit/s"),
    ],
)
def test_bench_refuses_before_any_rank_starts(capsys, monkeypatch, line, says):
    monkeypatch.setattr(
        importlib.import_module("ddplab.bench"), "launch", lambda *_, **__: pytest.fail("ranks were started")
    )
    assert main(["bench", "all_reduce", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


def test_bench_without_hosts_says_why_and_what_helps(capsys, monkeypatch):
    from ddplab.hosts import Hosts, HostsError

    def refused(self):
        raise HostsError("hosts cannot be emulated here: run as root")

    monkeypatch.setattr(Hosts, "__enter__", refused)
    assert main(["bench", "all_reduce", "--link", "1gbit"]) == 1
    assert "run as root; without --link the ranks talk over loopback" in capsys.readouterr().err


def test_an_interrupted_bench_leaves_nothing_behind(tmp_path):
    line = "bench all_reduce --ranks 2 --sizes 1M --iters 1000000 --link 1gbit --csv"
    running = subprocess.Popen(
        [sys.executable, "-m", "ddplab", *line.split(), str(tmp_path / "rows.csv")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while (
            len(family) < 5 and running.poll() is None and time.monotonic() < deadline
        ):  # holder, server, supervisor, 2 ranks
            time.sleep(0.05)
            family = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert len(family) >= 5, err
    assert (running.returncode, out, err) == (130, "", "")
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive and os.listdir(tmp_path) == []


def test_a_narrow_terminal_gets_a_table_of_80_columns(monkeypatch):
    import pandas as pd

    from ddplab.cli import bench

    row = {name: 1.5 for name in bench._NARROW} | {"algorithm": "halving_doubling", "size_B": 2**30, "errors": 0}
    wide = "# " + "all_reduce on four hosts, " * 5 + "\n#  size\n 1"
    monkeypatch.setattr(importlib.import_module("ddplab.bench"), "table", lambda frame: wide)
    monkeypatch.setenv("COLUMNS", "80")
    text = bench._text(pd.DataFrame([row]), [row])
    assert max(map(len, text.splitlines())) <= 80 and "halving_doubling" in text and "#  size" not in text
    monkeypatch.delenv("COLUMNS")
    assert bench._text(pd.DataFrame([row]), [row]).endswith("\n 1")


# ---------------------------------------------------------------- labs and book

CELLS = [
    {"cell_type": "markdown", "metadata": {}, "source": "# Lab 02: a ring of your own\n\nWords."},
    {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "RANKS = 4", "outputs": []},
    {
        "cell_type": "code",
        "metadata": {"tags": ["solution"]},
        "source": 'def double(x):\n    """Twice x."""\n    return 2 * x',
        "outputs": [],
    },
]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small repository with two labs and a data file; the working folder is inside it."""
    root = tmp_path / "repo"
    for folder in ("book", "labs/data", "ddplab"):
        (root / folder).mkdir(parents=True)
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/intro\n")
    (root / "ddplab/__init__.py").touch()
    (root / "labs/data/digits.csv").write_text("1,2\n")
    (root / "labs/results").mkdir()
    (root / "labs/results/grid.json").write_text("{}")
    for name in ("02_ring", "04_buckets"):
        cells = [
            cell | {"id": f"c{i}"} | ({"execution_count": None} if "outputs" in cell else {})
            for i, cell in enumerate(CELLS)
        ]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nb = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
        (root / f"labs/{name}.ipynb").write_text(json.dumps(nb))
    monkeypatch.chdir(root / "book")
    return root


def test_labs_lists_one_line_each(checkout, capsys):
    assert main(["labs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "02_ring     Lab 02: a ring of your own",
        "04_buckets  Lab 02: a ring of your own",
    ]
    assert main(["labs", "--json"]) == 0
    assert [lab["name"] for lab in strict_json(capsys.readouterr().out)["labs"]] == ["02_ring", "04_buckets"]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_labs_copy_takes_the_answers_out_and_never_overwrites(checkout, tmp_path, capsys):
    mine = tmp_path / "mine/labs"
    assert main(["labs", "copy", str(mine), "2"]) == 0
    assert files(mine) == {"02_ring.ipynb", "data", "data/digits.csv", "results", "results/grid.json"}
    text = (mine / "02_ring.ipynb").read_text()
    assert "Twice x" in text and "return 2 * x" not in text and "NotImplementedError" in text

    (mine / "02_ring.ipynb").write_text("my work")
    capsys.readouterr()
    assert main(["labs", "copy", str(mine)]) == 2
    assert "nothing was copied" in capsys.readouterr().err
    assert files(mine) == {"02_ring.ipynb", "data", "data/digits.csv", "results", "results/grid.json"}
    assert (mine / "02_ring.ipynb").read_text() == "my work"

    assert main(["labs", "copy", str(mine), "--force", "02_ring", "4"]) == 0
    assert files(mine) == {
        "02_ring.ipynb",
        "04_buckets.ipynb",
        "data",
        "data/digits.csv",
        "results",
        "results/grid.json",
    }
    assert (mine / "02_ring.ipynb").read_text() == text


def test_labs_copy_is_whole_or_not_at_all(checkout, tmp_path, capsys, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "02_ring.ipynb").write_text("my work")
    rename, calls = os.rename, []

    def fails_late(source, target):
        calls.append(target)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails_late)
    assert main(["labs", "copy", str(mine), "--force"]) == 1
    assert "No space left on device; nothing was copied" in capsys.readouterr().err
    assert files(mine) == {"02_ring.ipynb"}
    assert (mine / "02_ring.ipynb").read_text() == "my work"


def test_labs_copy_refuses_places_and_names(checkout, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for line, says in {
        "copy": "copy needs a folder",
        f"copy {tmp_path}/new 7": "unknown lab '7'; labs are 02_ring, 04_buckets",
        f"copy {tmp_path}/new 02_rnig": "did you mean '02_ring'",
        f"copy {tmp_path}/file": f"'{tmp_path}/file' is not a folder",
        f"copy {tmp_path}/file/below": f"'{tmp_path}/file' is not a folder",
        f"copy {tmp_path}/dangling": f"'{tmp_path}/dangling' is not a folder",
        f"copy {tmp_path}/{'x' * 300}": "File name too long",
        "copy ~nobody-of-this-name": "cannot find the folder '~nobody-of-this-name'",
        f"copy {checkout}/labs": "the labs' own folder",
        f"list {tmp_path}": "list takes no folder",
    }.items():
        assert main(["labs", *line.split()]) == 2, line
        assert says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_outside_a_checkout_it_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddplab.cli.checkout.__file__", str(tmp_path / "site-packages/ddplab/cli/checkout.py"))
    for command in ("labs", "book"):
        assert main([command]) == 1
        assert "needs a checkout of the repository" in capsys.readouterr().err


def test_a_deleted_working_folder_is_said(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["labs"]) == 1
    assert "was deleted" in capsys.readouterr().err


def test_book_runs_the_pipeline_of_this_checkout(checkout, monkeypatch):
    import ddplab.notebooks

    seen = []
    monkeypatch.setattr(ddplab.notebooks, "main", lambda argv: seen.append(argv) or 3)
    assert main(["book", "--full", "--force", "-p", "RANKS", "8"]) == 3
    assert main(["book", "--timeout", "30"]) == 3
    full, quick = seen
    assert full == [str(checkout), "--build", "--timeout", "3600", "-p", "QUICK", "0", "-p", "RANKS", "8", "--force"]
    assert quick == [str(checkout), "--build", "--timeout", "30"]


def test_book_names_a_package_that_is_missing(checkout, monkeypatch, capsys):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "papermill" else find(name))
    assert main(["book"]) == 1
    assert "without papermill; pip install papermill" in capsys.readouterr().err


def test_book_open_needs_a_built_book(checkout, monkeypatch, capsys):
    import webbrowser

    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert main(["book", "open"]) == 1
    assert "run 'ddplab book' first" in capsys.readouterr().err
    page = checkout / "_build/html/index.html"
    page.parent.mkdir(parents=True)
    page.touch()
    assert main(["book", "open"]) == 0
    assert opened == [page.as_uri()]
