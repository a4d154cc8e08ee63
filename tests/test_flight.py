"""Dumps of torch's flight recorder: torch's own ones, NCCL's as its source writes them, and bad ones of every kind."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import random

import pandas as pd
import pytest
from damage import for_seeds, mangled_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from ddplab import _plainpickle
from ddplab.flight import FlightError, dump_flight, is_dump, read_dump, read_flight
from ddplab.launch import launch

# An entry as FlightRecorderDetail.hpp writes it for NCCL: getCollectiveTrace for pickle, dump_json for JSON.
ENTRY = {
    "frames": [{"name": "all_reduce", "filename": "/x/distributed_c10d.py", "line": 3906}],
    "record_id": 7, "pg_id": 0, "process_group": ("0", "default_pg"), "thread_name": "python", "thread_id": "1",
    "collective_seq_id": 5, "p2p_seq_id": 0, "op_id": 6, "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1_795_975_972_566_390_931, "duration_ms": 1.25, "input_sizes": [[3, 4]],
    "input_dtypes": ["BFloat16"], "output_sizes": [[3, 4]], "output_dtypes": ["BFloat16"], "state": "completed",
    "time_discovered_started_ns": 1_795_975_972_566_400_000, "time_discovered_completed_ns": 1_795_975_972_567_000_000,
    "retired": True, "timeout_ms": 600_000, "is_p2p": False,
}  # fmt: skip
DUMP = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "comm_lib_version": "2.30.4",
    "pg_status": {
        "0": {"last_enqueued_collective": 6, "last_started_collective": 5, "last_completed_collective": 5},
    },
    "entries": [ENTRY, {**ENTRY, "record_id": 8, "collective_seq_id": 6, "state": "scheduled", "retired": False,
                        "time_discovered_started_ns": None, "time_discovered_completed_ns": None}],
}  # fmt: skip


def as_json(dump):
    """The JSON twin: no frames, 0 for "not yet", numbers of pg_status as text."""
    entries = [{k: v for k, v in e.items() if k != "frames"} for e in dump["entries"]]
    for e in entries:
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            e[key] = e[key] or 0
    status = {g: {k: str(v) for k, v in one.items()} for g, one in dump["pg_status"].items()}
    return json.dumps({**dump, "entries": entries, "pg_status": status, "nccl_comm_state": {}})


def job():
    """In a rank: some collectives on two groups, one of them of other sizes, and the dump in torch's three forms."""
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    tensor = torch.randn(3, 4)
    dist.all_reduce(tensor)
    dist.broadcast(tensor.to(torch.int64), src=1, group=pair)
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(5), dst=1)
    else:
        dist.recv(torch.zeros(5), src=0)
    gathered = [torch.zeros(2, dtype=torch.float16) for _ in range(2)]
    dist.all_gather(gathered, torch.ones(2, dtype=torch.float16))
    dist.barrier()
    return c10d._dump_fr_trace(), c10d._dump_fr_trace_json()


@pytest.fixture(scope="module")
def real():
    """(pickle, JSON) of both ranks."""
    return launch(job, ranks=2, device="cpu")


def test_torchs_own_dumps(real, tmp_path):
    for rank, (pickled, text) in enumerate(real):
        (tmp_path / "p").mkdir(exist_ok=True)
        (tmp_path / "j").mkdir(exist_ok=True)
        (tmp_path / "p" / f"comm_lib_trace_rank_{rank}").write_bytes(pickled)
        (tmp_path / "j" / f"rank{rank}.json").write_bytes(text)
    one, two = read_flight(tmp_path / "p"), read_flight(tmp_path / "j")
    assert one.ranks == two.ranks == [0, 1] and not one.notes and not two.notes
    pd.testing.assert_frame_equal(one.entries.drop(columns="frames"), two.entries.drop(columns="frames"))
    pd.testing.assert_frame_equal(one.status, two.status)
    assert (two.entries.frames.map(len) == 0).all()
    for rank in (0, 1):
        rows = one.entries[one.entries["rank"] == rank]
        collectives = rows[~rows.p2p]
        wanted = ["all_reduce", "broadcast", "barrier", "all_gather", "barrier"]
        assert [c for c in collectives.collective] == wanted
        assert list(collectives.seq) == [1, 1, 2, 3, 4]  # the broadcast is the other group's first
        assert list(collectives.in_bytes) == [3 * 4 * 4, 3 * 4 * 8, 0, 2 * 2, 0]
        assert list(collectives.out_bytes)[3] == 2 * 2 * 2
        assert collectives.in_dtypes.iloc[1] == ("Long",) and collectives.in_sizes.iloc[0] == ((3, 4),)
        assert (collectives.backend == "gloo").all() and (collectives.state == "scheduled").all()
        assert collectives.done.iloc[:-1].all()
        assert any(frame.startswith("job at ") for frame in collectives.frames.iloc[0])
        assert collectives.created_ns.is_monotonic_increasing


