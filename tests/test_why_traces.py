"""`why` on profiler traces: a rank for which the others waited is named, equal ranks and a single trace are not.

The traces are written here, so who is late and by how much is known; one more is a real job of eight ranks, whose last
arrivers stand in the notice beside it.
"""

import gzip
import json
import shutil

import pytest

from ddplab.cli import main
from ddplab.remains.traces import Traces, is_trace, read_traces
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


def test_bare_lists_of_events_are_traces(tmp_path):
    leave(tmp_path, late=dict.fromkeys(range(10), 1))
    for path in tmp_path.iterdir():
        path.write_text(json.dumps(json.loads(path.read_text())["traceEvents"], indent=1))
    found = why(tmp_path)
    assert found.ranks == (1,) and not found.lost and "ranks taken from the files' names" in found.notes[0]


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
    assert found.kind is None and "1 trace: alone it cannot tell" in found.evidence[-1] and found.read == 1
    assert "traces of 1 of 1 ranks" not in str(found) and not found.lost


def test_a_torn_trace_is_named_and_the_rest_is_used(tmp_path):
    leave(tmp_path, late=dict.fromkeys(range(10), 2))
    torn = tmp_path / "rank1.pt.trace.json"
    torn.write_bytes(torn.read_bytes()[:60])
    found = why(tmp_path)
    assert found.ranks == (2,) and any("rank1.pt.trace.json" in line for line in found.lost) and found.read == 3
    torn.write_bytes(b'{"traceEvents": [{"ph": "X"')
    assert "`ddplab trace --partial` reads what is whole" in why(tmp_path).lost[0]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "damage, why_not",
    [
        (lambda text: text[:60], "the file ends early"),
        (lambda text: text.replace(b'"traceEvents": [', b'"traceEvents": [\xff'), "line 1, column"),
        (lambda text: b'{"schemaVersion": 1}', 'no list "traceEvents"'),
        (lambda text: b'{"traceEvents": []}', "no events"),
        (lambda text: b"", "empty; was the job killed while it wrote?"),
        (lambda text: text[40:], "no valid JSON"),
        (lambda text: text[-100:], "its name says dump or trace, but neither begins in it"),
        (lambda text: b"\0" * 100, "not text, and no dump"),
        (lambda text: gzip.compress(text)[:25], "packed, and neither a dump nor a trace begins in it"),
        (lambda text: b'{"lr": 0.1}', "JSON, but neither a dump of the flight recorder nor a trace"),
    ],
)
def test_traces_none_of_which_can_be_read_are_no_health(tmp_path, capsys, ranks, damage, why_not):
    leave(tmp_path, ranks=ranks, late=dict.fromkeys(range(10), 0))
    for path in tmp_path.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    found = why(tmp_path)
    assert found.kind is None and found.read == 0
    assert main(["why", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("Nothing could be read, so nothing can be told.\n")
    assert len(found.lost) == ranks and said.count("Not read: ") == ranks
    for rank, line in enumerate(sorted(found.lost)):
        assert f"rank{rank}.pt.trace.json" in line and why_not in line
    assert main(["why", str(tmp_path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["lost"]) == ranks


def test_what_is_readable_speaks_and_what_is_lost_is_said(tmp_path, capsys):
    leave(tmp_path)
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.pt.trace.json").write_bytes(b'{"traceEvents": [')
    assert main(["why", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("No fault found in what could be read.\n  - 2 traces: no rank for which others waited long")
    assert said.count("Not read: ") == 2 and "rank0.pt.trace.json" in said and "rank1.pt.trace.json" in said
    assert "Note: traces of 2 of 4 ranks" in said


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
    assert read_traces([], []) == Traces()


def test_a_real_job_of_eight_ranks(root):
    found = why(root / "labs/data/traces/dlrm_8xV100")
    assert (found.kind, found.ranks) == ("slow_rank", (7,))
    assert "rank 7 was the last to come to 5 of 8" in found.evidence[0]
