"""`why` on profiler traces: a rank for which the others waited is named, equal ranks and a single trace are not.

The traces are written here, so who is late and by how much is known; one more is a real job of eight ranks, whose last
arrivers stand in the notice beside it.
"""

import gzip
import json
import shutil

import pytest

from ddplab.remains.traces import is_trace, straggler
from ddplab.why import why


def leave(folder, ranks=4, late=(), late_us=400, packed=False):
    """A step of 1000 us with ten all-reduces a rank, which end together; `late` maps a collective to its last rank."""
    late = dict(late)
    for rank in range(ranks):
        events = []
        for i in range(10):
            began = 1000 * i + (late_us if late.get(i) == rank else 0) + rank  # a microsecond apart where all is well
            ended = 1000 * i + (late_us if i in late else 0) + 100
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
            about = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 20, "name": name}
            events.append(about | {"ts": began, "dur": ended - began, "args": {"stream": 20, "device": 0}})
        trace = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": ranks}, "traceEvents": events}
        text = json.dumps(trace).encode()
        path = folder / f"rank{rank}.pt.trace.json{'.gz' * packed}"
        path.write_bytes(gzip.compress(text) if packed else text)


@pytest.mark.parametrize("rank, packed", [(0, False), (2, True), (3, False)])
def test_the_rank_for_which_the_others_waited(tmp_path, rank, packed):
    leave(tmp_path, late=dict.fromkeys(range(10), rank), packed=packed)
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("slow_rank", (rank,))
    assert f"rank {rank} was the last to come to 10 of 10" in found.evidence[0]


def test_nobody_is_accused_of_what_goes_round(tmp_path):
    leave(tmp_path, late={i: i % 4 for i in range(10)})
    found = why(tmp_path)
    assert found.kind is None and "4 traces: no rank for which others waited long" in found.evidence[-1]


def test_equal_ranks(tmp_path):
    leave(tmp_path)
    assert why(tmp_path).kind is None


def test_one_trace_tells_nothing_of_the_others(tmp_path):
    leave(tmp_path, ranks=1)
    found = why(tmp_path)
    assert found.kind is None and "1 trace:" in found.evidence[-1]


def test_a_torn_trace_is_named_and_the_rest_is_used(tmp_path):
    leave(tmp_path, late=dict.fromkeys(range(10), 2))
    torn = tmp_path / "rank1.pt.trace.json"
    torn.write_bytes(torn.read_bytes()[:60])
    found = why(tmp_path)
    assert found.ranks == (2,) and any("rank1.pt.trace.json" in line for line in found.lost)


def test_two_files_of_one_rank(tmp_path):
    leave(tmp_path, ranks=2)
    shutil.copy(tmp_path / "rank0.pt.trace.json", tmp_path / "rank1.pt.trace.json")
    found = why(tmp_path)
    assert found.kind is None and found.evidence


def test_a_flight_recorder_speaks_first_and_traces_are_told_from_other_json(tmp_path):
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    (tmp_path / "torn.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}')[:12])
    assert not is_trace(tmp_path / "config.json") and not is_trace(tmp_path / "torn.json.gz")
    assert not is_trace(tmp_path / "none.json")
    assert straggler([], []) is None


def test_a_real_job_of_eight_ranks(root):
    found = why(root / "labs/data/traces/dlrm_8xV100")
    assert (found.kind, found.ranks) == ("slow_rank", (7,))
    assert "rank 7 was the last to come to 5 of 8" in found.evidence[0]