def test_what_torch_reads_from_the_same_pickle(real, tmp_path):
    """torch's own loader, which trusts the file, sees the same containers."""
    (tmp_path / "trace_rank_1").write_bytes(real[1][0])
    assert read_dump(tmp_path / "trace_rank_1") == pickle.loads(real[1][0])


def write_own_dump(folder):
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4))
    with_stacks = dump_flight(folder).read_text()
    path = dump_flight(folder, stacks=False)
    return path.name, "write_own_dump" in with_stacks, "write_own_dump" in path.read_text()


def test_dump_flight(tmp_path):
    names = launch(write_own_dump, tmp_path / "new" / "dumps", ranks=2, device="cpu")
    assert names == [(f"flight_rank_{r}.json", True, False) for r in (0, 1)]
    records = read_flight(tmp_path / "new" / "dumps")
    assert records.ranks == [0, 1] and list(records.entries.collective) == ["all_reduce"] * 2
    assert len(list((tmp_path / "new" / "dumps").iterdir())) == 2  # no half-written file


def test_dump_flight_outside_a_rank(tmp_path):
    with pytest.raises(RuntimeError, match="inside a rank"):
        dump_flight(tmp_path)


@pytest.mark.parametrize("form", ["pickle2", "pickle4", "json", "json.gz", "pickle.gz"])
def test_nccls_fields(tmp_path, form):
    data = pickle.dumps(DUMP, 4 if form == "pickle4" else 2) if "pickle" in form else as_json(DUMP).encode()
    path = tmp_path / "nccl_trace_rank_12"
    path.write_bytes(gzip.compress(data) if form.endswith("gz") else data)
    records = read_flight(path)
    assert records.ranks == [12] and records.versions == {12: ("2.10", "2.30.4")} and not records.notes
    first, second = records.entries.to_dict("records")
    assert first["collective"] == "all_reduce" and first["backend"] == "nccl" and first["group_desc"] == "default_pg"
    assert first["seq"] == 5 and first["op"] == 6 and first["record"] == 7
    assert first["in_bytes"] == 24 and first["duration_ms"] == 1.25 and first["ranks"] == (0, 1)
    assert first["done"] and not second["done"]
    assert first["completed_ns"] - first["started_ns"] == 600_000
    assert pd.isna(second["started_ns"]) and pd.isna(second["completed_ns"])
    frames = () if form.startswith("json") else ("all_reduce at /x/distributed_c10d.py:3906",)
    assert first["frames"] == frames
    assert records.status.iloc[0].tolist() == [12, "0", 6, 5, 5]
    assert records.groups.iloc[0].tolist() == [12, "0", "default_pg", (0, 1), 2]


def test_a_retired_call_that_never_completed_is_not_done(tmp_path):
    """NCCL's watchdog retires a call that timed out (FlightRecorder.hpp); for gloo retired is all there is."""
    entries = [{**ENTRY, "profiling_name": f"{b}:all_reduce", "state": "scheduled"} for b in ("nccl", "gloo")]
    (tmp_path / "rank0").write_bytes(pickle.dumps({**DUMP, "entries": entries}))
    assert list(read_flight(tmp_path / "rank0").entries.done) == [False, True]


