"""Running a function on ranks: results, blame, refusals, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist

from ddplab import _forkserver, _report
from ddplab import launch as launch_function
from ddplab.launch import RankError, _environment, launch, resolve_backend
from ddplab.processors import here

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest to find a helper below

ROOT = Path(__file__).resolve().parent.parent


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`, zombies left out."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [below for child in found for below in descendants(child)]


def wait_for_end(pids: list[int], seconds: float = 10) -> list[int]:
    """The processes that are still there after `seconds`; woken by the kernel, without sleeping."""
    end = time.monotonic() + seconds
    left = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not select.select([fd], [], [], max(0, end - time.monotonic()))[0]:
            left.append(pid)
        os.close(fd)
    return left


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test the fork server has no child left: no rank, no supervisor, nothing that a rank started."""
    yield
    if _forkserver._server is not None and _forkserver._server.usable():
        assert wait_for_end(descendants(_forkserver._server.process.pid)) == []


def rank() -> int:
    return dist.get_rank()


def wait_in_all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


# Results


def test_results_come_in_rank_order_and_the_group_works():
    def total(x):
        t = torch.full((3,), float(x + dist.get_rank()))
        dist.all_reduce(t)
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), t.tolist()

    assert launch(total, 10) == [(r, 4, "gloo", [46.0] * 3) for r in range(4)]


def test_lambdas_closures_classes_and_tensors_travel_by_value():
    class Box:
        def __init__(self, value):
            self.value = value

    offset = 5
    assert launch(lambda: offset + dist.get_rank(), ranks=2) == [5, 6]
    boxes = launch(lambda box: Box(box.value * dist.get_rank()), Box(torch.arange(100_000)), ranks=3)
    assert all(type(box) is Box for box in boxes)
    assert [torch.equal(box.value, r * torch.arange(100_000)) for r, box in enumerate(boxes)] == [True] * 3


def test_one_rank_works():
    assert launch(lambda: (dist.get_rank(), dist.get_world_size()), ranks=1) == [(0, 1)]


def test_a_function_of_a_module_that_ranks_cannot_import():
    source = "import os\ndef helper():\n    return 7\ndef fn():\n    return helper() + int(os.environ['RANK'])\n"
    module = type(sys)("made_by_hand")
    sys.modules["made_by_hand"] = module
    try:
        exec(source, module.__dict__)
        assert launch(module.fn, ranks=2) == [7, 8]
    finally:
        del sys.modules["made_by_hand"]


def test_ranks_are_seeded_differently_and_reproducibly():
    def draw():
        return torch.rand(1).item(), float(numpy.random.rand()), random.random(), torch.get_num_threads()

    expected = []
    for r in range(2):
        generator = torch.Generator().manual_seed(3 + r)
        expected.append(
            (
                torch.rand(1, generator=generator).item(),
                float(numpy.random.RandomState(3 + r).rand()),
                random.Random(3 + r).random(),
                1,
            )
        )
    assert launch(draw, ranks=2, seed=3) == expected


def test_environment_path_and_folder_are_those_of_the_moment(monkeypatch, tmp_path):
    def look():
        import only_for_this_test

        return os.environ.get("LATE"), os.environ.get("MINE"), os.getcwd(), only_for_this_test.value

    (tmp_path / "only_for_this_test.py").write_text("value = 1")
    launch(rank, ranks=1)
    monkeypatch.setenv("LATE", "set after the fork server started")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = ("set after the fork server started", "given", str(tmp_path))
    assert launch(look, ranks=1, env={"MINE": "given"}) == [(*expected, 1)]
    (tmp_path / "only_for_this_test.py").write_text("value = 22")  # an edited module is imported afresh
    assert launch(look, ranks=1, env={"MINE": "given"}) == [(*expected, 22)]
    monkeypatch.delenv("LATE")
    assert launch(lambda: os.environ.get("LATE"), ranks=1) == [None]


