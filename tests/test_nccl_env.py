"""Interface names in the dialects of gloo and NCCL."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from ddplab.launch import launch
from ddplab.nccl import check_env

NAMES = [name for _, name in socket.if_nameindex()]


def problems(**environ: str) -> list[str]:
    return [finding.problem for finding in check_env(environ)]


def test_a_clean_environment_has_no_findings():
    assert check_env({}) == []
    assert check_env({"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}) == []
    assert check_env({"GLOO_SOCKET_IFNAME": "lo"}) == []
    assert check_env({"GLOO_SOCKET_IFNAME": ",".join(NAMES)}) == []


@pytest.mark.parametrize("value", ["^lo,docker", "=lo", "lo", NAMES[-1][:1], "lo,nosuchif0", "^docker"])
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


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    assert [finding.variable for finding in check_env()] == ["GLOO_SOCKET_IFNAME"]


def test_gloo_agrees_with_the_verdicts():
    def judge(values):
        import os

        verdicts = []
        for value in values:
            os.environ["GLOO_SOCKET_IFNAME"] = value
            try:
                dist.new_group(backend="gloo")
                verdicts.append(True)
            except RuntimeError:
                verdicts.append(False)
        return verdicts

    values = ["lo", "", "^lo", "nosuchif0", "10.0.0.5"]
    assert launch(judge, values, ranks=1) == [[check_env({"GLOO_SOCKET_IFNAME": value}) == [] for value in values]]