@pytest.mark.parametrize(("name", "src", "dst"), [("nccl:send 0->3", 0, 3), ("nccl:recv 1<-2", 2, 1)])
def test_point_to_point(tmp_path, name, src, dst):
    entry = {**ENTRY, "profiling_name": name, "is_p2p": True, "p2p_seq_id": 9}
    (tmp_path / "rank_0.pkl").write_bytes(pickle.dumps({**DUMP, "entries": [entry]}))
    one = read_flight(tmp_path / "rank_0.pkl").entries.iloc[0]
    assert (one.collective, one.src, one.dst, one.seq) == (name[5:9], src, dst, 9)


def test_a_folder_with_other_files(tmp_path):
    (tmp_path / "rank_0").write_bytes(pickle.dumps(DUMP, 2))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "rank_1").write_bytes(pickle.dumps(DUMP, 2))
    (tmp_path / "rank0.pt.trace.json").write_text('{"schemaVersion": 1, "traceEvents": [{"name": "entries"}]}')
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04....")
    (tmp_path / "state.pkl").write_bytes(pickle.dumps({"weights": [1.0]}))
    (tmp_path / "log.txt").write_text("rank 3 hangs")
    assert read_flight(tmp_path).ranks == [0, 1]
    assert not is_dump(tmp_path / "none") and not is_dump(tmp_path / "log.txt")


def test_two_dumps_of_one_rank(tmp_path):
    later = {**DUMP, "entries": [{**ENTRY, "time_created_ns": ENTRY["time_created_ns"] + 1, "collective_seq_id": 99}]}
    (tmp_path / "a_rank_0").write_bytes(pickle.dumps(later))
    (tmp_path / "b_rank_0").write_bytes(pickle.dumps(DUMP))
    records = read_flight(tmp_path)
    assert list(records.entries.seq) == [99]
    assert records.notes == ("rank 0 has two dumps; a_rank_0 is the later one, b_rank_0 is left out",)


def test_a_bad_file_beside_good_ones(tmp_path):
    (tmp_path / "rank_0").write_bytes(pickle.dumps(DUMP))
    (tmp_path / "rank_1").write_bytes(pickle.dumps(DUMP)[:-100])
    (tmp_path / "rank_2").write_bytes(pickle.dumps({**DUMP, "entries": []}))
    bad = {**DUMP, "entries": [ENTRY, 3, {"profiling_name": None}, {"no": "name"}]}
    (tmp_path / "rank_3").write_bytes(pickle.dumps(bad))
    records = read_flight(tmp_path)
    assert records.ranks == [0, 2, 3] and len(records.entries) == 3
    torn, empty, odd = records.notes
    assert "rank_1" in torn and "not a whole pickle" in torn
    assert empty == "rank_2: the recorder was empty"
    assert odd == "rank_3: 3 entries make no sense and were left out"