def test_ranks_of_a_call_that_trains_have_dynamo_from_the_start():
    def loaded(trains):
        before = "torch._dynamo" in sys.modules
        if trains:
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        return before

    assert launch(loaded, False, ranks=1) == [True]  # it might have trained


def test_late_debug_level_reaches_torch():
    level = launch(lambda: str(dist.get_debug_level()), ranks=1, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert level == [str(dist.DebugLevel.DETAIL)]


def test_two_launches_at_once_from_threads():
    results = {}

    def run(key):
        def fn():
            t = torch.full((1,), float(key))
            dist.all_reduce(t)
            return t.item()

        results[key] = launch(fn, ranks=2)

    threads = [threading.Thread(target=run, args=(key,)) for key in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [2.0, 2.0], 10: [20.0, 20.0]}


def test_ranks_are_not_forks_of_the_caller():
    torch.ones(500, 500) @ torch.ones(500, 500)  # the caller's thread pool is up: a fork of it would hang
    sys.marker_of_the_caller = True
    try:
        assert launch(lambda: (hasattr(sys, "marker_of_the_caller"), os.getsid(0) == 0), ranks=1) == [(False, False)]
        assert launch(lambda: (torch.ones(500, 500) @ torch.ones(500, 500)).sum().item(), ranks=2) == [500.0**3] * 2
    finally:
        del sys.marker_of_the_caller


# Output


def test_output_is_shown_rank_by_rank_also_what_c_code_and_children_print(capfd):
    def talk():
        print("python", dist.get_rank())
        print("to stderr", file=sys.stderr)
        os.write(1, b"descriptor\n")
        subprocess.run(["echo", "child"], check=True)
        print("\r10%\r100%\nno newline at the end", end="")

    launch(talk, ranks=2)
    expected = ["python {}", "to stderr", "descriptor", "child", "100%", "no newline at the end"]
    lines = [f"[{r}] {line.format(r)}" for r in range(2) for line in expected]
    assert capfd.readouterr() == ("".join(f"{line}\n" for line in lines), "")
    launch(talk, ranks=2, show=False)
    assert capfd.readouterr() == ("", "")


def test_output_is_bounded(capfd):
    def flood():
        for i in range(100_000):
            print(f"line {i}")

    launch(flood, ranks=1)
    text = capfd.readouterr().out
    total = sum(len(f"line {i}\n") for i in range(100_000))
    assert text.startswith("[0] line 0\n") and text.endswith("[0] line 99999\n")
    assert f"[0] ... {total - 2 * 8192} bytes left out ..." in text
    assert len(text) < 40_000


def test_a_rank_that_floods_its_output_still_runs_out_of_time():
    def flood():
        subprocess.run(["yes"], check=True)

    with pytest.raises(RankError, match="no answer within 1 s from rank 0 of 1"):
        launch(flood, ranks=1, timeout=1, show=False)


def test_a_rank_may_close_its_output():
    assert launch(lambda: sys.stdout.close(), ranks=1) == [None]


def test_output_is_shown_when_a_rank_fails(capfd):
    def fail():
        print("before")
        raise ValueError("no")

    with pytest.raises(RankError):
        launch(fail, ranks=1)
    assert capfd.readouterr().out == "[0] before\n"


# Failures


def test_the_real_error_is_named_twenty_times_out_of_twenty():
    def work():
        try:
            if dist.get_rank() == 1:
                raise ValueError("REAL CAUSE on rank 1")
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()

    for _ in range(20):
        with pytest.raises(RankError, match="rank 1: ValueError: REAL CAUSE on rank 1") as caught:
            launch(work, ranks=2)
        assert caught.value.rank == 1
        assert "in work" in caught.value.traceback
        assert [line.startswith("rank 0: RuntimeError") for line in caught.value.consequences] == [True]


def test_the_real_error_is_named_when_its_rank_tells_last():
    def work():
        try:
            if dist.get_rank() == 1:
                raise ValueError("REAL CAUSE on rank 1")
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
            if os.environ["RANK"] == "1":
                time.sleep(2)

    with pytest.raises(RankError, match="rank 1: ValueError: REAL CAUSE") as caught:
        launch(work, ranks=2)
    assert caught.value.rank == 1 and len(caught.value.consequences) == 1


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("raise KeyError('missing')", "rank 2: KeyError: 'missing'"),
        ("import os; os._exit(1)", "rank 2: died without a word: exit code 1"),
        ("import os; os._exit(0)", "rank 2: died without a word: exit code 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"rank 2: died .* killed by SIGKILL \(signal 9\)"),
        ("import ctypes; ctypes.string_at(0)", r"rank 2: died .* killed by SIGSEGV \(signal 11\)(.|\n)*in string_at"),
        ("import sys; sys.exit(0)", r"rank 2: left by sys.exit\(0\) before it had a result: return from the function"),
    ],
)
def test_a_rank_that_fails_or_dies_is_named_and_the_next_launch_works(statement, message):
    def work():
        if dist.get_rank() == 2:
            exec(statement)
        wait_in_all_reduce()

    with pytest.raises(RankError, match=message) as caught:
        launch(work, ranks=3, show=False)
    assert caught.value.rank == 2
    assert sorted(line[:6] for line in caught.value.consequences) == ["rank 0", "rank 1"]
    assert launch(rank, ranks=2) == [0, 1]


