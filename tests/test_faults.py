"""The eight faults, run for real, and `why` on what they leave. Rank, step and collective are drawn; the truth is the
plan, which the folder does not hold."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT

from ddplab.faults import FAULTS, Plan, draw, leave, run
from ddplab.faults.catalog import JOBS
from ddplab.faults.job import Job
from ddplab.flight import read_flight
from ddplab.why import why

SEED = 20
PATIENCE_S = 4.0


def drawn() -> list[Plan]:
    """Every fault once, with what else there is to draw, and one healthy job."""
    dice, plans = random.Random(SEED), []
    for fault, operations in FAULTS.items():
        plans.append(Plan(fault, dice.randrange(4), dice.randint(2, 6), dice.choice(operations), limit_s=PATIENCE_S))
    return [*plans, Plan(limit_s=PATIENCE_S)]


@pytest.fixture(scope="module")
def remains(tmp_path_factory):
    """{fault: (plan, folder)}; four jobs at a time, since most of them wait."""
    places = {plan.fault: (plan, tmp_path_factory.mktemp(plan.fault or "healthy")) for plan in drawn()}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: run(*pair), places.values()))
    return places


@pytest.mark.parametrize("fault", FAULTS)
def test_why_names_fault_rank_and_collective(remains, fault):
    plan, folder = remains[fault]
    found = why(folder)
    assert (found.kind, found.ranks, found.operation) == (fault, (plan.rank,), plan.operation), f"{plan}\n{found}"
    assert found.step == plan.step, f"{plan}\n{found}"
    assert found.evidence and found.fix and not found.lost


def test_a_healthy_job_is_not_accused(remains):
    found = why(remains[None][1])
    assert found.kind is None and not found.lost, found


def test_nothing_in_the_folder_names_the_fault(remains):
    """Blind means blind: neither the names of faults nor the lines of code that make them."""
    for fault, (_, folder) in remains.items():
        for path in folder.iterdir():
            text = path.read_bytes().decode("utf8", errors="replace")
            for word in (*FAULTS, *(job.__name__ for job in JOBS.values() if job is not Job), "here(", "Plan("):
                assert word not in text, f"{fault}: {path.name} says {word!r}"


def test_every_rank_that_lived_left_its_recorder_and_log(remains):
    for fault, (plan, folder) in remains.items():
        records = read_flight(folder)
        lost = {plan.rank} if fault == "rank_gone" else set()
        assert {0, 1, 2, 3} - lost >= set(records.ranks)
        assert len(records.ranks) >= 2
        assert {path.name for path in folder.glob("rank_*.log")} == {f"rank_{r}.log" for r in range(4)}
        if fault is None:
            assert records.ranks == [0, 1, 2, 3]


def test_a_plan_is_checked():
    for choices, text in [
        (("hang",), "unknown fault 'hang'; faults are skipped_collective"),
        (("rank_gone", 4), "rank is from 0 to 3, not 4"),
        (("rank_gone", 0, 1), "step is from 2 to 6"),
        (("rank_gone", 0, 2, "barrier"), "rank_gone concerns all_reduce, not 'barrier'"),
        ((None, 0, 2, "barrier"), "concerns no collective"),
    ]:
        with pytest.raises(ValueError, match=text.replace("(", r"\(")):
            Plan(*choices)


def test_drawing_is_repeatable_and_reaches_everything():
    plans = [draw(seed) for seed in range(600)]
    assert plans == [draw(seed) for seed in range(600)]
    assert {p.fault for p in plans} == set(FAULTS) and {p.rank for p in plans} == {0, 1, 2, 3}
    assert {p.step for p in plans} == {2, 3, 4, 5, 6}
    assert {(p.fault, p.operation) for p in plans} == {(f, o) for f, all_of in FAULTS.items() for o in all_of}


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(FileExistsError, match="something in it"):
        leave(tmp_path, "rank_gone")


def test_why_knows_nothing_of_plans():
    """The tool may not look up what the faults are: no import of theirs in the reader."""
    for path in [ROOT / "ddplab/why.py", *(ROOT / "ddplab/remains").glob("*.py")]:
        assert "ddplab.faults import" not in path.read_text("utf8")
