"""`why` on folders made by hand: each fault as NCCL's and gloo's recorders would show it, and the ways files break.

The expected answers are known because the folders are built from them. Real jobs: test_faults.py.
"""

import gzip
import json
import pickle
import random

import pytest
from damage import for_seeds, mangled_bytes
from users import ordinary_user

import ddplab as dl
from ddplab.cli import main
from ddplab.why import why

STEP = (("all_reduce", [[40]]), ("all_reduce", [[90]]), ("all_reduce", [[1]]), ("all_gather", [[8]]))
BACKWARD = [
    {"name": "backward", "filename": "/x/site-packages/torch/autograd/__init__.py", "line": 395},
    {"name": "train", "filename": "/home/u/train.py", "line": 20},
]


def entry(seq, name, sizes, done=True, ns=0, line=None, group=("0", "default_pg"), backend="nccl", dtype="Float"):
    frames = [{"name": "report", "filename": "/home/u/train.py", "line": line}] if line else []
    if line == "ddp":
        frames = BACKWARD
    return {
        "record_id": seq - 1,
        "process_group": list(group),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"{backend}:{name}",
        "input_sizes": sizes,
        "input_dtypes": [dtype] * len(sizes),
        "output_sizes": sizes,
        "output_dtypes": [dtype] * len(sizes),
        "time_created_ns": 1_700_000_000_000_000_000 + ns,
        "state": "completed" if done else "started",
        "retired": done,
        "is_p2p": False,
        "frames": frames,
    }


def entries(calls, done=None, late=(), lines=True, **more):
    """Recorder entries of a rank from (name, sizes) pairs; the first `done` are over; `late`: {index: seconds}."""
    late, found, ns = dict(late), [], 0
    for i, (name, sizes) in enumerate(calls):
        ns += 10**6 + int(late.get(i, 0) * 1e9)
        line = ("ddp" if sizes in ([[40]], [[90]]) else 30 + len(name)) if lines else None
        found.append(entry(i + 1, name, sizes, done is None or i < done, ns, line, **more))
    return found


def leave(folder, by_rank, members=None, pickled=False):
    ranks = str(list(members or by_rank))
    for rank, found in by_rank.items():
        dump = {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}}
        dump |= {"pg_status": {}, "comm_lib_version": "", "entries": found}
        data = pickle.dumps(dump, protocol=2) if pickled else json.dumps(dump).encode()
        (folder / f"comm_lib_trace_rank_{rank}").write_bytes(data)


def log(folder, rank, text):
    (folder / f"rank_{rank}.log").write_text(text)


TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 20, in train\n'
TIMEOUT = TRACEBACK + "RuntimeError: Timed out waiting 4000ms"


def run(calls=STEP * 3, ranks=4, **changed):
    """The entries of `ranks` ranks that stop in the last of `calls`; `changed`: other calls for r0, r1, ..."""
    return {
        rank: entries(changed.get(f"r{rank}", calls), done=len(calls) - 1 if f"r{rank}" not in changed else None)
        for rank in range(ranks)
    }


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_skipped_collective(tmp_path, rank, pickled):
    at = [*STEP, *STEP[:3]]
    odd = [*STEP, *STEP[:2], STEP[3]]
    leave(tmp_path, run(at, **{f"r{rank}": odd}), pickled=pickled)
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation, found.seq) == ("skipped_collective", (rank,), "all_reduce", 7)
    assert found.sizes == ((1,),) and found.where == "report, train.py:40"
    assert "all_reduce([1])" in found.evidence[0]


def test_a_skipped_last_collective_of_a_step_is_found_through_the_next_step(tmp_path):
    at = [*STEP, *STEP]
    leave(tmp_path, run(at, r1=[*STEP, *STEP[:3], STEP[0], STEP[1]]))
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation) == ("skipped_collective", (1,), "all_gather")


