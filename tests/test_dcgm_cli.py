"""`ddplab links`: live on this machine, replayed texts, verdicts; every mistake in one sentence."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from damage import mangled_bytes

from ddplab.cli import main

DATA = ROOT / "tests/data/dcgm"


def said(capsys: Any, *words: str) -> str:
    assert main(["links", *words]) == 0
    return capsys.readouterr().out


def found(capsys: Any, *words: str) -> dict:
    return json.loads(said(capsys, "--json", *words), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_dmon_is_replayed_against_peaks(capsys):
    answer = found(capsys, "--replay", f"{DATA / 'dmon_4.6.txt'}", "--peak", "nvlink4", "--peak", "pcie5")
    assert answer["kind"] == "dmon" and len(answer["rows"]) == 8 and answer["rows"][0]["tx_GBps"] is None
    nvlink = [row for row in answer["links"] if row["link"] == "NVLink"]
    assert [round(row["mean_pct"], 2) for row in nvlink] == [41.38, 41.38] and nvlink[0]["samples"] == 1
    text = said(capsys, "--replay", f"{DATA / 'dmon_4.6.txt'}")
    assert "186.2" in text and "--peak nvlink4" in text and max(map(len, text.splitlines())) <= 100


def test_the_articles_fields_are_no_bandwidth(capsys, tmp_path):
    path = tmp_path / "dmon.txt"
    path.write_text("#Entity         GPUTL             MCUTL             \nID\nGPU 0           100               62\n")
    text = said(capsys, "--replay", str(path))
    assert "100.0" in text and "203 and 204 (GPUTL, MCUTL) are no bandwidths" in text
    assert found(capsys, "--replay", str(path))["links"] == []


def test_counters_states_and_topology_are_recognised(capsys, monkeypatch):
    two = [str(DATA / f"nvlink_gt_d_t{i}.txt") for i in (0, 1)]
    answer = found(capsys, "--replay", *two, "--interval", "2", "--peak", "nvlink4")
    assert [row["tx_GBps"] for row in answer["rows"]] == [5.12, 0.512]
    assert answer["links"][0]["mean_pct"] == pytest.approx(100 * 10.24 / 25)  # of one link, not of all eighteen
    states = found(capsys, "--replay", str(DATA / "nvlink_s.txt"))
    assert [(g["links_up"], round(g["line_rate_GBps"], 3)) for g in states["gpus"]] == [(2, 53.124), (1, 26.562)]
    assert "Inactive links on GPU 0, GPU 1" in said(capsys, "--replay", str(DATA / "nvlink_s.txt"))
    topology = found(capsys, "--replay", str(DATA / "topo_m_ansi.txt"))
    assert {"from": "GPU1", "to": "NIC0", "path": "SYS"} in topology["cells"] and topology["nics"] == {"NIC0": "mlx5_0"}
    data = (DATA / "topo_m_ansi.txt").read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert "GPU1: NUMA node 1, nearest NIC mlx5_0 (SYS); its nearest NIC is in another" in said(capsys, "--replay", "-")


def test_a_verdict_shows_both_pairs_of_rules(capsys):
    text = said(capsys, "--busbw", "150", "--reference", "235", "--exposed", "20%", "--utilisation", "0.006")
    assert "repair the link first" in text and text.count("article") == 2 and text.count("ours") == 2
    answer = found(capsys, "--busbw", "234.89", "--reference", "234.89", "--exposed", "0.03", "--longest", "0.4")
    assert answer["says"].startswith("healthy")
    assert [rule["holds"] for rule in answer["rules"]] == [None, False, True, True]


def test_the_fields_are_listed(capsys):
    answer = found(capsys, "--fields")["fields"]
    assert {row["id"]: row["unit"] for row in answer}[1011] == "B/s"
    assert "GPUTL" in said(capsys, "--fields")


def test_live_on_this_machine(capsys):
    lines = said(capsys, "--json", "--source", "nic", "--interval", "0.05", "--count", "2").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2 and [row[0]["sample"] for row in rows] == [0, 1]
    assert all(row["tx_GBps"] >= 0 for row in rows[1])
    text = said(capsys, "--interval", "0.05", "--count", "1", "--peak", "10gbit", "--source", "nic")
    assert "NIC counters of this machine" in text and "mean_%" in text and "Against 1.25 GB/s" in text


def test_ctrl_c_ends_it_with_a_summary():
    command = [sys.executable, "-m", "ddplab", "links", "--source", "nic", "--interval", "0.05"]
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    for line in running.stdout:
        if line.lstrip().startswith("0."):  # the first sample
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130 and err == "" and "mean and most" in out


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--replay", "nowhere.txt"], 2, "cannot read 'nowhere.txt': there is no such file"),
        (["--replay", str(ROOT / "LICENSE")], 2, "none of the texts that are read here"),
        (["--replay", str(DATA / "nvidia_smi_fail.txt")], 1, "no driver is loaded"),
        (["--replay", str(DATA / "dmon_header_only_error.txt")], 1, "the profiling module is missing"),
        (["--replay", str(DATA / "nvlink_gt_d_t0.txt")], 2, "one reading of counters has no rate"),
        (["--replay", *[str(DATA / f"nvlink_gt_d_t{i}.txt") for i in (1, 0)]], 2, "counter reset"),
        (["--replay", str(DATA / "nvlink_s.txt"), str(DATA / "nvlink_s.txt")], 2, "reads one file, or two readings"),
        (["--peak", "nvlink9"], 2, "'nvlink9' is no link that has a peak"),
        (["--exposed", "3"], 2, "'3' is not a part; write 0.2 or 20%"),
        (["--busbw", "-3"], 2, "'-3' is not a positive number"),
        (["--fields", "--busbw", "3"], 2, "three different things"),
        (["--fields", "--count", "3"], 2, "--count and --source are for watching"),
        (["--interval", "0"], 2, "'0' is not a time"),
        (["--interval", "1e9"], 2, "interval_s is a number of seconds"),
        (["--source", "gpu"], 2, "unknown source 'gpu'"),
    ],
)
def test_mistakes_are_one_sentence(capsys, words, code, sentence):
    assert main(["links", *words]) == code
    out = capsys.readouterr()
    assert out.out == "" and sentence in out.err and out.err.count("\n") == 1 and "Traceback" not in out.err


def test_a_named_source_that_is_not_here_is_no_success(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["links", "--source", "dcgm", "--count", "1"]) == 1
    assert "install datacenter-gpu-manager" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#Entity NVLTX NVLRX\nID\nGPU 0 5 6\n", "line 3: the values do not stand below their headings"),
        ("#Entity  NVLTX\nID\nGPU 0    5\n#Entity  NVLRX\n", "the heading changes from NVLTX to NVLRX"),
        ("#Entity  NVLTX\nID\nGPU 0    nan\n", "line 3: 'nan' under NVLTX is not a number"),
        ("#Entity  NVLTX\nID\nGPU 0    " + "9" * 10**6, "line 3: "),
        ("#Entity  NVLTX\nID\n", "a heading and no samples"),
        ("#Entity\n", "the heading names no field"),
        ("#Entity  A  A\nGPU 0  1 2\n", "the heading names A twice"),
        ("#Entity " + "X" * 10**6, "a heading and no samples"),
        ("Error \x1b]0;title\x07: lost\n", "DCGM says: Error \\x1b]0;title\\x07: lost"),
        ("", "none of the texts that are read here"),
        ("A" * 10**6, "none of the texts that are read here"),
    ],
)
def test_a_damaged_text_is_one_sentence_that_obeys_no_control_characters(capsys, tmp_path, text, says):
    (tmp_path / "dmon.txt").write_text(text)
    assert main(["links", "--replay", str(tmp_path / "dmon.txt")]) in (1, 2)
    out = capsys.readouterr()
    assert out.out == "" and says in out.err and out.err.count("\n") == 1 and len(out.err) < 700


def test_names_in_a_text_do_not_command_the_terminal(capsys, tmp_path):
    text = (DATA / "nvlink_s.txt").read_text().replace("H100", "H\x1b[31m100\x07")
    (tmp_path / "s.txt").write_text(text)
    out = said(capsys, "--replay", str(tmp_path / "s.txt"))
    assert "\x1b" not in out and "\x07" not in out and "H\\x1b[31m100\\x07" in out


def test_damaged_files_give_a_table_or_one_sentence(capsys, tmp_path):
    """The whole command on 200 files, in bytes; the readers on 2,000 texts of each kind: test_dcgm_fuzz.py."""
    clean = [path.read_bytes() for path in sorted(DATA.glob("*.txt"))]
    for seed in range(200):
        dice = random.Random(seed)
        (tmp_path / "f").write_bytes(mangled_bytes(dice, dice.choice(clean)))
        code, out = main(["links", "--replay", str(tmp_path / "f")]), capsys.readouterr()
        if code:
            assert code in (1, 2) and out.out == "" and out.err.count("\n") == 1 and len(out.err) < 1000, seed
        assert "Traceback" not in out.err and (out.out + out.err).replace("\n", "").replace("\t", "").isprintable(), (
            seed
        )


def test_a_binary_file_is_refused(capsys, tmp_path):
    (tmp_path / "trace.bin").write_bytes(b"GPU\0\1")
    assert main(["links", "--replay", str(tmp_path / "trace.bin")]) == 2
    assert "is not text" in capsys.readouterr().err
