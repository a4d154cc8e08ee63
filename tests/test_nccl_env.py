"""The check of an environment: interface names, misspelt and renamed variables, values, and what they do together."""

from __future__ import annotations

import os
import random
import socket
import string
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from damage import for_seeds

import ddplab
from ddplab.launch import launch
from ddplab.nccl import ask_nccl, check_env, nccl_env
from ddplab.nccl.conf import with_conf_files
from ddplab.nccl.finding import KINDS
from ddplab.nccl.interplay import TRANSPORTS
from ddplab.nccl.knobs import knobs

NAMES = [name for _, name in socket.if_nameindex()]


def problems(**environ: str) -> list[str]:
    return [finding.problem for finding in check_env(environ)]


def test_a_clean_environment_has_no_findings():
    assert check_env({}) == []
    assert check_env({"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}) == []
    assert check_env({"GLOO_SOCKET_IFNAME": "lo"}) == []
    assert check_env({"GLOO_SOCKET_IFNAME": ",".join(NAMES)}) == []


@pytest.mark.parametrize("value", ["^lo,docker", "=lo", "lo", NAMES[-1][:1], "lo,nosuchif0", "^docker", "^=docker0"])
def test_nccls_own_dialect_is_fine(value):
    expected = [] if value != "^lo,docker" or len(NAMES) > 1 else ["no interface is left"]
    assert problems(NCCL_SOCKET_IFNAME=value) == expected


def test_nccls_dialect_given_to_gloo():
    assert problems(GLOO_SOCKET_IFNAME="^lo") == ["gloo takes exact interface names, no ^"]
    assert problems(GLOO_SOCKET_IFNAME="=lo") == ["gloo takes exact interface names, no ="]


@pytest.mark.parametrize("value", ["10.0.0.5", "10.0.0.5/24", "fe80::1"])
def test_an_address_in_place_of_a_name(value):
    assert problems(GLOO_SOCKET_IFNAME=value) == [f"{value} looks like an address, and gloo takes interface names"]
    (problem,) = problems(NCCL_SOCKET_IFNAME=value)
    assert problem.startswith(f"{value} looks like an address, and NCCL takes interface names")


def test_an_unknown_interface_lists_those_that_exist():
    (finding,) = check_env({"GLOO_SOCKET_IFNAME": "nosuchif0"})
    assert (finding.variable, finding.value) == ("GLOO_SOCKET_IFNAME", "nosuchif0")
    assert finding.problem == "there is no interface 'nosuchif0' here"
    assert str(finding) == f"GLOO_SOCKET_IFNAME=nosuchif0: {finding.problem}; choose from {', '.join(NAMES)}"
    assert problems(NCCL_SOCKET_IFNAME="nosuchif0") == ["no interface here matches"]
    assert problems(NCCL_SOCKET_IFNAME="=l") == ["no interface here matches"]
    assert problems(NCCL_SOCKET_IFNAME="^" + ",".join(NAMES)) == ["no interface is left"]
    assert problems(NCCL_SOCKET_IFNAME="^=" + ",".join(NAMES)) == ["no interface is left"]


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    for name in [name for name in os.environ if name in knobs()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    assert [finding.variable for finding in check_env()] == ["GLOO_SOCKET_IFNAME"]


def test_gloo_and_torch_agree_with_the_verdicts():
    def judge(cases):
        verdicts = []
        for name, value in cases:
            with nccl_env({"GLOO_SOCKET_IFNAME": "lo", name: value}):
                try:
                    dist.new_group(backend="gloo")
                    verdicts.append(True)
                except RuntimeError:
                    verdicts.append(False)
        return verdicts

    cases = [("GLOO_SOCKET_IFNAME", value) for value in ("lo", "", "^lo", "nosuchif0", "10.0.0.5")]
    cases += [("TORCH_GLOO_LAZY_INIT", value) for value in ("1", "Yes", "f", "on", "2", "")]
    assert launch(judge, cases, ranks=1, device="cpu") == [[check_env({name: value}) == [] for name, value in cases]]


# ---------------------------------------------------------------- names


def only(**environ: str):
    """The one finding about these variables."""
    (finding,) = check_env(environ)
    return finding


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_ALGOS", "NCCL_ALGO"),
        ("NCCL_BUFSIZE", "NCCL_BUFFSIZE"),
        ("NCCL_IB_HCAS", "NCCL_IB_HCA"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("CCL_DEBUG", "NCCL_DEBUG"),
        ("NCLL_DEBUG", "NCCL_DEBUG"),
        ("NCC_DEBUG", "NCCL_DEBUG"),
        ("nccl_debug", "NCCL_DEBUG"),
        ("TORCH_NCLL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
        ("TORCH_FR_BUFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("GLOO_SOCKET_IFNAMES", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_misspelt_name(name, meant):
    finding = only(**{name: "1"})
    assert finding.problem == f"unknown, did you mean {meant}"
    assert (finding.remedy, finding.kind) == (f"write {meant}=1", "unknown")


def test_a_name_that_nobody_reads():
    assert only(NCCL_FLUX_CAPACITOR="on").problem == "unknown: NCCL reads no such variable"


@pytest.mark.parametrize("new", ["BLOCKING_WAIT", "ASYNC_ERROR_HANDLING", "DESYNC_DEBUG", "ENABLE_TIMING"])
def test_torchs_old_names(new):
    finding = only(**{f"NCCL_{new}": "1"})
    assert finding.problem.startswith(f"renamed TORCH_NCCL_{new}")
    assert (finding.remedy, finding.kind) == (f"write TORCH_NCCL_{new}=1", "renamed")


def test_other_old_names():
    assert only(NCCL_MAX_NCHANNELS="16").remedy == "write NCCL_MAX_CTAS=16"
    assert only(NCCL_CHECK_POINTERS="1").remedy == "use NCCL_CHECK_MODE"  # which takes words
    assert only(NCCL_LL_THRESHOLD="0").problem == "removed in 2.5"
    assert only(NCCL_AVOID_RECORD_STREAMS="1").problem.startswith("renamed TORCH_NCCL_AVOID_RECORD_STREAMS")


@pytest.mark.parametrize(
    "name",
    ["PATH", "NCCL_VERSION", "NCCL_HOME", "NCCL_INSPECTOR_ENABLE", "NCCL_TESTS_DEVICE", "OFI_NCCL_PROTOCOL",
     "RCCL_DEBUG", "HCCL_BUFFSIZE", "CCL_LOG_LEVEL", "ALGO", "DEBUG", "TORCH_HOME", "DISTRIBUTED_DEBUG", "RANK"],
)  # fmt: skip
def test_names_of_others_are_left_alone(name):
    assert check_env({name: "1"}) == []


def test_a_variable_that_came_later():
    assert check_env({"NCCL_SYM_CTAS": "8"}, version="2.27.3") == []
    (finding,) = check_env({"NCCL_SYM_CTAS": "8"}, version="2.9.9")
    assert finding.problem == "NCCL 2.9.9 does not know it: it came with 2.27"
    with pytest.raises(ValueError, match="'new' is not a version"):
        check_env({}, version="new")


# ---------------------------------------------------------------- the article


def test_the_four_exports_of_the_article():
    exports = dict(NCCL_ALGO="Ring", NCCL_PROTO="LL", NCCL_NSOCKS_PERTHREAD="4", NCCL_SOCKET_NTHREADS="2")
    found = {finding.variable: finding for finding in check_env(exports)}
    assert list(found) == list(exports)
    assert found["NCCL_ALGO"].kind == found["NCCL_PROTO"].kind == "hurts"
    assert "only Ring" in found["NCCL_ALGO"].problem and "NVLS" in found["NCCL_ALGO"].problem
    assert "latency protocol" in found["NCCL_PROTO"].problem and "large buckets" in found["NCCL_PROTO"].problem
    for name in ("NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS"):
        assert found[name].kind == "no effect"
        assert "only TCP sockets" in found[name].problem
        assert "8 sockets of the default 16" in found[name].problem  # AWS: 2 threads x 8 sockets by default


def test_the_table_of_the_article():
    assert only(NCCL_BUFFSIZE="8MB").problem.startswith("parsed as 8")
    assert only(NCCL_NTHREADS="4").problem == "becomes 512: 4 is not a multiple of 32"
    assert only(NCCL_NTHREADS="2").problem == "becomes 512: 2 is not a multiple of 32"  # its "default"
    assert "forces TCP" in only(NCCL_IB_DISABLE="1").problem
    assert check_env({"NCCL_BUFFSIZE": "4194304", "NCCL_IB_DISABLE": "0"}) == []  # its other defaults, which are right


def test_the_four_exports_on_one_nvlink_machine_and_over_tcp():
    exports = dict(NCCL_NSOCKS_PERTHREAD="4", NCCL_SOCKET_NTHREADS="2")
    problem = "no effect: it belongs to TCP sockets, and nvlink carries the data"
    assert [f.problem for f in check_env(exports, transport="nvlink")] == [problem, problem]
    assert check_env(exports, transport="nvlink+socket") == []


# ---------------------------------------------------------------- together


@pytest.mark.parametrize(
    ("environ", "variable", "says"),
    [
        ("NCCL_NSOCKS_PERTHREAD=4", "NCCL_NSOCKS_PERTHREAD", "without NCCL_SOCKET_NTHREADS there are 0 threads"),
        ("NCCL_SOCKET_NTHREADS=16 NCCL_NSOCKS_PERTHREAD=8", "NCCL_NSOCKS_PERTHREAD", "becomes 4"),
        ("NCCL_PROTO=LL NCCL_BUFFSIZE=8388608", "NCCL_BUFFSIZE", "NCCL_PROTO=LL excludes Simple"),
        ("NCCL_PROTO=^LL", "NCCL_PROTO", "LL128 without NCCL's check"),
        ("NCCL_PROTO=LL128", "NCCL_PROTO", "LL128 without NCCL's check"),
        ("NCCL_PROTO=^LL,LL128,Simple", "NCCL_PROTO", "without a protocol"),
        ("NCCL_ALGO=Tree", "NCCL_ALGO", "leaves Broadcast and Reduce and AllGather and ReduceScatter"),
        ("NCCL_ALGO=allreduce:tree", "NCCL_ALGO", "only Tree"),
        ("NCCL_ALGO=allreduce:PAT", "NCCL_ALGO", "leaves AllReduce without"),
        ("NCCL_IB_DISABLE=1 NCCL_IB_HCA=mlx5", "NCCL_IB_HCA", "switches InfiniBand off"),
        ("NCCL_NET=Socket NCCL_IB_TIMEOUT=22", "NCCL_IB_TIMEOUT", "NCCL_NET=socket"),
        ("NCCL_NET=IB NCCL_SOCKET_NTHREADS=4", "NCCL_SOCKET_NTHREADS", "NCCL_NET=ib"),
        ("NCCL_P2P_DISABLE=1 NCCL_P2P_LEVEL=NVL", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE comes first"),
        ("NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE", "closes NVLink and PCIe"),
        ("NCCL_SHM_DISABLE=1", "NCCL_SHM_DISABLE", "over the network"),
        ("NCCL_NVLS_ENABLE=0", "NCCL_NVLS_ENABLE", "closes NVLink SHARP"),
        ("NCCL_CUMEM_ENABLE=0", "NCCL_CUMEM_ENABLE", "all need cuMem"),
        ("NCCL_MIN_CTAS=32 NCCL_MAX_CTAS=16", "NCCL_MIN_CTAS", "becomes 16"),
        ("NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=1", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE=0"),
        ("NCCL_OOB_NET_IFNAME=mlx5_1", "NCCL_OOB_NET_IFNAME", "without NCCL_OOB_NET_ENABLE"),
        ("NCCL_GRAPH_STREAM_ORDERING=0 NCCL_GRAPH_MIXING_SUPPORT=1", "NCCL_GRAPH_STREAM_ORDERING", "not supported"),
        ("NCCL_DEBUG_SUBSYS=ALL", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG=INFO, which is not set"),
        ("NCCL_DEBUG=WARN NCCL_DEBUG_SUBSYS=ALL", "NCCL_DEBUG_SUBSYS", "which is not set"),
        ("NCCL_DEBUG_FILE=/tmp/nccl.%h.%p", "NCCL_DEBUG_FILE", "without NCCL_DEBUG"),
        ("NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.log", "NCCL_DEBUG_FILE", "one file"),
    ],
)
def test_variables_that_work_against_each_other(environ, variable, says):
    found = [f for f in check_env(dict(part.split("=", 1) for part in environ.split())) if f.variable == variable]
    assert any(says in finding.problem for finding in found), found


@pytest.mark.parametrize(
    "environ",
    [
        "NCCL_ALGO=ring;allreduce:^tree",
        "NCCL_ALGO=^NVLS",
        "NCCL_PROTO=^LL128",
        "NCCL_PROTO=Simple",
        "NCCL_PROTO=LL,Simple",
        "NCCL_PROTO=broadcast:LL128",
        "NCCL_DEBUG=info",
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV NCCL_DEBUG_FILE=/tmp/nccl.%h.%p",
        "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/dev/stderr",
        "NCCL_SOCKET_IFNAME=lo NCCL_CROSS_NIC=1 NCCL_IB_HCA==mlx5_0,mlx5_1",
        "NCCL_MIN_CTAS=8 NCCL_MAX_CTAS=16",
        "TORCH_NCCL_BLOCKING_WAIT=0 TORCH_FR_BUFFER_SIZE=2000 TORCH_DISTRIBUTED_DEBUG=DETAIL",
        "GLOO_SOCKET_IFNAME=lo TORCH_GLOO_LAZY_INIT=1",
    ],
)
def test_what_is_fine_stays_silent(environ):
    assert check_env(dict(part.split("=", 1) for part in environ.split())) == []


def test_every_default_is_fine_and_silent():
    defaults = {k.name: k.default for k in knobs().values() if k.default and k.touch != "gone"}
    ignored = {"NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"}  # set, they are without effect
    assert {finding.variable for finding in check_env(defaults)} <= ignored


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_transport_has_variables_and_others(transport):
    every = {
        "NCCL_SOCKET_NTHREADS": "2",
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_LEGACY_CUDA_REGISTER": "1",
        "NCCL_SHM_LOCALITY": "1",
    }
    silent = set(every) - {finding.variable for finding in check_env(every, transport=transport)}
    expected = {"socket": "NCCL_SOCKET_NTHREADS", "ib": "NCCL_IB_TIMEOUT", "shm": "NCCL_SHM_LOCALITY"}
    expected |= dict.fromkeys(("nvlink", "p2p", "pcie"), "NCCL_LEGACY_CUDA_REGISTER")
    assert silent == ({expected[transport]} if transport in expected else set())


def test_what_chose_the_transport_is_not_without_effect():
    kinds = [finding.kind for finding in check_env({"NCCL_P2P_DISABLE": "1"}, transport="shm")]
    assert kinds == ["hurts"]
    kinds = [finding.kind for finding in check_env({"NCCL_IB_DISABLE": "1"}, transport="socket")]
    assert kinds == ["hurts"]
    kinds = [finding.kind for finding in check_env({"NCCL_IB_DISABLE": "1"}, transport="nvlink")]
    assert kinds == ["hurts", "no effect"]


def test_an_unknown_transport():
    with pytest.raises(ValueError, match="unknown transport 'carrier pigeon'; choose from nvlink, "):
        check_env({}, transport="nvlink+carrier pigeon")


@pytest.mark.parametrize(
    "wrong", [{"environ": {"NCCL_NTHREADS": 4}}, {"environ": {1: "a"}}, {"environ": {}, "transport": 1}]
)
def test_what_is_no_text_is_refused(wrong):
    with pytest.raises(TypeError, match="names and values are text, but "):
        check_env(**wrong)


def test_a_log_tells_transport_and_version():
    log = """\
host:1:1 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
host:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
    environ = {"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SYM_CTAS": "1"}
    assert [finding.problem for finding in check_env(environ, log=log)] == [
        "NCCL 2.21.5 does not know it: it came with 2.27",
        "no effect: it belongs to TCP sockets, and p2p carries the data",
    ]
    assert check_env({"NCCL_SYM_CTAS": "1"}, log=log, version="2.30.7", transport="p2p") == []


# ---------------------------------------------------------------- setting variables for a while


def test_nccl_env_sets_and_restores(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    with nccl_env({"NCCL_DEBUG": "INFO", "NCCL_PROTO": "Simple", "NCCL_ALGO": None}, NCCL_NTHREADS=512) as now:
        assert now == {"NCCL_DEBUG": "INFO", "NCCL_PROTO": "Simple", "NCCL_NTHREADS": "512"}
        assert os.environ["NCCL_NTHREADS"] == "512" and "NCCL_ALGO" not in os.environ
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_ALGO"]) == ("WARN", "Ring")
    assert "NCCL_PROTO" not in os.environ and "NCCL_NTHREADS" not in os.environ


def test_nccl_env_restores_after_an_exception(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    with pytest.raises(ZeroDivisionError), nccl_env({"NCCL_DEBUG": "INFO", "NCCL_PROTO": "LL"}):
        os.environ["NCCL_DEBUG"] = "TRACE"
        del os.environ["NCCL_PROTO"]
        raise ZeroDivisionError
    assert os.environ["NCCL_DEBUG"] == "WARN" and "NCCL_PROTO" not in os.environ


def test_nccl_env_writes_flags_as_nccl_reads_them():
    with nccl_env(NCCL_P2P_DISABLE=True, NCCL_SHM_DISABLE=False) as now:
        assert now == {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0"}
        assert {f.kind for f in check_env() if f.variable in now} == {"hurts"}  # legal values, both


@pytest.mark.parametrize("wrong", [{"": "1"}, {"A=B": "1"}, {"NCCL_DEBUG": "IN\0FO"}])
def test_nccl_env_changes_nothing_when_it_refuses(wrong, monkeypatch):
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    with pytest.raises(ValueError, match="cannot be an environment variable"), nccl_env({"NCCL_ALGO": "Ring"} | wrong):
        pass
    assert "NCCL_ALGO" not in os.environ


# ---------------------------------------------------------------- anything at all

PIECES = [
    "NCCL_",
    "TORCH_",
    "GLOO_",
    "_",
    "^",
    "=",
    ":",
    ";",
    ",",
    "~",
    "%",
    "0x",
    "MB",
    " ",
    "\t",
    "\n",
    "é",
    "９",
    "\x1b[0m",
]


def mangled(draw: random.Random) -> dict[str, str]:
    """An environment of known variables, some with damaged names, with values from anywhere."""
    table, environ = list(knobs().values()), {}
    for _ in range(draw.randint(1, 5)):
        knob = draw.choice(table)
        name, value = (
            knob.name,
            draw.choice([knob.default, "", "1", "-1", "4M", "9" * 40, draw.choice(knob.words or ["x"])]),
        )
        for _ in range(draw.randrange(3)):
            at, piece = draw.randrange(len(value) + 1), draw.choice([*PIECES, draw.choice(string.printable)])
            value = draw.choice([value[:at] + piece + value[at:], value[:at], value + value])
        if draw.random() < 0.3:
            at = draw.randrange(len(name))
            name = draw.choice([name[:at] + name[at + 1 :], name[:at] + draw.choice(PIECES) + name[at:], name.lower()])
        environ[name] = value
    return environ


def test_any_environment_gets_an_answer():
    def check(seed):
        draw = random.Random(seed)
        environ = mangled(draw)
        before = dict(environ)
        found = check_env(environ, transport=draw.choice([None, *TRANSPORTS]), version=draw.choice([None, "2.21.5"]))
        assert environ == before
        for finding in found:
            assert finding.kind in KINDS and finding.problem and finding.remedy
            assert environ[finding.variable] == finding.value
            assert str(replace(finding, value="v")).startswith(f"{finding.variable}=v: ")
        return tuple(environ.items())

    for_seeds(check)


# ---------------------------------------------------------------- the command


def test_check_prints_findings_and_exits_with_1(capsys):
    from ddplab.cli import main

    assert main(["nccl", "check", "NCCL_BUFFSIZE=8MB"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("NCCL_BUFFSIZE=8MB\n  Parsed as 8") and "Write 8388608." in out
    assert main(["nccl", "check", "NCCL_DEBUG=info"]) == 0
    assert capsys.readouterr().out == "Nothing to complain about.\n"


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """An environment without variables of NCCL, a home of its own, and no file in /etc."""
    for name in [name for name in os.environ if name in knobs()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("ddplab.nccl.conf.SYSTEM_FILE", tmp_path / "system.conf")
    return tmp_path


def test_check_reads_nccls_files_too(clean, capsys, monkeypatch):
    from ddplab.cli import main

    (clean / ".nccl.conf").write_text("# NCCL_NTHREADS=4\r\nNCCL_BUFFSIZE=8MB\r\nnonsense\n=1\nNCCL_IB_HCA==mlx5_0\n")
    (clean / "system.conf").write_bytes(b"NCCL_BUFFSIZE=4M\nNCCL_NTHREADS=2\n\xff\n")
    assert main(["nccl", "check"]) == 1
    out = capsys.readouterr().out
    assert "NCCL_BUFFSIZE=8MB\n" in out and "NCCL_NTHREADS=2\n" in out and "4M" not in out
    assert out.endswith(f"({clean / '.nccl.conf'} and {clean / 'system.conf'} included)\n")
    monkeypatch.setenv("NCCL_BUFFSIZE", "4194304")  # the environment wins
    monkeypatch.setenv("NCCL_NTHREADS", "256")
    assert main(["nccl", "check"]) == 0
    monkeypatch.delenv("NCCL_NTHREADS")
    (clean / "own.conf").write_text("NCCL_NTHREADS=128\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(clean / "own.conf"))
    capsys.readouterr()
    assert main(["nccl", "check"]) == 0
    assert ".nccl.conf" not in capsys.readouterr().out


def test_nccl_reads_its_file_as_we_do(clean):
    (clean / "own.conf").write_text("#NCCL_SOCKET_RCVBUF=1\nNCCL_SOCKET_RCVBUF=8MB\r\nNCCL_SOCKET_RCVBUF=7\n")
    environ = {"NCCL_CONF_FILE": str(clean / "own.conf")}
    lines = ask_nccl(environ)
    if lines is None:
        pytest.skip("no NCCL is installed beside torch, so it cannot be asked")
    assert "NCCL_SOCKET_RCVBUF set by environment to 8." in lines
    assert with_conf_files(environ)["NCCL_SOCKET_RCVBUF"] == "8MB"


def test_of_two_equal_names_on_a_line_both_are_told_and_the_last_counts(clean, capsys):
    import json

    from ddplab.cli import main

    settings = ["NCCL_PROTO=LL", "NCCL_DEBUG=INFO", "NCCL_PROTO=Simple", "NCCL_PROTO="]
    counts = subprocess.run(["env", *settings, "printenv", "NCCL_PROTO"], capture_output=True, text=True).stdout
    assert main(["nccl", "check", "--json", *settings]) == 1
    first, *_ = json.loads(capsys.readouterr().out)["findings"]
    assert (first["variable"], first["value"], first["kind"]) == ("NCCL_PROTO", counts.rstrip("\n"), "no effect")
    said = "set 3 times: to LL (argument 1), then to Simple (argument 3), then to nothing (argument 4)"
    assert first["problem"].startswith(said) and "the last counts (as in a shell): nothing" in first["problem"]
    assert first["remedy"] == "drop argument 1 and argument 3"
    assert main(["nccl", "check", "NCCL_DEBUG=INFO", "NCCL_DEBUG=INFO"]) == 1
    assert "Set twice: to INFO (argument 1), then to INFO (argument 2)" in capsys.readouterr().out


def test_of_two_equal_names_in_a_file_both_are_told_and_the_first_counts(clean, capsys, monkeypatch):
    from ddplab.cli import main

    own = clean / ".nccl.conf"
    own.write_text("NCCL_DEBUG=INFO\n#\nNCCL_NTHREADS=256\r\nNCCL_NTHREADS=128\n")
    (clean / "system.conf").write_text("NCCL_DEBUG=WARN\n")  # what the site sets, a user may set otherwise
    assert main(["nccl", "check"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        f"NCCL_NTHREADS=256\n  Set twice: to 256 (line 3 of {own}), then to 128 (line 4 of {own}); "
        f"the first counts (NCCL keeps what is set already): 256.\n  Drop line 4 of {own}.\n"
    )
    assert "NCCL_DEBUG" not in out and with_conf_files(os.environ)["NCCL_NTHREADS"] == "256"
    monkeypatch.setenv("NCCL_NTHREADS", "512")
    assert main(["nccl", "check"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("NCCL_NTHREADS=512\n") and "none of them counts, the environment sets it to 512" in out


def test_a_name_of_a_file_that_is_too_long_is_no_file(clean, monkeypatch, capsys):
    from ddplab.cli import main

    monkeypatch.setenv("NCCL_CONF_FILE", "x" * 5000)
    assert main(["nccl", "check"]) == 0
    assert capsys.readouterr().out == "Nothing to complain about.\n"


def test_check_reads_the_environment(clean, capsys, monkeypatch):
    from ddplab.cli import main

    assert main(["nccl", "check"]) == 0
    monkeypatch.setenv("NCCL_ALGOS", "Ri\x1b[31mng")
    assert main(["nccl", "check"]) == 1
    out = capsys.readouterr().out
    assert "did you mean NCCL_ALGO" in out and "\x1b[31m" not in out


def test_check_as_json(capsys):
    import json

    from ddplab.cli import main

    assert main(["nccl", "check", "--json", "--transport", "nvlink", "NCCL_NSOCKS_PERTHREAD=4"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["variable"] == "NCCL_NSOCKS_PERTHREAD" and finding["kind"] == "no effect"


def test_check_explains_variables(capsys):
    import json

    from ddplab.cli import main

    assert main(["nccl", "check", "--knobs", "nccl_buffsize"]) == 0
    out = capsys.readouterr().out
    assert "default  4194304" in out and "protocol Simple" in out
    assert main(["nccl", "check", "--knobs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(knobs()) + 1
    assert main(["nccl", "check", "--knobs", "--json", "sockets"]) == 0
    assert "NCCL_NSOCKS_PERTHREAD" in {knob["name"] for knob in json.loads(capsys.readouterr().out)["knobs"]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("NCCL_DEBUG", "'NCCL_DEBUG' is not NAME=VALUE"),
        ("=1", "'=1' is not NAME=VALUE"),
        ("--transport smoke", "unknown transport 'smoke'"),
        ("--nccl new", "is not a version of NCCL"),
        ("--log /nowhere/at/all", "/nowhere/at/all"),
        ("--knobs NCCL_BUFSIZ", "did you mean NCCL_BUFFSIZE?"),
        ("--jsn", "did you mean '--json'"),
    ],
)
def test_a_mistake_at_check_is_one_sentence(capsys, line, says):
    from ddplab.cli import main

    assert main(["nccl", "check", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.startswith("ddplab nccl check: ") and err.count("\n") == 1


def test_the_group_of_actions(capsys):
    from ddplab.cli import main, nccl

    for argv in (["nccl"], ["nccl", "--help"], ["help", "nccl"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert all(action in out for action in nccl.ACTIONS) and max(map(len, out.splitlines())) <= 80
    assert main(["nccl", "chek"]) == 2
    assert "unknown action 'chek'; did you mean 'check'?" in capsys.readouterr().err
    folder = Path(nccl.__file__).parent
    assert {path.stem.removeprefix("nccl_") for path in folder.glob("nccl_*.py")} == set(nccl.ACTIONS)


def test_it_is_public():
    assert ddplab.check_env is check_env and ddplab.nccl_env is nccl_env