@pytest.mark.parametrize("odd", [0, 1])
def test_two_ranks_without_a_majority_are_judged_by_what_the_sequence_did_before(tmp_path, odd):
    at = [*STEP, *STEP, *STEP[:3]]
    leave(tmp_path, run(at, ranks=2, **{f"r{odd}": [*STEP, *STEP, *STEP[:2], STEP[3]]}))
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("skipped_collective", (odd,))


def test_two_ranks_that_differ_in_their_first_collective_are_both_named(tmp_path):
    leave(tmp_path, run([STEP[0]], ranks=2, r1=[STEP[2]]))
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("mismatch", (0, 1))


def test_wrong_order(tmp_path):
    swapped = [*STEP, ("all_reduce", [[1]]), ("all_reduce", [[5]])]
    leave(tmp_path, run([*STEP, ("all_reduce", [[5]]), ("all_reduce", [[1]])], r3=swapped))
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.seq) == ("wrong_order", (3,), 5)


@pytest.mark.parametrize("change", [("all_gather", [[5]]), ("all_gather", [[8], [1]])])
def test_mismatched_shapes(tmp_path, change):
    leave(tmp_path, run([*STEP, *STEP], r0=[*STEP, *STEP[:3], change]))
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation, found.sizes) == ("mismatched_shapes", (0,), "all_gather", ((8,),))


def test_mismatched_dtypes(tmp_path):
    ranks = run([*STEP, *STEP])
    ranks[2][-1]["input_dtypes"] = ["Half"]
    leave(tmp_path, ranks)
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("mismatched_shapes", (2,))


def test_a_collective_on_one_rank_only(tmp_path):
    leave(tmp_path, run([*STEP, STEP[0]], r0=[*STEP, ("barrier", [])]))
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation) == ("one_rank_only", (0,), "barrier")


def test_a_collective_too_many_that_looks_like_others_shows_in_what_follows(tmp_path):
    leave(tmp_path, run([*STEP, *STEP[:2]], r1=[*STEP, ("all_reduce", [[7]]), STEP[0], STEP[1]]))
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.sizes) == ("one_rank_only", (1,), ((7,),))


def test_an_unused_parameter_shows_as_buckets_that_never_left(tmp_path):
    leave(tmp_path, run([*STEP, *STEP[:2]], r2=[*STEP, STEP[2]]))
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.sizes) == ("unused_parameter", (2,), ((40,),))
    assert "2 of DDP's buckets" in found.evidence[2]


def test_ddp_names_the_rank_itself(tmp_path):
    log(
        tmp_path,
        1,
        f"step 3\n{TRACEBACK}RuntimeError: Expected to have finished reduction in the prior iteration before starting "
        "a new one. ...\n"
        "Parameter indices which did not receive grad for rank 1: 2 3\n In addition, ...\n",
    )
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.step) == ("unused_parameter", (1,), 3)


def test_a_rank_that_is_gone(tmp_path):
    ranks = run([*STEP, STEP[0]])
    del ranks[3]
    leave(tmp_path, ranks, members=range(4))
    for rank in range(3):
        log(tmp_path, rank, f"step 1\n{TIMEOUT}\n")
    log(tmp_path, 3, "step 1\n")
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation, found.step) == ("rank_gone", (3,), "all_reduce", 1)


def test_torchrun_says_which_signal(tmp_path):
    (tmp_path / "torchrun.log").write_text(
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-29_18:00:00\n  host      : node7\n"
        "  rank      : 11 (local_rank: 3)\n  exitcode  : -9 (pid: 4711)\n  error_file: <N/A>\n"
    )
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("rank_gone", (11,)) and "SIGKILL" in found.evidence[0]


@pytest.mark.parametrize("layout", ["rank_{}.log", "attempt_0/{}/stderr.log", "err-rank{}-host.txt"])
def test_unequal_batches(tmp_path, layout):
    leave(tmp_path, {rank: entries([*STEP, *STEP[:1]], done=4) for rank in (0, 1, 3)} | {2: entries(STEP)})
    for rank in range(4):
        path = tmp_path / layout.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("step 0\nepoch finished after 1 steps\n" if rank == 2 else f"step 0\nstep 1\n{TIMEOUT}\n")
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation) == ("unequal_batches", (2,), "all_reduce")