@pytest.mark.parametrize("timeout", [10**7, 1e300])
def test_a_limit_of_years_is_a_limit(timeout):
    assert launch(rank, ranks=2, timeout=timeout) == [0, 1]


def test_a_failure_does_not_wait_for_ranks_that_do_not_notice():
    def work():
        if dist.get_rank() == 0:
            raise ValueError("only here")
        time.sleep(1000)

    with pytest.raises(RankError, match="rank 0: ValueError: only here") as caught:
        launch(work, ranks=2, timeout=500)
    assert caught.value.consequences == []


def test_ranks_that_fail_alike_are_told_once():
    def work():
        if dist.get_rank() == 2:
            raise KeyError("another one")
        raise ValueError("the batch is empty")

    with pytest.raises(RankError) as caught:
        launch(work, ranks=3)
    text = str(caught.value)
    assert text.count("ValueError: the batch is empty") == 2  # the first line, and the end of the traceback
    if caught.value.rank == 2:
        assert text.endswith("rank 0: ValueError: the batch is empty\n  rank 1: ValueError: the batch is empty")
    else:
        assert f"The same on rank {1 - caught.value.rank}.\n\nAs a consequence, or later:\n  rank 2: KeyError" in text
    assert len(caught.value.consequences) == 2

    with pytest.raises(RankError) as caught:
        launch(lambda: 1 / 0, ranks=3)
    others = ", ".join(str(r) for r in range(3) if r != caught.value.rank)
    assert str(caught.value).endswith(f"ZeroDivisionError: division by zero\n\nThe same on ranks {others}.")


class SlowToArrive:
    """Unpickling it takes forever on rank 1."""

    def __reduce__(self):
        return eval, ("__import__('time').sleep(1000) if __import__('os').environ['RANK'] == '1' else None",)


def one_sleeps():
    if dist.get_rank() == 1:
        time.sleep(1000)
    wait_in_all_reduce()


def one_hangs_in_c():
    import ctypes

    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter lock: no Python code can run in this rank


def one_returns():
    if dist.get_rank() != 0:
        wait_in_all_reduce()


