"""bench: its columns and bandwidths against closed forms, its error counts against wrong schedules, real ranks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ddplab import _table, hosts
from ddplab import bench as bench_function
from ddplab._measure import Times
from ddplab._sizes import parse_sizes
from ddplab.bench import bench
from ddplab.hosts import Hosts
from ddplab.link import Link
from ddplab.schedule import Schedule, ring, star

NCCL_TESTS = ["size_B", "count", "type", "redop", "algorithm", "time_us", "algbw_GBps", "busbw_GBps", "errors"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1K:8K", [1024, 2048, 4096, 8192]),
        ("1K:128M:8", [1024 * 8**k for k in range(6)]),
        ("8:8", [8]),
        ("1000:3K:3", [1000, 3000]),
        ("1K, 1KiB,1KB,1k", [1024, 1024, 1000, 1024]),
        ("25.6MB", [25_600_000]),
        ("0.5M", [524_288]),
        ("1G", [2**30]),
        ("100B", [100]),
        (4096, [4096]),
        ([4, "1K"], [4, 1024]),
        (range(4, 13, 4), [4, 8, 12]),
    ],
)
def test_sizes(text, expected):
    assert parse_sizes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "1K:",
        ":",
        "1K:2K:1",
        "1K:2K:3:4",
        "1K:2K:x",
        "0",
        "-4",
        "1X",
        "1iB",
        "nan",
        0,
        -1,
        True,
        None,
        [None],
        "1e30G",
    ],
)
def test_bad_sizes_are_refused_with_examples(text):
    with pytest.raises(ValueError, match="1K:128M"):
        parse_sizes(text)


def test_backward_or_no_or_endless_sizes():
    with pytest.raises(ValueError, match="backwards"):
        parse_sizes("2K:1K")
    with pytest.raises(ValueError, match="1 to 1000 sizes, not 0"):
        parse_sizes([])
    with pytest.raises(ValueError, match="1 to 1000 sizes, not 1001"):
        parse_sizes(range(1, 1002))


class FourHosts:
    n, ranks, link = 4, 4, Link.parse("1gbit")


def seen(times: list[list[Times]]) -> list[dict]:
    """What four ranks would return: one size of 1000 float32, one algorithm."""
    about = {"ranks": 4, "backend": "gloo", "device": "cpu", "versions": "torch 0", "item_bytes": 4}
    return [about | {"times": [of_rank]} for of_rank in times]


def test_frame_by_hand():
    # The slowest rank of the three runs: 3, 5, 4 ms.
    times = [[3e-3, 1e-3, 1e-3], [1e-3, 5e-3, 1e-3], [1e-3, 1e-3, 4e-3], [2e-3, 2e-3, 2e-3]]
    ranks = seen([[Times(t, [6000 + r, 6100, 6050], r)] for r, t in enumerate(times)])
    frame = _table.frame_of(ranks, ["ring"], [1000], "sum", "float32", FourHosts)
    assert list(frame.columns[:9]) == NCCL_TESTS
    row = frame.iloc[0]
    assert (row.size_B, row["count"], row.type, row.redop, row.algorithm) == (4000, 1000, "float32", "sum", "ring")
    assert row.time_us == pytest.approx(4000)
    assert (row.time_min_us, row.time_p25_us, row.time_p75_us, row.time_max_us) == pytest.approx(
        (3000, 3500, 4500, 5000)
    )
    assert row.algbw_GBps == pytest.approx(4000 / 4e-3 / 1e9)
    assert row.busbw_GBps == pytest.approx(row.algbw_GBps * 1.5)  # 2 (n - 1) / n
    assert row.errors == 0 + 1 + 2 + 3 and row.sent_B == 6050
    assert row.busbw_pct == pytest.approx(1.5e6 / (125e6 * 1448 / 1514) * 100)
    text = _table.table(frame)
    assert "0.1196 GB/s" in text and "6 FAILED" in text and "1gbit" in text and "3 runs" in text
    unchecked = _table.frame_of(seen([[Times(t, None, None)] for t in times]), ["ring"], [1000], "sum", "float32", None)
    assert pd.isna(unchecked.errors[0]) and pd.isna(unchecked.sent_B[0]) and np.isnan(unchecked.busbw_pct[0])
    text = _table.table(unchecked)
    assert "no percentage" in text and "not checked" in text and "N/A" in text


def half_star(n: int) -> Schedule:
    """A star that forgets to send the sum back: only rank 0 is right."""
    whole = star(n)
    rows = [t for t in whole.transfers if t.reduce]
    return Schedule.from_rows("half star", n, 1, rows)


def test_real_ranks(capsys):
    frame = bench(
        algorithms=["ring", "halving-doubling", "backend", half_star, ring(2, direction=-1)],
        ranks=2,
        sizes=[4, 4004],
        dtype="bfloat16",
        iters=3,
        device="cpu",
    )
    printed = capsys.readouterr().out
    assert list(frame.columns[:9]) == NCCL_TESTS
    assert list(frame.algorithm) == ["ring", "halving_doubling", "backend", "half star", "ring-1"] * 2
    assert list(frame["count"]) == [2] * 5 + [2002] * 5 and set(frame.size_B) == {4, 4004}
    right = frame[frame.algorithm != "half star"]
    assert (right.errors == 0).all()
    # rank 1 still has its own input: wrong wherever rank 0's is not 0, in each of the 1 + 3 runs
    pattern = np.random.default_rng(0).integers(0, 3, 997)
    for row in frame[frame.algorithm == "half star"].itertuples():
        assert row.errors == 4 * np.count_nonzero(np.resize(pattern, row[2]))
    assert (frame.time_us > 0).all() and (frame.time_min_us <= frame.time_us).all()
    assert np.allclose(frame.busbw_GBps, frame.algbw_GBps) and np.allclose(
        frame.algbw_GBps * frame.time_us * 1e3, frame.size_B
    )
    assert len([line for line in printed.splitlines() if not line.startswith("#")]) == len(frame)
    assert frame.attrs["ranks"] == 2 and frame.attrs["backend"] == "gloo"


@pytest.mark.parametrize(
    ("op", "dtype"), [("mean", "float16"), ("max", "int32"), ("min", "uint8"), ("product", "int64")]
)
def test_every_op_agrees_with_the_backend(op, dtype):
    frame = bench(
        algorithms=["ring", "tree"], ranks=3, sizes="8K", op=op, dtype=dtype, iters=1, show=False, device="cpu"
    )
    assert (frame.errors == 0).all()


def test_one_rank_and_unchecked():
    frame = bench(algorithms="ring", ranks=1, sizes="1K", iters=1, check=False, show=False)
    assert frame.busbw_GBps[0] == 0 and frame.errors.isna().all()


def test_on_hosts_the_kernel_counts_the_bytes():
    if problem := hosts.hosts_problem():
        pytest.skip(problem)
    with Hosts(4, link="1gbit") as four:
        frame = bench(algorithms=["ring", "star"], sizes="4MB", hosts=four, iters=3, show=False).set_index("algorithm")
    assert (frame.errors == 0).all()
    assert frame.sent_B["ring"] == pytest.approx(2 * 3 / 4 * 4e6, rel=0.01)
    assert frame.sent_B["star"] == pytest.approx(3 * 4e6, rel=0.01)  # the middle sends everybody the sum
    assert 0 < frame.busbw_pct["star"] < frame.busbw_pct["ring"] < 105


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"collective": "broadcast"}, ValueError, "all_reduce"),
        ({"algorithms": "rign"}, ValueError, "rign.*halving_doubling"),
        ({"algorithms": []}, ValueError, "at least one"),
        ({"algorithms": ring(3)}, ValueError, "3 ranks.*has 4"),
        ({"algorithms": [lambda n: n]}, TypeError, "gave a int"),
        ({"algorithms": [7]}, TypeError, "not 7"),
        ({"algorithms": 7}, TypeError, "not 7"),
        ({"ranks": 0}, ValueError, "ranks"),
        ({"ranks": 3, "algorithms": "halving_doubling"}, ValueError, "power of two"),
        ({"op": "median"}, ValueError, "product"),
        ({"dtype": "float8"}, ValueError, "bfloat16"),
        ({"dtype": "int32", "op": "mean"}, TypeError, "mean.*int32"),
        ({"sizes": "fast"}, ValueError, "fast"),
        ({"sizes": 3}, ValueError, "float32 element"),
        ({"iters": 0}, ValueError, "iters"),
        ({"warmup": -1}, ValueError, "warmup"),
    ],
)
def test_bad_arguments_start_no_rank(arguments, error, words, monkeypatch):
    monkeypatch.setitem(bench.__globals__, "launch", lambda *a, **k: pytest.fail("a rank was started"))
    with pytest.raises(error, match=words):
        bench(**arguments)


def test_in_a_torchrun_job_its_size_counts_and_rank_0_prints(monkeypatch, capsys):
    started = []

    def join(measure, *args, ranks, **kwargs):
        started.append(ranks)
        return seen([[Times([1e-3], None, 0)]] * 4)

    monkeypatch.setitem(bench.__globals__, "launch", join)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        assert not capsys.readouterr().out
        bench(algorithms="ring", ranks=2, sizes=4000)
    assert started == [4, 4] and "4 ranks" in capsys.readouterr().out


def test_the_public_name_is_the_function():
    assert bench_function is bench