def test_a_rank_that_does_not_arrive_and_its_stack(tmp_path):
    leave(tmp_path, {rank: entries([*STEP, *STEP[:1]], done=4) for rank in (0, 1, 3)} | {2: entries(STEP)})
    (tmp_path / "stack_rank_2.txt").write_text(
        'Thread 0x00007f (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 324 in wait\n\n'
        'Thread 0x00007e (most recent call first):\n  File "/home/u/data.py", line 12 in read\n'
        '  File "/home/u/train.py", line 9 in main\n'
    )
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.where) == ("slow_rank", (2,), "read, data.py:12")
    assert any("in no collective" in line for line in found.evidence)


def test_the_stacks_of_py_spy(tmp_path):
    leave(tmp_path, {0: entries([*STEP, STEP[0]], done=4), 1: entries(STEP)})
    (tmp_path / "py-spy-rank1.txt").write_text(
        'Process 4711: python train.py\nPython v3.11.2 (/usr/bin/python3.11)\n\nThread 4711 (idle): "MainThread"\n'
        '    read (data.py:12)\n    main (train.py:9)\nThread 4712 (idle): "Thread-1"\n    wait (threading.py:324)\n'
    )
    assert why(tmp_path).where == "read, data.py:12"


def test_a_slow_rank_that_always_arrives(tmp_path):
    calls = STEP * 10
    late = {i: 0.2 for i in range(12, 40, 4)}
    waits = {i: 0.2 for i in range(13, 40, 4)}  # the others enter the next call later: they had to wait
    leave(tmp_path, {r: entries(calls, late=late if r == 1 else waits) for r in range(4)})
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation, found.seq) == ("slow_rank", (1,), "all_reduce", 13)
    assert "7 times the others waited for rank 1, 1.40 s in all" in found.evidence[0]


def test_lateness_that_goes_round_is_the_machines(tmp_path):
    """Every rank is late now and then, and so is one of them three times: no accusation."""
    calls, dice = STEP * 10, random.Random(1)
    for culprits in ([0, 1, 2, 3] * 3, [2, 2, 2]):
        at = sorted(dice.sample(range(4, 38, 2), len(culprits)))
        late = {r: {i: 0.3 for i, who in zip(at, culprits, strict=True) if who == r} for r in range(4)}
        late = {r: late[r] | {i + 1: 0.3 for i, who in zip(at, culprits, strict=True) if who != r} for r in range(4)}
        leave(tmp_path, {r: entries(calls, late=late[r]) for r in range(4)})
        assert why(tmp_path).kind is None


def test_a_clock_that_is_ahead_is_no_lateness(tmp_path):
    ranks = {r: entries(STEP * 10) for r in range(4)}
    for one in ranks[2]:
        one["time_created_ns"] += 10**10
    leave(tmp_path, ranks)
    assert why(tmp_path).kind is None


def test_an_exception_is_the_cause_and_lost_peers_are_consequences(tmp_path):
    closed = TIMEOUT.replace("Timed out waiting 4000ms", "[/pair.cc:537] Connection closed by peer [127.0.0.1]:4711")
    for rank in (0, 1, 3):
        log(tmp_path, rank, f"step 5\n{closed}\n")
    log(
        tmp_path,
        2,
        "step 5\nTraceback (most recent call last):\n  File \"train.py\", line 3, in x\nKeyError: 'label'\n",
    )
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.step) == ("exception", (2,), 5) and "KeyError" in found.evidence[0]


def test_an_epoch_that_ended_is_not_the_end(tmp_path):
    leave(tmp_path, {0: entries([*STEP, STEP[0]], done=4), 1: entries(STEP), 2: entries([*STEP, STEP[0]], done=4)})
    log(tmp_path, 1, "step 0\nepoch 0 finished\nstep 1\n")
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation) == ("no_show", (1,), "all_reduce")


