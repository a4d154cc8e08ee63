"""`ddplab nccl log | tests | model | sweep`: what they print and refuse, never their insides."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from ddplab.cli import main
from ddplab.nccl import tuning_model

DATA = Path(__file__).parent / "data" / "nccl"


@pytest.fixture
def call(capsys):
    """`call("log", ...)`: (exit code, standard output, standard error) of `ddplab nccl log ...`."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["nccl", *argv])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return run


def test_log_says_what_is_wrong_first(call):
    code, out, _ = call("log", str(DATA / "nccl_log_2.30.txt"))
    assert code == 1 and out.startswith("WARNING of node-a pid 4101")
    assert "2 of 2 edges over P2P: P2P/CUMEM/read" in out
    code, out, _ = call("log", str(DATA / "nccl_log_interleaved.txt"))
    assert code == 0 and "host memory" in out


def test_log_as_json_and_as_a_table(call, tmp_path):
    code, out, _ = call("log", str(DATA / "nccl_log_2.30.txt"), "--json")
    said = json.loads(out)
    assert code == 1 and said["version"] == [2, 30, 7] and said["ranks"] == 2
    assert said["transports"][0] == {"src": 0, "dst": 1, "transport": "P2P/CUMEM/read"}
    assert [row["op_count"] for row in said["calls"]] == [0, 26]
    _, out, _ = call("log", str(DATA / "nccl_log_2.30.txt"), "--table", "calls", "--csv", "-")
    assert [row["nbytes"] for row in csv.DictReader(io.StringIO(out))] == ["1048576", "1048576"]
    place = tmp_path / "edges.csv"
    _, out, _ = call("log", str(DATA / "nccl_log_2.30.txt"), "--table", "edges", "--csv", str(place))
    assert "P2P/CUMEM/read" in out and place.read_text().count("\n") == 3
    edges = place.read_text()
    place.unlink()
    _, out, _ = call("log", str(DATA / "nccl_log_2.30.txt"), "--table", "edges", "--csv", str(place), "--json")
    assert json.loads(out)["ranks"] == 2 and place.read_text() == edges


def test_log_reads_standard_input_and_several_files(call, monkeypatch):
    text = io.TextIOWrapper(io.BytesIO((DATA / "nccl_log_interleaved.txt").read_bytes()))
    monkeypatch.setattr(sys, "stdin", text)
    assert call("log", "-")[0] == 0
    assert call("log", *(str(DATA / f"nccl_log_{name}.txt") for name in ("2.30", "interleaved")))[0] == 1


def test_log_obeys_no_control_characters(call, tmp_path):
    place = tmp_path / "a.log"
    place.write_text("\nn:1:2 [0] a.cc:1 NCCL WARN \x07beep \x1b]0;title\x07 end\n")
    _, out, _ = call("log", str(place))
    assert "\x07" not in out and "\x1b" not in out and "beep" in out


def test_tests_prints_rows_and_verdict(call):
    code, out, _ = call("tests", str(DATA / "nccl_tests_4gpu.txt"))
    assert code == 0 and "3 sizes, 4 ranks, results right" in out and "42.50" in out
    code, out, _ = call("tests", str(DATA / "nccl_tests_wrong.txt"))
    assert code == 1 and "results WRONG" in out
    code, out, _ = call("tests", str(DATA / "nccl_tests_not_mpi.txt"))
    assert code == 0 and "warning: 2 separate runs of 1 rank" in out


def test_tests_as_json_and_csv(call):
    _, out, _ = call("tests", str(DATA / "nccl_tests.json"), "--json")
    said = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert said["rows"][0]["root"] == -1 and said["rows"][0]["inplace_busbw_GBps"] is None
    _, out, _ = call("tests", str(DATA / "nccl_tests_4gpu.txt"), "--csv", "-")
    assert [row["time_us"] for row in csv.DictReader(io.StringIO(out))] == ["42.5", "231.4", "5120.7"]