@pytest.fixture(scope="module")
def hangs() -> dict[str, RankError]:
    """The errors of four launches that hang, all at once."""
    cases = {
        "sleeps": (one_sleeps, (), 3),
        "in_c": (one_hangs_in_c, (), 1),
        "returns": (one_returns, (), 3),
        "absent": (print, (SlowToArrive(),), 2),
    }
    errors = {}

    def run(name, fn, args, ranks):
        with pytest.raises(RankError) as caught:
            launch(fn, *args, ranks=ranks, timeout=4, show=False)
        errors[name] = caught.value

    threads = [threading.Thread(target=run, args=(name, *case)) for name, case in cases.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_a_hang_ends_with_the_stack_of_each_rank(hangs):
    error = hangs["sleeps"]
    assert str(error).startswith("no answer within 4 s from ranks 0, 1, 2 of 3\n")
    waiting, sleeping = error.traceback.split("rank 1, most recent call first:")
    assert waiting.startswith("ranks 0, 2, most recent call first:") and "dist.all_reduce(torch.ones(1))" in waiting
    assert "time.sleep(1000)" in sleeping and "all_reduce(" not in sleeping
    assert error.rank is None


def test_a_rank_that_hangs_in_c_code_shows_its_stack_too(hangs):
    assert str(hangs["in_c"]).startswith("no answer within 4 s from rank 0 of 1\n")
    assert "ctypes.PyDLL(None).sleep(1000)" in hangs["in_c"].traceback and hangs["in_c"].rank == 0


def test_a_rank_that_returns_early_is_told_apart_from_those_that_wait(hangs):
    assert str(hangs["returns"]).startswith("no answer within 4 s from ranks 1, 2 of 3; rank 0 returned already\n")


def test_a_rank_that_never_arrives_is_named(hangs):
    assert "; rank 1 never arrived: 1 of 2 ranks came to the rendezvous\n" in str(hangs["absent"])
    assert hangs["absent"].rank == 1


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(RankError("rank 1: no", 1, "traceback", ["rank 0: lost"])))
    assert (str(error), error.rank, error.traceback, error.consequences) == (
        "rank 1: no",
        1,
        "traceback",
        ["rank 0: lost"],
    )


def test_the_caller_keeps_no_file_open():
    def fail():
        raise ValueError("no")

    launch(rank, ranks=2)
    before = os.listdir("/proc/self/fd")
    launch(rank, ranks=2)
    with pytest.raises(RankError):
        launch(fail, ranks=2)
    assert os.listdir("/proc/self/fd") == before


def test_what_a_rank_started_ends_with_it():
    def work():
        return subprocess.Popen(["sleep", "1000"]).pid

    assert wait_for_end(launch(work, ranks=2)) == []

    def die():
        Path(os.environ["NOTE"]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        os._exit(3)

    note = Path(f"/proc/self/fd/{os.memfd_create('note')}")
    with pytest.raises(RankError, match="exit code 3"):
        launch(die, ranks=1, env={"NOTE": f"/proc/{os.getpid()}/fd/{note.name}"})
    assert wait_for_end([int(note.read_text())]) == []
    os.close(int(note.name))


def test_killed_supervisor_or_fork_server_is_one_sentence_and_the_next_launch_works():
    def kill_parent():
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    def kill_grandparent():
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(1000)

    for work in (kill_parent, kill_grandparent):
        with pytest.raises(RankError, match="the supervisor of the ranks was killed, and the ranks with it"):
            launch(work, ranks=2)
        assert launch(rank, ranks=2) == [0, 1]


# Refusals


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "4", 100_000])
def test_a_senseless_number_of_ranks_is_refused(ranks):
    with pytest.raises(ValueError, match="ranks is the number of processes, from 1 to 256"):
        launch(rank, ranks=ranks)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "60", None])
def test_a_senseless_timeout_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout is a positive number of seconds"):
        launch(rank, timeout=timeout)


def test_a_senseless_seed_is_refused():
    with pytest.raises(ValueError, match="seed is a whole number, not 'lucky'"):
        launch(rank, seed="lucky")


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to the ranks: the variable 'lock' that it uses does not"):
        launch(lambda: lock)
    with pytest.raises(TypeError, match=r"rank cannot be sent to the ranks: argument 1 does not travel \(cannot"):
        launch(rank, 0, lock)
    with pytest.raises(TypeError, match="launch takes a function and its arguments, not 3"):
        launch(3)
    with pytest.raises(TypeError, match="env maps names to text, but 'N' is 1"):
        launch(rank, env={"N": 1})