def test_without_recorders_of_some_ranks_their_logs_tell(tmp_path):
    leave(tmp_path, {r: entries([*STEP, STEP[0]], done=4) for r in (2, 3)}, members=range(4))
    for rank in range(4):
        log(tmp_path, rank, "step 0\ntraining finished after 1 steps\n" if rank == 0 else f"step 1\n{TIMEOUT}\n")
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("unequal_batches", (0,))
    log(tmp_path, 0, "step 0\n")
    assert (why(tmp_path).kind, why(tmp_path).ranks) == ("rank_gone", (0,))
    for path in tmp_path.glob("*.log"):
        path.unlink()
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("no_show", (0, 1)) and "files are lost" in found.evidence[0]


def test_those_whom_the_launcher_ends_are_not_accused(tmp_path):
    blocks = [
        f"[{i}]:\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 1)\n"
        for i, (rank, code) in enumerate([(0, -15), (1, -9), (2, -15)])
    ]
    (tmp_path / "torchrun.err").write_text("Failures:\n" + "".join(blocks))
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("rank_gone", (1,))


def test_one_log_of_many_ranks(tmp_path):
    lines = [f"[rank{r}]: step 4\n[rank{r}]: Traceback (most recent call last):\n" for r in range(3)]
    ends = ["RuntimeError: Timed out", "ValueError: bad sample 17", "RuntimeError: Connection closed by peer"]
    text = "".join(
        line + f'[rank{r}]:   File "train.py", line 3, in x\n[rank{r}]: {ends[r]}\n' for r, line in enumerate(lines)
    )
    (tmp_path / "all.out").write_text(text)
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("exception", (1,))


def test_nccls_watchdog_without_any_dump(tmp_path):
    text = (
        "[rank{r}]:[E1129 18:00:00.1 ProcessGroupNCCL.cpp:685] [Rank {r}] Watchdog caught collective operation timeout:"
        " WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={n}, NumelOut={n}, Timeout(ms)=600000) ran for 600014 "
        "milliseconds before timing out.\n"
    )
    works = [(12, "ALLREDUCE", 100)] * 2 + [(12, "BROADCAST", 7)] + [(12, "ALLREDUCE", 100)]
    (tmp_path / "job.err").write_text(
        "".join(text.format(r=r, seq=seq, op=op, n=n) for r, (seq, op, n) in enumerate(works))
    )
    found = why(tmp_path)
    assert found.ranks == (2,) and found.seq == 12 and found.operation == "broadcast"


def test_the_fingerprints_of_debug_detail(tmp_path):
    said = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {a} is running collective: "
        "CollectiveFingerPrint(SequenceNumber=9, OpType=ALLREDUCE, TensorShape=[{n}], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(...)), but Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=9, OpType=ALLREDUCE, TensorShape=[3], "
        "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(...)).Collectives differ in the following aspects: "
        "\t Tensor Tensor shapes: 2vs 3"
    )
    for rank in (0, 2, 3):
        log(tmp_path, rank, f"Traceback (most recent call last):\n{said.format(a=rank, n=2)}\n")
    found = why(tmp_path)
    assert (found.kind, found.ranks, found.operation) == ("mismatched_shapes", (1,), "all_reduce")


def test_monitored_barrier_names_the_rank(tmp_path):
    log(tmp_path, 0, f"{TIMEOUT}\n[Rank 0]: Rank 3 failed to pass monitoredBarrier in 2000 ms\n")
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("slow_rank", (3,))


def test_all_in_the_same_collective_accuses_nobody(tmp_path):
    leave(tmp_path, run())
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("stuck", ())