def test_model_prints_the_figures_of_eight_a100(call):
    code, out, _ = call("model", "--node", "8xA100", "--proto", "LL", "--sizes", "25M")
    assert code == 0 and "fastest ring up to 2.03 MiB" in out
    for figures in (("LL", "15.00", "87.70"), ("LL128", "40.60", "220.8"), ("Simple", "56.00", "240.0")):
        name, latency, busbw = figures
        assert any(line.split()[:3] == ["Ring", name, latency] and busbw in line for line in out.splitlines())
    assert "Ring/LL" in out.splitlines()[-1] and "2.177" in out.splitlines()[-1]


def test_model_as_json(call):
    _, out, _ = call("model", "--node", "8xH100", "--ranks", "4", "--json", "--sizes", "1M,64M")
    said, model = json.loads(out), tuning_model("8xH100", ranks=4)
    assert said["basis"] == "assumed" and said["ranks"] == 4
    assert [row["chosen"] for row in said["rows"]] == ["/".join(model.choose(size)) for size in (2**20, 2**26)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["log", "/no/such/file"], "there is no file /no/such/file"),
        (["log", sys.executable], "no line of NCCL in it"),
        (["log", __file__, "-"], "- is standard input; it comes alone"),
        (["log", __file__, "--csv", "x"], "--csv needs --table"),
        (["log", __file__, "--table", "edges", "--json", "--csv", "-"], "both want standard output"),
        (["check", "--knobs", "--transport", "nvlink"], "--knobs explains variables"),
        (["log", __file__, "--table", "edge"], "unknown table 'edge'; did you mean 'edges'?"),
        (["tests", __file__], "no data rows"),
        (["tests", "/no/such/file"], "there is no file"),
        (["tests", __file__, "--json", "--csv", "-"], "both want standard output"),
        (["model", "--node", "8xa100"], "unknown node '8xa100'; did you mean '8xA100'?"),
        (["model", "--node", ""], "unknown node ''; known: 8xV100, 8xA100, 8xH100, 8xB200"),
        *(
            (["model", "--ranks", text], f"'{text}' is not a count")
            for text in ("0", "-1", "nan", "2.5", "1e3", "9" * 30)
        ),
        *((["model", "--ranks", text], f"known with 2 to 8 GPUs, not {text} (") for text in ("1", "1000000000")),
        (["model", "--node", "8xV100", "--ranks", "7"], "8xV100 is known with 8 GPUs, not 7"),
        *((["model", "--channels", text], "is not a count") for text in ("0", "-1", "nan")),
        (["model", "--channels", "33"], "channels is a whole number from 1 to 32, not 33"),
        *(
            (["model", "--sizes", text], "is not a size")
            for text in ("", ",", "0", "-1", "nan", "inf", "1e400", "1K:2K:1")
        ),
        (["model", "--sizes", "9" * 40], "is too large"),
        (["model", "--proto", "ll"], "unknown protocol 'll'; did you mean 'LL'?"),
        (["model", "--algo", ""], "unknown algorithm ''; known: Ring, Tree, NVLS"),
        (["model", "--ranks", "9"], "8xA100 is known with 2 to 8 GPUs, not 9 ("),
        (["model", "--algo", "NVLS"], "8xA100 does not offer NVLS with LL or LL128 or Simple; it has Tree/LL"),
        (["model", "--sizes", "x"], "x"),
        (["sweep", "nccl_proto", "LL", "LL"], "a knob is an environment variable in capitals"),
        (["sweep", "NCCL_PROTO", "LL"], "at least two"),
        (["sweep", "bucket_cap_mb", "many", "25"], "'many' is no value of bucket_cap_mb"),
        (["sweep", "algorithm", "ring", "rign"], "no algorithm is called 'rign'"),
        (["sweep", "NCCL_PROTO", "unset", "LL", "--rounds", "3"], "at least 8 for 2 values"),
        (["sweep", "NCCL_PROTO", "unset", "LL", "--size", "1K,2K"], "one size"),
    ],
)
def test_bad_input_gets_one_sentence(call, argv, message):
    code, out, err = call(*argv)
    assert code in (1, 2) and out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"ddplab nccl {argv[0]}: ") and message in err