def test_a_result_that_cannot_be_sent_is_named_with_its_rank():
    with pytest.raises(RankError, match=r"the result of rank 1 \(a lock\) cannot be sent back") as caught:
        launch(lambda: threading.Lock() if dist.get_rank() == 1 else 0, ranks=2)
    assert caught.value.rank == 1


def test_a_rank_cannot_launch():
    with pytest.raises(RankError, match="launch was called inside rank 0: a rank cannot launch ranks"):
        launch(lambda: launch_function(lambda: 1), ranks=1)


@pytest.mark.parametrize("name", ["^lo", "nosuchif0", "127.0.0.1"])
def test_an_interface_that_gloo_cannot_use_is_refused_before_the_start(name):
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=.*choose from .*lo"):
        launch(rank, env={"GLOO_SOCKET_IFNAME": name})


# Backends and scheduling


@pytest.mark.parametrize(
    ("gpus", "ranks", "device", "expected"),
    [
        (0, 4, "auto", ("gloo", "cpu")),
        (1, 4, "auto", ("gloo", "cuda")),
        (4, 4, "auto", ("nccl", "cuda")),
        (8, 4, "cuda", ("nccl", "cuda")),
        (2, 4, "cuda", ("gloo", "cuda")),
        (8, 4, "cpu", ("gloo", "cpu")),
    ],
)
def test_backend_follows_the_number_of_gpus(monkeypatch, gpus, ranks, device, expected):
    monkeypatch.setattr(sys.modules["ddplab.launch"], "gpu_count", lambda: gpus)
    assert resolve_backend(ranks, device) == expected


def test_a_device_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["ddplab.launch"], "gpu_count", lambda: 0)
    with pytest.raises(ValueError, match='device="cuda", but no GPU is visible here'):
        launch(rank, device="cuda")
    with pytest.raises(ValueError, match='device is "auto", "cpu" or "cuda", not \'tpu\''):
        launch(rank, device="tpu")


def test_nothing_of_ours_is_reachable_from_outside_unless_asked_for(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    env = _environment(None, "nccl", {})
    assert [env[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE")] == ["lo", "lo", "0"]
    assert _environment(None, "nccl", {"NCCL_SOCKET_IFNAME": "eth1"})["NCCL_SOCKET_IFNAME"] == "eth1"
    assert launch(lambda: os.environ["GLOO_SOCKET_IFNAME"], ranks=1) == ["lo"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's socket tables under /proc")
def test_ranks_listen_on_loopback_only():
    def listeners():
        t = torch.ones(1)
        dist.all_reduce(t)
        own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and os.path.exists(fd)}
        found = []
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                unconnected = fields[2].strip("0:") == ""
                if f"socket:[{fields[9]}]" in own and (fields[3] == "0A" or unconnected):
                    found.append((table, fields[1].partition(":")[0]))
        dist.barrier()
        return found

    loopback = ("tcp", f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}")
    for found in launch(listeners, ranks=4):
        assert found and set(found) == {loopback}


def test_realtime_needs_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError, match="realtime=True needs root"):
        launch(rank, realtime=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may use the realtime scheduler")
def test_realtime_is_opt_in():
    assert launch(lambda: os.sched_getscheduler(0), ranks=1) == [os.SCHED_OTHER]
    assert launch(lambda: os.sched_getscheduler(0), ranks=1, realtime=True) == [os.SCHED_RR]


@pytest.mark.skipif(here() > 15, reason="more ranks than processors would be more than 16 here")
def test_more_ranks_than_processors_are_scheduled_as_batch_jobs():
    """And so are the threads that torch makes in them, which inherit it."""

    def policies():
        dist.all_reduce(torch.ones(1))
        return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}

    assert launch(policies, ranks=here() + 1) == [{os.SCHED_BATCH}] * (here() + 1)
    assert launch(policies, ranks=here() + 1, realtime=True) == [{os.SCHED_RR}] * (here() + 1)


# Whole programs: scripts, signals, kernels, torchrun

SCRIPT = """
import os, sys
print("top level", __name__)
from ddplab.launch import launch

def fn():
    import torch, torch.distributed as dist
    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()

print(launch(fn, ranks=2), "torch" in sys.modules)
"""


def start(code: str, tmp_path: Path, **options) -> subprocess.Popen:
    """A script in its own folder, with that folder for its temporary files, started like a user starts it."""
    script = tmp_path / "script.py"
    script.write_text(code)
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(script)], env=env, stdout=pipe, stderr=pipe, text=True, **options)


