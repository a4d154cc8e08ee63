"""Wrong answers to the exercises whose checking cell stands in the page: each gets the diagnosis that fits.

Wrong answers to the other exercises are tried where their checkers are tested: test_checks, test_ddp_checks,
test_level_checks, test_compression_checks, test_hang_checks and test_capstone_checks.
"""

from __future__ import annotations

import pytest
from exercise_cells import page

WRONG = {
    # labs/01: a star, its busiest link, a step
    ("labs/01_dp_vs_ddp", 0): [
        ("def my_star(n): return [(0, r, 0, 0, True) for r in range(1, n)]", "missing"),
        ("def my_star(n): return [(0, r, 0, 0, True) for r in range(1, n)] + [(1, 0, 1, 0, True)]", "missing|twice|B1"),
        ("def my_star(n): [(0, r, 0, 0, True) for r in range(1, n)]", r"my_star\(2\) returned None .*expected: list"),
    ],
    ("labs/01_dp_vs_ddp", 1): [
        ("def busiest(rows, nbytes): return len(rows) * nbytes", "2 ranks: 51,200,000 bytes, expected 25,600,000"),
        ("def busiest(rows, nbytes): return nbytes", "3 ranks: 25,600,000 bytes, expected 51,200,000"),
    ],
    ("labs/01_dp_vs_ddp", 2): [
        ("def step_seconds(row, n, S, B, f, b): return f + b", "dp_star, 2 GPUs: 0.600 s"),
        ("def step_seconds(row, n, S, B, f, b): return None", "returned None .*expected: a number"),
        (
            "right = step_seconds\n"
            "def step_seconds(row, *given): return right('ddp_no_overlap' if row == 'ddp' else row, *given)",
            r"ddp, 2 GPUs: .* s, expected 0\.600 s",
        ),
    ],
    ("labs/03_nccl_knobs", 0): [
        ("def crossover(la, a, lb, b): return (lb - la) / (1 / a - 1 / b)", "8xV100, at .* bytes: LL takes"),
        ("def crossover(la, a, lb, b): return 1 / 0", "line 1 of crossover: ZeroDivisionError"),
    ],
    ("labs/03_nccl_knobs", 1): [
        ("def chance(ratios): return 1 / 2 ** len(ratios)", r"is 0\.007812 \(all point the same way"),
        ("def chance(ratios): return (np.log(ratios) > 0).mean()", "chance.* yours says 1"),
    ],
    ("labs/05_accumulation", 0): [
        ("def article_windows(n, every, epochs): return None", "returned None"),
        ("def article_windows(n, every, epochs): return [every] * (n // every)", "11 batches, every 4: you say"),
    ],
    ("labs/05_accumulation", 1): [
        ("def should_sync(i, n, every): return i % every == 0", r"should_sync\(0, 2, 2\) returned True"),
        ("def should_sync(i, n, every): return (i + 1) % every == 0", r"should_sync\(0, 1, 2\) returned False"),
    ],
    ("labs/06_profiler_traces", 0): [
        ("def union(intervals): return sorted(intervals)", r"expected \[\(0, 8\)\].*The case: overlapping"),
        (
            "def union(intervals): return [(min(a for a, _ in intervals), max(b for _, b in intervals))]",
            r"expected \[\(0, 1\), \(4, 5\)\], came \[\(0, 5\)\]\. The case: apart",
        ),
    ],
    ("labs/06_profiler_traces", 1): [
        (
            "def common(a, b): return max(0, min(a[0][1], b[0][1]) - max(a[0][0], b[0][0]))",
            "The second interval counts",
        ),
        ("def length(covered): return len(covered)", r"length\(\[\(0, 5\), \(7, 8\)\]\): expected 6, came 2"),
    ],
    ("labs/06_profiler_traces", 2): [
        ("def five_parts(compute, comm, memory, span): return 50, 50, 30, 10, 10", r"expected \(0, 50, 30, 10, 10\)"),
        ("def five_parts(compute, comm, memory, span): return {}", "expected: tuple"),
    ],
    ("labs/06_profiler_traces", 3): [
        ("def exposed_after_backward(ends, backward): return ends[-1] - backward", "Buckets may end in any order"),
        ("def exposed_after_backward(ends, backward): return max(ends) - backward", "It came before backward ended"),
    ],
    ("labs/07_links", 0): [
        ("def cut(heading, row): return dict(zip(heading.split()[1:], row.split()[2:]))", "GPU .*|no .* in"),
        ("def cut(heading, row): return {}", "GPU 0: no "),
    ],
    ("labs/07_links", 1): [
        (
            "def rates(times, counters): return [(b - a) / 1e9 for a, b in zip(counters, counters[1:])]",
            "How much time passed",
        ),
        (
            "def rates(t, c): return [(c[i + 1] - c[i]) / (t[i + 1] - t[i]) / 1e9 for i in range(len(c) - 1)]",
            "It went down",
        ),
    ],
    ("labs/07_links", 3): [
        ("def mean_utilisation(c, t, e): return t / c", r"\(0\.5, 0\.75, 0\.5\): expected 0\.75, came 1\.5"),
        ("def mean_utilisation(c, t, e): return e / (c + e)", r"expected 0\.1, came 0"),
    ],
    ("labs/09_hierarchical", 0): [
        ("def groups_of(rank, hosts): return [rank], None", r"rank 0 is on the host \[0, 1, 2, 3\], not \[0\]"),
        (
            "def groups_of(rank, hosts):\n mine = next(h for h in hosts if rank in h)\n place = mine.index(rank)\n"
            " return mine, [h[place] for h in hosts if place < len(h)]",
            "misses a host",
        ),
    ],
    ("labs/09_hierarchical", 2): [
        ("def predicted_gain(hosts, ranks_per_host): return ranks_per_host", r"\(2, 4\): expected 1\.75, came 4"),
        ("def predicted_gain(k, g): return 2 * (k * g - 1) / (k * g)", r"\(16, 8\)|With one rank a host"),
    ],
    ("labs/10_compression", 2): [
        ("def average_share(warmup): return warmup", r"warm-up 0%: 0\.0%, expected 3\.1%"),
        ("def average_share(warmup): return 1 / 32", r"warm-up 15%: 3\.1%, expected 17\.7%"),
    ],
    # chapters
    ("book/ring", 0): [("def owner(rank, n, first, way): return rank", r"ring\(2, 0, 1\): \[1, 0\], not \[0, 1\]")],
    ("book/ring", 2): [
        ("def flood(n): return dl.star(n)", "2 steps, expected one"),
        ("def flood(n): return [(0, 0, 1, 0, True)]", "expected: Schedule"),
    ],
    ("book/hang", 1): [
        ("def expected(history): return history[-1]", "What came after the last call, the time before"),
        ("def expected(history): return history[history.index(history[-1]) + 1]", "line 1 of expected: IndexError"),
    ],
    ("book/capstone", 1): [("def hidden_part(left): return 1 - left", "Half the wait: nothing is hidden")],
    ("book/machines", 0): [
        ("def places(h, g): return [(r % h, r // h) for r in range(h * g)]", "The first machine's ranks come first")
    ],
    ("book/machines", 1): [
        ("def leaving(order, g, nbytes): return [2 * nbytes] * 2", "One rank of each machine has its neighbour")
    ],
    ("book/overlap", 1): [
        ("def must_sync(i, count, every): return i % every == 0", "were never applied|every 4"),
    ],
    ("book/compression", 0): [
        ("def encode(c): return (c > 0).astype(int), np.abs(c).mean()", "Zero counts as plus"),
        ("def encode(c): return (c >= 0).astype(int), np.abs(c).max()", "expected 1: the mean magnitude"),
    ],
}
CASES = [(*place, *case) for place, cases in WRONG.items() for case in cases]


@pytest.mark.parametrize(("name", "number", "answer", "diagnosis"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_wrong_answer_gets_its_diagnosis(name, number, answer, diagnosis, monkeypatch):
    monkeypatch.chdir(page(name).path.parent)
    with pytest.raises((AssertionError, ValueError), match=diagnosis) as caught:
        page(name).run(number, answer)
    assert str(caught.value).strip(), "not only the word AssertionError"