def test_a_healthy_job(tmp_path):
    leave(tmp_path, {r: entries(STEP * 3) for r in range(4)})
    for rank in range(4):
        log(tmp_path, rank, "step 0\nstep 1\nstep 2\ntraining finished after 3 steps\n")
    found = why(tmp_path)
    assert found.kind is None and found.ranks == () and found.lost == () and found.read == 8


def test_roots_of_gather_and_scatter_may_have_other_shapes(tmp_path):
    own = [*STEP, ("gather", [[8]]), ("scatter", [[4], [4]]), ("all_to_all", [[3], [5]])]
    other = [*STEP, ("gather", [[8]]), ("scatter", []), ("all_to_all", [[5], [3]])]
    leave(tmp_path, {0: entries(own), 1: entries(other), 2: entries(other)})
    assert why(tmp_path).kind is None


def test_another_group_is_not_mixed_up(tmp_path):
    pair = [entry(i + 1, "broadcast", [[3]], group=("1", "tensor_parallel")) for i in range(5)]
    ranks = {r: entries(STEP * 2) + (pair if r < 2 else []) for r in range(4)}
    leave(tmp_path, ranks)
    assert why(tmp_path).kind is None


def test_recorders_that_begin_at_different_calls(tmp_path):
    ranks = run([*STEP, *STEP[:3]], r2=[*STEP, *STEP[:2], STEP[3]])
    ranks[0] = ranks[0][3:]  # a ring buffer forgets the oldest
    leave(tmp_path, ranks)
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("skipped_collective", (2,))


def test_torn_empty_and_foreign_files_are_named_and_the_rest_is_used(tmp_path):
    leave(tmp_path, run([*STEP, *STEP[:3]], r2=[*STEP, *STEP[:2], STEP[3]]))
    torn = tmp_path / "comm_lib_trace_rank_3"
    torn.write_bytes(torn.read_bytes()[:500])
    (tmp_path / "comm_lib_trace_rank_9").write_bytes(b"")
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04" + bytes(1000))
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "core").symlink_to("/dev/zero")
    (tmp_path / "notes.txt").write_text("hello " * 100)
    found = why(tmp_path)
    assert (found.kind, found.ranks) == ("skipped_collective", (2,))
    assert len(found.lost) == 2 and any("rank_3" in line for line in found.lost)


def test_a_pickle_that_wants_to_run_something_is_refused(tmp_path):
    class Bad:
        def __reduce__(self):
            return exec, ("open('/tmp/ddplab-was-here', 'w')",)

    (tmp_path / "comm_lib_trace_rank_0").write_bytes(pickle.dumps({"entries": [], "pg_config": Bad()}, protocol=2))
    found = why(tmp_path)
    assert found.kind is None and len(found.lost) == 1


def test_gzipped_dumps(tmp_path):
    leave(tmp_path, run([*STEP, STEP[0]], r0=[*STEP, ("barrier", [])]))
    for path in list(tmp_path.iterdir()):
        path.with_name(path.name + ".json.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert why(tmp_path).ranks == (0,)


def test_an_empty_folder_and_no_folder(tmp_path):
    found = why(tmp_path)
    assert found.kind is None and "nothing can be told" in found.evidence[0]
    with pytest.raises(FileNotFoundError, match="gone"):
        why(tmp_path / "gone")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="a file"):
        why(tmp_path / "file")