def test_plain_scripts_without_a_guard_two_at_once(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    for folder, process in [(folder, start(SCRIPT, folder)) for folder in folders]:
        out, err = process.communicate(timeout=60)
        assert (out, err, process.returncode) == ("top level __main__\n[2.0, 2.0] False\n", "", 0)
        assert list((folder / "tmp").iterdir()) == []


def wait_for_two(fifo: Path) -> None:
    """Until two ranks wrote a letter each into the named pipe."""
    fd = os.open(fifo, os.O_RDWR)  # our own writing end, so that there is no end of file between the two
    try:
        read = b""
        while read != b"xx":
            assert select.select([fd], [], [], 60)[0], f"only {read} came"
            read += os.read(fd, 1)
    finally:
        os.close(fd)


HANG = """
import sys
from ddplab.launch import launch

def hang():
    import time, torch.distributed as dist
    dist.barrier()
    with open({note!r}, "a") as note:
        note.write("x")
    time.sleep(1000)

try:
    launch(hang, ranks=2, timeout=500)
except KeyboardInterrupt:
    print("interrupted")
    print(launch(lambda: 5, ranks=2))
"""


def test_a_signal_to_the_caller_leaves_no_process_and_no_file(tmp_path):
    running = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # three callers at once: loading torch takes long
        folder = tmp_path / number.name
        folder.mkdir()
        os.mkfifo(folder / "note")
        running[number] = folder, start(HANG.format(note=str(folder / "note")), folder)
    for number, (folder, process) in running.items():
        wait_for_two(folder / "note")
        below = descendants(process.pid)
        assert len(below) == 4  # fork server, supervisor, two ranks
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert wait_for_end(below) == []
        assert list((folder / "tmp").iterdir()) == []
        expected = ("interrupted\n[5, 5]\n", 0) if number == signal.SIGINT else ("", -number)
        assert (out, process.returncode) == expected
        assert "Traceback" not in err


def test_an_interrupt_that_the_script_does_not_catch_shows_its_own_line_only(tmp_path):
    os.mkfifo(tmp_path / "note")
    bare = HANG.format(note=str(tmp_path / "note")).partition("try:")[0] + "launch(hang, ranks=2, timeout=500)\n"
    process = start(bare, tmp_path)
    wait_for_two(tmp_path / "note")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", -signal.SIGINT)
    frames = [line for line in err.splitlines() if line.startswith("  File ")]
    assert len(frames) == 2 and "script.py" in frames[0] and "launch.py" in frames[1], err
    assert err.endswith("KeyboardInterrupt: the launch was interrupted, and its ranks were ended\n")


def test_a_kernel_runs_cells_is_interrupted_and_killed_without_leftovers(tmp_path):
    from jupyter_client.manager import start_new_kernel

    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    manager, client = start_new_kernel(env=env, cwd=str(tmp_path), startup_timeout=60)
    pid = manager.provisioner.pid

    def run(code, during=lambda: None):
        message, text, ran = client.execute(code), "", False
        while True:
            answer = client.get_iopub_msg(timeout=60)
            if answer["parent_header"].get("msg_id") != message:
                continue
            kind, content = answer["msg_type"], answer["content"]
            if kind == "stream":
                text += content["text"]
            if kind == "error":
                text += f"{content['ename']}: {content['evalue']}"
            if kind == "status" and content["execution_state"] == "busy" and not ran:
                ran = True
                during()
            if kind == "status" and content["execution_state"] == "idle":
                return text

    def fifo(name):
        os.mkfifo(tmp_path / name)
        return (
            f"def hang():\n    import time, torch.distributed as dist\n    dist.barrier()\n"
            f"    open({str(tmp_path / name)!r}, 'w').write('x')\n    time.sleep(1000)\n"
            f"launch(hang, ranks=2, timeout=500)"
        )

    def wait_for_ranks(name):
        wait_for_two(tmp_path / name)
        return descendants(pid)

    try:
        cell = (
            "from ddplab.launch import launch\ndef w():\n    import torch.distributed as d\n    return d.get_rank()\n"
        )
        assert run(cell + "print(launch(w, ranks=2))") == "[0, 1]\n"
        assert "assert d.get_rank() == 0" in run(
            "def w():\n    import torch.distributed as d\n    assert d.get_rank() == 0\nlaunch(w, ranks=2)"
        )  # the traceback shows the cell's own line
        seen = []

        def interrupt():
            seen.extend(wait_for_ranks("one"))
            manager.interrupt_kernel()

        assert run(fifo("one"), interrupt).startswith("KeyboardInterrupt")
        server = run("from ddplab import _forkserver; print(_forkserver._server.process.pid)")
        assert wait_for_end([p for p in seen if p != int(server)], 5) == []
        assert run("print(launch(lambda: 3, ranks=2))") == "[3, 3]\n"
        client.execute(fifo("two"))
        below = wait_for_ranks("two")
        assert len(below) == 4
        os.kill(pid, signal.SIGKILL)
        assert wait_for_end(below) == []
        assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith((".", "ipykernel"))) == ["one", "two"]
    finally:
        client.stop_channels()
        with contextlib.suppress(queue.Empty):
            manager.shutdown_kernel(now=True)


