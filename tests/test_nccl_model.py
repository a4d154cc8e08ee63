"""NCCL's cost model of one node against NCCL's own code, its known figures, and the rules that its source states."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ddplab.nccl import NODES, Machine, tuning_model
from ddplab.nccl.model import PROTOCOLS

A100 = tuning_model("8xA100")
# What NCCL's code answered for 22 nodes; the file says how it was asked.
NCCL = json.loads((Path(__file__).parent / "data/nccl/tuning_2.30.7.json").read_text())


@pytest.mark.parametrize("node", NCCL["nodes"], ids=lambda node: f"{node['ranks']} of {node['node']}")
def test_nccls_own_code_gives_the_same(node):
    model = tuning_model(node["node"], ranks=node["ranks"])
    machine = model.machine
    assert [machine.channels, machine.channel_GBps] == node["ring"]
    assert [machine.channels, machine.tree_GBps or machine.channel_GBps] == node["tree"][:2]
    assert [(a, p) for a, p, *_ in node["pairs"]] == sorted(model.pairs, key=lambda pair: pair[0] == "NVLS")
    float32 = 1e-6  # NCCL computes with 24 bits
    for a, p, latency, bandwidth, times in node["pairs"]:
        assert model.latency_us(a, p) == pytest.approx(latency, rel=float32)
        assert model.algbw_GBps(a, p) == pytest.approx(bandwidth, rel=float32)
        seconds = [model.seconds(size, a, p) for size in NCCL["sizes"]]
        assert [s * 1e6 for s in seconds] == pytest.approx(times, rel=float32)


def test_eight_a100():
    latencies = [A100.latency_us("Ring", p) for p in PROTOCOLS]
    assert latencies == pytest.approx([15.0, 40.6, 56.0])
    assert [A100.busbw_GBps("Ring", p) for p in PROTOCOLS] == pytest.approx([87.7, 220.8, 240.0])
    assert A100.crossover() / 2**20 == pytest.approx(2, rel=0.05)


def test_the_crossover_is_where_two_lines_meet():
    a, b = ((A100.latency_us("Ring", p) * 1e-6, A100.algbw_GBps("Ring", p) * 1e9) for p in ("LL", "LL128"))
    assert A100.crossover() == pytest.approx((b[0] - a[0]) / (1 / a[1] - 1 / b[1]), rel=1e-6)
    assert A100.crossover(("Ring", "Simple"), [("Ring", "LL")]) == 0
    assert A100.crossover(("Ring", "Simple"), [("Ring", "Simple")]) == math.inf


@pytest.mark.parametrize("name", NODES)
def test_what_the_protocols_cost_in_payload(name):
    """LL sends as many bytes of flags as of data; LL128 sends 120 bytes of data in 128 (tuning.cc says 0.92)."""
    model = tuning_model(name)
    simple = model.busbw_GBps("Ring", "Simple")
    assert simple == pytest.approx(model.machine.channels * model.machine.channel_GBps)
    assert model.busbw_GBps("Ring", "LL") <= simple / 2 + 1e-9
    limit = 16 * 40 if name == "8xB200" else math.inf
    assert model.busbw_GBps("Ring", "LL128") == pytest.approx(min(limit, 0.92 * simple))
    assert [model.latency_us("Ring", p) for p in PROTOCOLS] == pytest.approx([15.0, 40.6, 56.0])  # not a matter of GPUs


def test_a_hopper_prefers_the_switch_above_a_mebibyte():
    model = tuning_model("8xH100")
    assert model.busbw_GBps("NVLS", "Simple") == pytest.approx(476)
    assert model.choose(8 * 2**20) == ("NVLS", "Simple")
    assert model.choose(1024) == ("Ring", "LL")
    assert model.choose(8 * 2**20, algorithms=["Ring", "Tree"])[0] == "Ring"  # what NCCL_ALGO without NVLS leaves
    assert ("NVLS", "Simple") not in A100.pairs and ("NVLS", "LL") not in model.pairs


def test_forcing_ll_costs_a_gradient_bucket_dearly():
    bucket = 25 * 2**20
    free, forced = A100.choose(bucket), A100.choose(bucket, protocols=["LL"])
    assert forced == ("Ring", "LL") and free == ("Ring", "Simple")
    assert A100.seconds(bucket, *forced) / A100.seconds(bucket, *free) == pytest.approx(2.18, abs=0.01)


@pytest.mark.parametrize("size", [1, 63, 64, 4096, 2**18, 2**21, 25 * 2**20, 2**30])
def test_a_ring_is_never_worse_than_a_tree_on_one_a100_node(size):
    assert A100.choose(size)[0] == "Ring"


def test_a_trees_time_has_steps_where_the_correction_changes():
    def rate(size: int) -> float:
        return size / (A100.seconds(size, "Tree", "LL") - A100.latency_us("Tree", "LL") * 1e-6)

    full = A100.algbw_GBps("Tree", "LL") * 1e9
    assert rate(63) == pytest.approx(full)
    assert rate(64 << 12) == pytest.approx(0.4 * full)
    assert rate(64 << 23) == pytest.approx(full)
    assert rate((64 << 13) - 1) == pytest.approx(0.4 * full) and rate(64 << 14) == pytest.approx(0.5 * full)


def test_tables():
    table = A100.table()
    assert list(table["algorithm"]) == ["Ring"] * 3 + ["Tree"] * 3
    assert (table["busbw_GBps"] / table["algbw_GBps"]).to_numpy() == pytest.approx(14 / 8)
    times = A100.times([1024, 2**30])
    assert list(times[times["chosen"]]["protocol"]) == ["LL", "Simple"]
    assert times["time_us"].min() > 0


def test_fewer_gpus_and_other_links():
    two = tuning_model("8xA100", ranks=2)
    assert two.latency_us("Ring", "Simple") == pytest.approx(8.4 + 2 * 3.4)
    half = tuning_model("8xA100", channels=6)
    assert half.busbw_GBps("Ring", "Simple") == pytest.approx(120)
    assert "channels given" in half.machine.basis
    mine = tuning_model(Machine("mine", 4, 120, 8, 45.0))
    assert mine.machine.generation == "Blackwell"


def test_bad_machines_and_sizes():
    with pytest.raises(ValueError, match="no machine is called '8xA10': take 8xV100, 8xA100, 8xH100, 8xB200"):
        tuning_model("8xA10")
    for bad in ({"channels": 0}, {"channels": 1.5}, {"channel_GBps": math.nan}, {"channel_GBps": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            tuning_model("8xA100", **bad)
    with pytest.raises(ValueError, match="8xV100 is known with 8 GPUs, not 4 .in Python, take a Machine"):
        tuning_model("8xV100", ranks=4)
    with pytest.raises(ValueError, match="8xA100 is known with 2 to 8 GPUs, not 16"):
        tuning_model("8xA100", ranks=16)
    with pytest.raises(ValueError, match="ranks is a whole number from 2 to 72, not 1"):
        tuning_model(Machine("mine", 1, 80, 8, 45.0))
    with pytest.raises(ValueError, match="has no NVLS/Simple; it has Tree/LL"):
        A100.seconds(1, "NVLS", "Simple")
    for nbytes in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="0 bytes or more"):
            A100.seconds(nbytes, "Ring", "LL")
    with pytest.raises(ValueError, match="does not offer"):
        A100.choose(1, algorithms=["PAT"])


def test_every_node_has_rates_latencies_and_a_crossover_with_any_number_of_channels():
    for node, graphs in NODES.items():
        for ranks in graphs:
            for channels in (1, 2, 7, 32):
                model = tuning_model(node, ranks=ranks, channels=channels)
                assert all(model.latency_us(*pair) > 0 and model.algbw_GBps(*pair) > 0 for pair in model.pairs)
                assert 0 < model.crossover() < math.inf


def test_the_command_knows_the_same_nodes():
    from ddplab.cli import nccl_model

    assert tuple(NODES) == nccl_model.NODES
