"""The labs' cores: their table, what a wrong result does, one machine, and two that torchrun brings together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from conftest import ROOT

from ddplab.cli import main
from ddplab.cores import CORES, core_of
from ddplab.cores.job import Job, Row, at_least, at_most, equal
from ddplab.hosts import Hosts, hosts_problem

LABS = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))
SCRIPT = ROOT / "book/slurm.sbatch"
PER_HOST = 4
PROBLEM = hosts_problem()


def test_every_lab_has_a_core():
    assert sorted(CORES) == [path.name[:2] for path in LABS]
    assert [f"{lab}_{name}" for lab, (_, name) in CORES.items()] == [path.stem for path in LABS]
    assert all(core_of(lab).__doc__ for lab in CORES)


def test_a_row_says_whether_it_is_right():
    assert equal("x", 3, 3).right and not equal("x", (1,), (2,)).right
    assert at_most("x", 1.0, 1.0).right and not at_most("x", float("nan"), 1.0).right
    assert at_least("x", 2.0, 1.0).right and not at_least("x", float("nan"), 1.0).right
    assert at_least("x", 0.123456, 1.0, " MB") == ("x", "0.123 MB", ">= 1 MB", False)
    assert Row("x", "3 ms").right is None


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch):
    """No ranks: the cores give these rows."""

    def given(*rows, hosts=((0, 1), (2, 3))):
        monkeypatch.setattr(Job, "join", lambda ranks, device: Job(hosts, "gloo", "cpu"))
        monkeypatch.setattr("ddplab.cores.core_of", lambda lab: lambda job: list(rows))

    return given


def test_run_prints_a_table_and_ok(pretend, capsys):
    pretend(equal("wrong elements", 0, 0), Row("a step", "3.1 ms"))
    assert main(["labs", "run", "2", "09_hierarchical", "02"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "# 4 ranks on 2 machines (2 + 2), gloo on cpu"
    assert [line.split()[0] for line in out[1:5]] == ["02", "02", "09", "09"]
    assert out[1].split() == ["02", "wrong", "elements", "0", "0", "ok"]
    assert re.fullmatch(r"OK: 2 checks of 2 labs, \d+ s", out[5])


def test_a_wrong_row_fails_the_run_and_is_named(pretend, capsys):
    pretend(equal("wrong elements", 7, 0))
    assert main(["labs", "run", "02"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[1].endswith("WRONG") and "OK" not in out
    assert err == "ddplab labs: 1 of 1 checks are wrong: lab 02, wrong elements: 7, expected 0\n"


def test_run_as_json(pretend, capsys):
    pretend(Row("a step", "3 ms"), hosts=((0, 1, 2),))
    assert main(["labs", "run", "--json", "11"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 3 and told["machines"] == [3] and told["backend"] == "gloo"
    assert told["rows"] == [{"lab": "11", "what": "a step", "found": "3 ms", "expected": "-", "right": None}]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run 12", "unknown lab '12'; labs are 01 to 11"),
        ("run ring", "unknown lab 'ring'"),
        ("run --force", "--force belongs to 'ddplab labs copy'"),
        ("run --ranks 0", "not a count"),
        ("run --ranks 1 02", "start 2 or more"),
        ("run --device tpu", "unknown device 'tpu'"),
        ("list --ranks 4", "belong to 'ddplab labs run'"),
    ],
)
def test_mistakes_are_answered(capsys, line, says):
    assert main(["labs", *line.split()]) == 2
    assert says in capsys.readouterr().err


def test_another_number_than_torchruns_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["labs", "run", "--ranks", "4"]) == 2
    assert "torchrun started 2" in capsys.readouterr().err


# -- one machine ------------------------------------------------------------------------------------------------------


def test_on_one_machine_without_torchrun(capsys):
    """Three ranks: nothing divides anything."""
    assert main(["labs", "run", "--ranks", "3", "02", "09"]) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert out.startswith("# 3 ranks on 1 machine, gloo on cpu\n") and "\nOK: " in out


# -- two machines -----------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(tmp_path):
    """What slurm.sbatch gives to srun on two machines: (arguments, its environment). Slurm's commands are stand-ins."""

    def run(*labs, **variables):
        tools = {
            "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames two-hosts" ] && printf "10.98.0.10\\n10.98.0.11\\n"\n',
            "srun": f"#!{sys.executable}\nimport json, os, sys\n"
            f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'told')!r}, 'w'))\n",
        }
        for name, text in tools.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        slurm = {"SLURM_JOB_NODELIST": "two-hosts", "SLURM_NNODES": "2", "SLURM_JOB_ID": "123456"}
        env = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, **variables}
        done = subprocess.run(["bash", SCRIPT, *labs], env=env, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return json.loads((tmp_path / "told").read_text())

    return run


def test_the_batch_script_starts_one_agent_a_machine(batch):
    from torch.distributed.run import get_args_parser

    (kill, python, *rest), env = batch("02", "09", RANKS_PER_NODE="8", IFACE="eth7")
    assert (kill, python, rest[:2]) == ("--kill-on-bad-exit=1", sys.executable, ["-m", "torch.distributed.run"])
    given = get_args_parser().parse_args(rest[2:])
    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend) == ("2", "8", "c10d")
    assert (given.rdzv_endpoint, given.rdzv_id) == (f"10.98.0.10:{20000 + 123456 % 20000}", "123456")
    assert (given.module, given.training_script) == (True, "ddplab")
    assert given.training_script_args == ["labs", "run", "02", "09"]
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "eth7"
    assert "GLOO_SOCKET_IFNAME" not in batch(RANKS_PER_NODE="8")[1] or "GLOO_SOCKET_IFNAME" in os.environ
    head = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert [line.split()[1] for line in head][1:3] == ["--nodes=2", "--ntasks-per-node=1"]


