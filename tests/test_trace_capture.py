"""A trace is recorded as asked for, whatever the loop's length, or the error says what was missing."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

import ddplab as dl
from ddplab.trace.capture import CaptureError


def loop(recorder, count):
    """`count` steps, of which each leaves a mark of its own; returns how many ran."""
    import torch
    from torch.profiler import record_function

    for i in range(count):
        with record_function(f"step {i}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        recorder.step()
    return count


def events(path):
    with gzip.open(path) as file:
        return json.load(file)


def marks(path):
    return [e["name"] for e in events(path)["traceEvents"] if e.get("name", "").startswith("step ")]


@pytest.mark.parametrize("count", [6, 7, 8, 12, 30])
def test_exactly_the_steps_asked_for_however_long_the_loop(tmp_path, count):
    with dl.capture(tmp_path, steps=3) as recorder:
        loop(recorder, count)
    assert recorder.done and recorder.path == tmp_path / "rank0.pt.trace.json.gz"
    assert marks(recorder.path) == ["step 3", "step 4", "step 5"]
    steps = [e["name"] for e in events(recorder.path)["traceEvents"] if e.get("name", "").startswith("ProfilerStep#")]
    assert len(steps) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["rank0.pt.trace.json.gz"]


@pytest.mark.parametrize(("skip", "warmup", "steps"), [(0, 1, 1), (2, 1, 1), (5, 2, 4)])
def test_skip_warmup_steps(tmp_path, skip, warmup, steps):
    with dl.capture(tmp_path, steps=steps, skip=skip, warmup=warmup) as recorder:
        loop(recorder, skip + warmup + steps)
    assert marks(recorder.path) == [f"step {i}" for i in range(skip + warmup, skip + warmup + steps)]


@pytest.mark.parametrize("count", range(6))
def test_a_loop_too_short_says_how_many_steps_were_missing(tmp_path, count):
    with pytest.raises(CaptureError, match=rf"after {count} steps.* needs 6 .* {6 - count} missing"):
        with dl.capture(tmp_path / "new") as recorder:
            loop(recorder, count)
    assert not recorder.done and list((tmp_path / "new").iterdir()) == []


def test_an_exception_of_the_loop_passes_and_the_profiler_is_free_again(tmp_path):
    for count in (0, 1, 3, 4):
        with pytest.raises(ZeroDivisionError):
            with dl.capture(tmp_path) as recorder:
                loop(recorder, count)
                1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
    with dl.capture(tmp_path) as recorder:
        loop(recorder, 6)
    assert recorder.done


def test_done_ends_a_loop(tmp_path):
    ran = 0
    with dl.capture(tmp_path, steps=1, skip=0) as recorder:
        while not recorder.done:
            ran += loop(recorder, 1)
    assert ran == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is a whole number of steps, at least 1, not 0"),
        ({"skip": -1}, "skip .* at least 0, not -1"),
        ({"warmup": 0}, "warmup .* at least 1, not 0"),
        ({"steps": 2.5}, "not 2.5"),
        ({"steps": True}, "not True"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        dl.capture(tmp_path, **options)


def test_step_outside_the_block(tmp_path):
    with pytest.raises(CaptureError, match="outside the with block"):
        dl.capture(tmp_path).step()


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        with dl.capture(tmp_path / "file"):
            pass


def in_a_rank(folder):
    import torch
    import torch.distributed as dist

    with dl.capture(folder, steps=2) as recorder:
        while not recorder.done:
            dist.all_reduce(torch.ones(1000 + dist.get_rank() * 0))
            recorder.step()
    return recorder.path.name


def test_one_file_a_rank_with_sizes(tmp_path):
    assert dl.launch(in_a_rank, tmp_path, ranks=2, device="cpu") == [f"rank{r}.pt.trace.json.gz" for r in (0, 1)]
    for rank in (0, 1):
        whole = events(tmp_path / f"rank{rank}.pt.trace.json.gz")
        assert whole["distributedInfo"]["rank"] == rank and whole["distributedInfo"]["world_size"] == 2
        reduces = [e for e in whole["traceEvents"] if e.get("name") == "gloo:all_reduce"]
        assert len(reduces) == 2 and all(e["args"]["Input Dims"] == [[1000]] for e in reduces)


def test_nothing_on_stderr(tmp_path):
    code = f"""
import ddplab as dl, torch
with dl.capture({str(tmp_path)!r}) as recorder:
    for _ in range(9):
        torch.ones(3).sum()
        recorder.step()
print(recorder.path.name)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank0.pt.trace.json.gz\n" and done.stderr == ""