BAD = {
    "empty": (b"", "empty"),
    "blank": (b" \n", "empty"),
    "text": (b"hello", "neither a pickle nor JSON .* line 1, column 1"),
    "torn json": (b'{"entries": [{"record_id"', "line 1, column 26"),
    "latin-1": ('{"entries": "\xe9"}'.encode("latin-1"), "neither a pickle nor JSON"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "list": (b"[]", "no dump of the flight recorder"),
    "other json": (b'{"traceEvents": []}', "no dump of the flight recorder"),
    "entries": (b'{"entries": {"a": 1}}', "no list"),
    "huge number": (b'{"entries": ' + b"9" * 5000 + b"}", "neither a pickle nor JSON"),
    "torn gzip": (gzip.compress(b"{}")[:-9], "damaged, or cut off"),
    "torn pickle": (pickle.dumps(DUMP)[:300], "not a whole pickle"),
    "other pickle": (pickle.dumps([1, 2]), "no dump"),
}


@pytest.mark.parametrize("what", BAD)
def test_one_clear_error(tmp_path, what):
    data, message = BAD[what]
    (tmp_path / "rank_0").write_bytes(data)
    with pytest.raises(FlightError, match=message) as caught:
        read_flight(tmp_path / "rank_0")
    assert str(tmp_path / "rank_0") in str(caught.value) and len(str(caught.value)) < 500


def test_no_dump_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_flight(tmp_path / "none")
    with pytest.raises(FlightError, match="no flight recorder dump"):
        read_flight(tmp_path)


class Evil:
    """What unpickling it would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_evil_pickle_runs_nothing(tmp_path, protocol):
    data = pickle.dumps({**DUMP, "extra": Evil(tmp_path / "made")}, protocol)
    (tmp_path / "rank_0").write_bytes(data if data.startswith(b"\x80") else b"\x80\x02" + data)
    with pytest.raises(FlightError, match="is refused|not a whole pickle"):
        read_flight(tmp_path / "rank_0")
    assert not (tmp_path / "made").exists()
    pickle.loads(data)  # the bait is live
    assert (tmp_path / "made").exists()


HOSTILE = {
    "global": b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "inst": b"\x80\x02(ios\nsystem\n.",
    "obj": b"\x80\x02(}o.",
    "build": b"\x80\x02}}b.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "newobj": b"\x80\x02})\x81.",
    "huge memo index": b"\x80\x02}r\xff\xff\xff\xff0.",
    "huge string": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "huger string": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "huge long": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "dict as key": b"\x80\x02}}K\x01s.",
    "tuple bomb as key": b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
    "nothing on the stack": b"\x80\x02.",
    "mark as a value": b"\x80\x02].".replace(b"].", b"](a."),
    "append to a number": b"\x80\x02K\x01K\x01a.",
    "odd items": b"\x80\x02}(K\x01u.",
    "no stop": b"\x80\x02}",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pickles(what):
    with pytest.raises(_plainpickle.PlainPickleError):
        _plainpickle.loads(HOSTILE[what])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    ),
    st.integers(2, pickle.HIGHEST_PROTOCOL),
)
@settings(max_examples=100, deadline=None)
def test_plain_containers_come_back(value, protocol):
    assert _plainpickle.loads(pickle.dumps(value, protocol)) == value


SEEDS = {
    "pickle": [pickle.dumps(DUMP, 2), pickle.dumps(DUMP, 4)],
    "JSON": [as_json(DUMP).encode(), json.dumps(DUMP).encode()],
}
VALUES = [
    None,
    -1,
    2**70,
    1e308,
    float("nan"),
    "",
    "x" * 300,
    [],
    {},
    [[]],
    [[1, "a"]],
    True,
    [None],
    "nccl:send 1->",
    "-",
]


@pytest.mark.parametrize("kind", SEEDS)
def test_mangled_bytes(tmp_path, kind):
    """Cut, flip, drop, repeat: a table or a FlightError, nothing else."""

    def check(seed):
        rng = random.Random(seed)
        path = tmp_path / "rank_0"
        data = mangled_bytes(rng, rng.choice(SEEDS[kind]))
        path.write_bytes(data)
        try:
            dump = read_dump(path)
        except FlightError as problem:
            assert len(str(problem)) < 600
        else:
            check_rows(path, dump)
        return data

    for_seeds(check)


def test_mangled_values(tmp_path):
    """Valid files whose fields hold nonsense."""
    for_seeds(lambda seed: nonsense(tmp_path, seed))


def nonsense(tmp_path, seed):
    rng = random.Random(seed)
    dump = json.loads(json.dumps(DUMP))
    for _ in range(rng.randint(3, 6)):
        place = rng.choice([dump, *dump["entries"], dump["pg_status"], dump["pg_config"]])
        if isinstance(place, dict):
            place[rng.choice(list(place) or ["x"])] = rng.choice(VALUES)
        if not isinstance(dump["entries"], list):
            break
        for key in ("pg_status", "pg_config"):
            dump[key] = dump[key] if isinstance(dump[key], dict) else {}
    path = tmp_path / "rank_0"
    data = pickle.dumps(dump)
    path.write_bytes(data)
    with contextlib.suppress(FlightError):
        check_rows(path, read_dump(path))
    return data


def check_rows(path, dump):
    """Rows make sense, one by one; a tenth of them as a table, which takes longer."""
    from ddplab._flightrows import row

    for entry in dump.get("entries") or []:
        try:
            found = row(entry, {})
        except (TypeError, ValueError, OverflowError):
            continue
        assert isinstance(found["collective"], str) and isinstance(found["in_sizes"], tuple)
    if path.stat().st_size % 25 == 0:
        records = read_flight(path)
        assert len(records.entries) <= len(dump.get("entries") or [])