@pytest.mark.skipif(bool(PROBLEM), reason=str(PROBLEM))
def test_all_cores_on_two_machines_of_four_ranks_under_torchrun(batch, tmp_path):
    """The batch script's own command, once in each of two emulated hosts, which share nothing but a link."""
    (_, *command), env = batch(IFACE="e0", RANKS_PER_NODE=str(PER_HOST))
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with Hosts(2, link="1gbit", ranks_per_host=PER_HOST) as hosts:
        agents = []
        try:
            for host in range(2):
                # a real machine has a name of its own; these two need telling who they are
                own = {"PET_LOCAL_ADDR": f"10.98.0.{10 + host}", "PET_RDZV_CONF": f"is_host={int(host == 0)}"}
                pipe = subprocess.PIPE
                options = {"stdout": pipe, "stderr": pipe, "text": True, "start_new_session": True}
                agents.append(hosts.popen(host, command, env={**env, **own}, **options))
            said = [agent.communicate(timeout=600) for agent in agents]
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
                    agent.wait()
        sent = [link.sent for link in hosts.counters()]
    if any(agent.returncode for agent in agents):
        pytest.fail("\n".join(f"agent {host}: {text}" for host, texts in enumerate(said) for text in texts))
    lines = (said[0][0] + said[1][0]).splitlines()  # rank 0 alone prints, and it may be on either
    assert lines[0] == "# 8 ranks on 2 machines (4 + 4), gloo on cpu"
    assert {line.split()[0] for line in lines[1:-1]} == CORES.keys()
    assert re.fullmatch(r"OK: \d\d checks of 11 labs, \d+ s", lines[-1])
    assert re.search(r"^09  ranks of each machine +4 \+ 4 +4 \+ 4  ok$", "\n".join(lines), re.M)
    assert re.search(r"^08  the rank at fault +7 +7  ok$", "\n".join(lines), re.M)
    assert min(sent) > 100e6, "the kernel's own count: it really went over the link"


@pytest.mark.parametrize(
    ("address", "names", "says"),
    [("127.0.1.1", {}, "is 127.0.1.1 to itself"), (OSError(), {}, "is no address to itself")]
    + [("127.0.1.1", {"GLOO_SOCKET_IFNAME": "e0"}, None), ("10.1.2.3", {}, None)],
)
def test_a_machine_that_others_cannot_reach_says_so(monkeypatch, address, names, says):
    """Debian's 127.0.1.1: gloo would give it to the other machines, and all would wait."""
    from ddplab._rank import _require_address

    def resolve(name):
        if isinstance(address, Exception):
            raise address
        return address

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    if says is None:
        _require_address()
        return
    with pytest.raises(RuntimeError, match=says):
        _require_address()


def test_machines_with_different_backends_say_so(monkeypatch):
    import torch.distributed as dist

    from ddplab._rank import _agreed, _timedelta

    store = dist.HashStore()
    store.set("ddplab/backend/0", "nccl on cuda")
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 4, 8)]))
    with pytest.raises(RuntimeError, match="rank 0 uses nccl on cuda, but here rank 4 would use gloo on cpu"):
        _agreed("gloo on cpu", _timedelta(5))
    joined = _agreed("nccl on cuda", _timedelta(5))
    assert (joined["rank"], joined["world_size"]) == (4, 8)