def test_the_command_line(tmp_path, capsys):
    leave(tmp_path, run([*STEP, STEP[0]], r0=[*STEP, ("barrier", [])]))
    assert main(["why", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("A collective on some ranks only: rank 0, at barrier (number 5)") and "What to do: move" in text
    )
    assert main(["why", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == [0]
    assert main(["why", str(tmp_path / "gone")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["why", str(tmp_path / "empty")]) == 1
    assert "holds no flight recorder, log, stack or trace: nothing can be told" in capsys.readouterr().out


def test_what_is_lost_is_named_and_alone_it_is_no_health(tmp_path, capsys):
    """Dumps, logs, stacks that cannot be read: each with its reason, exit code 1; beside others, their verdict."""
    lost = {
        "comm_lib_trace_rank_0": (pickle.dumps({"version": "2.10", "entries": []}, 2)[:9], "not text, and no dump"),
        "flight_rank_1.json": (b'{"version": "2.1', "JSON, but neither a dump"),
        "flight_rank_2.json": (b'{"entries": [', "neither a pickle nor JSON"),
        "flight_rank_3.json.gz": (gzip.compress(b'{"entries": []}')[:14], "packed, and neither"),
        "rank_4.log.gz": (gzip.compress(b"step 3\n"), "or a log, which must be unpacked"),
        "stacks_rank_5.txt": (b"\0" * 40, "not text"),
        "comm_lib_trace_rank_6": (b"", "empty"),
        "comm_lib_trace_rank_8": (b'"process_group": ["0", "default_pg"]}]}', "its name says dump or trace"),
    }
    for name, (data, _) in lost.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "rank_7.log").symlink_to("/dev/zero")
    (tmp_path / "model_rank_0.pt").write_bytes(b"PK\x03\x04" + bytes(100))  # foreign, like the photograph
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\0")

    def complaints(found):
        lines = {line.partition(": ")[0].rpartition("/")[2]: line for line in found.lost}
        assert set(lines) == {*lost, "rank_7.log"}
        assert all(reason in lines[name] for name, (_, reason) in lost.items())
        assert "a link, a pipe or a device, which is not followed" in lines["rank_7.log"]

    complaints(found := why(tmp_path))
    assert found.kind is None and found.read == 0 and main(["why", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Nothing could be read, so nothing can be told.") and out.count("Not read: ") == 9
    (tmp_path / "more").mkdir()
    leave(tmp_path / "more", run([*STEP, STEP[0]], r0=[*STEP, ("barrier", [])]))
    complaints(found := why(tmp_path))
    assert found.ranks == (0,) and found.read == 4 and main(["why", str(tmp_path)]) == 0


def test_files_that_nobody_may_read_are_named(capsys):
    with ordinary_user() as folder:
        found = why(folder)
        assert found.read == 0 and main(["why", str(folder)]) == 1
        with pytest.raises(PermissionError, match="permission denied"):
            why(folder / "shut" / "x")
    assert any("closed.txt: cannot be read: permission denied" in line for line in found.lost)
    assert any("shut: cannot be read: permission denied" in line for line in found.lost)


def test_a_text_that_names_no_rank_says_so(tmp_path):
    (tmp_path / "train.txt").write_text("loss 0.3\nloss 0.2\n")
    found = why(tmp_path)
    assert found.read == 0 and "no line of train.txt says of which rank it is" in found.evidence[0]


def test_an_empty_path_is_not_the_working_folder():
    with pytest.raises(FileNotFoundError, match="the path is empty"):
        why("")


def test_mangled_files_never_raise(tmp_path):
    """2,000 folders in which bytes were cut, flipped, doubled or dropped: an answer each time, and no traceback."""
    leave(tmp_path, run(STEP[:3], ranks=3, r2=[*STEP[:2], STEP[3]]))
    log(tmp_path, 0, f"2026-11-29 18:00:00,123 rank 0 INFO step 3\n{TIMEOUT}\n")
    log(
        tmp_path,
        1,
        'Fatal Python error: Aborted\n\nThread 0x7f (most recent call first):\n  File "a.py", line 3 in f\n',
    )
    clean = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def check(seed):
        dice = random.Random(seed)
        torn = dice.sample(sorted(clean), 2)
        for name in torn:
            (tmp_path / name).write_bytes(mangled_bytes(dice, clean[name]))
        what = tuple((name, (tmp_path / name).read_bytes()) for name in torn)
        found = why(tmp_path)
        assert found.kind is None or found.evidence
        json.dumps(found.to_dict())
        assert str(found)
        for name in torn:
            (tmp_path / name).write_bytes(clean[name])
        return what

    for_seeds(check)


def test_why_is_public():
    assert dl.why is why