def test_it_joins_a_torchrun_job_and_so_does_bench_which_prints_once(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "from ddplab.launch import launch\n"
        "def fn(x):\n"
        "    import torch, torch.distributed as dist\n"
        "    t = torch.tensor([x + dist.get_rank()])\n"
        "    dist.all_reduce(t)\n"
        "    return dist.get_rank(), t.item(), torch.initial_seed(), os.getppid()\n"
        "first = launch(fn, 10, ranks=7, seed=2)\n"
        "assert launch(fn, 20)[0][1] == 41\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(repr(first))\n"
        "from ddplab.cli import main\n"
        "sys.exit(main('bench all_reduce --sizes 1K --algorithms ring --iters 2'.split()))\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env["COLUMNS"] = "160"  # a test worker has 80, where the table leaves the type out
    result = subprocess.run(
        [*command, "--master-port", str(port), str(script), str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    results = [eval((tmp_path / str(r)).read_text()) for r in range(2)]
    assert results[0] == results[1]
    assert [row[:3] for row in results[0]] == [(0, 21, 2), (1, 21, 3)]
    assert len({row[3] for row in results[0]}) == 1  # both ran in torchrun's own workers
    assert result.stdout.count("# all_reduce: 2 ranks, gloo on cpu") == 1
    rows = [line for line in result.stdout.splitlines() if " ring " in line and "float32" in line]
    assert len(rows) == 1, result.stdout


def test_report_of_ranks_that_cannot_reach_each_other():
    report = {"state": "joining", "stack": ""}
    error = _report.hang([{**report, "rank": 0}, {**report, "rank": 1}], 3)
    assert str(error).startswith("no answer within 3 s from ranks 0, 1 of 2; ranks 0, 1 cannot reach the others")
    assert "(no Python stack: the rank does not react)" in str(error)
