"""The checkers of the lab on hanging jobs accept right answers and say of wrong ones what is wrong."""

import pytest

import ddplab as dl
from ddplab.faults import FAULTS, Plan
from ddplab.hang_checks import check_odd_ranks, check_parting, check_verdict


def parting(calls):
    for place, here in enumerate(zip(*[names + [None] * 20 for names in calls.values()], strict=False)):
        if len(set(here)) > 1:
            return place
    return None


def odd_ranks(called):
    for usual in set(called.values()):
        odd = sorted(rank for rank, name in called.items() if name != usual)
        if 2 * len(odd) < len(called):
            return odd
    return sorted(called)


def test_right_answers_pass(capsys):
    check_parting(parting)
    check_odd_ranks(odd_ranks)
    check_verdict({"kind": "wrong_order", "rank": 1, "operation": "all_reduce"}, Plan("wrong_order", 1))
    assert capsys.readouterr().out.count("ight") == 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda calls: None,
        lambda calls: 0,
        lambda calls: (parting(calls) or 0) + 1,
        lambda calls: next(
            (i for i, h in enumerate(zip(*calls.values(), strict=False)) if len(set(h)) > 1), None
        ),  # ended lists
    ],
)
def test_a_wrong_parting_is_shown_with_its_lists(wrong):
    with pytest.raises(dl.CheckError, match=r"rank 0: .*\nrank 1: [\s\S]*they part at .*returned"):
        check_parting(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda called: [],
        lambda called: [min(called)],
        lambda called: odd_ranks(called)[:1],
        lambda called: sorted(r for r, name in called.items() if name is None),
        lambda called: sorted(r for r, name in called.items() if name != list(called.values())[0]),  # trusts rank 0
    ],
)
def test_wrong_odd_ranks(wrong):
    with pytest.raises(dl.CheckError, match=r"the odd ranks are \["):
        check_odd_ranks(wrong)


@pytest.mark.parametrize("check", [check_parting, check_odd_ranks])
def test_errors_of_the_reader_are_shown_with_their_line(check):
    def too_far(jobs):
        return jobs[99]

    with pytest.raises(dl.CheckError, match="^line 2 of too_far: KeyError: 99. That was too_far"):
        check(too_far)


def test_no_list_of_ranks():
    with pytest.raises(dl.CheckError, match="returned None .is there a `return`.*expected: list or tuple"):
        check_odd_ranks(lambda called: None)


def test_a_verdict_is_told_what_is_wrong_and_not_what_is_right():
    truth = Plan("mismatched_shapes", 2, 3, "all_gather")
    right = {"kind": truth.fault, "rank": truth.rank, "operation": truth.operation}
    for change, text in [
        ({"rank": 1}, "rank 1 did nothing wrong"),
        ({"kind": "wrong_order"}, "the rank is right, but the evidence speaks against wrong_order. Compare sizes"),
        ({"operation": "all_reduce"}, "rank and kind are right"),
        ({"kind": "hang"}, "the kind is one of skipped_collective"),
    ]:
        with pytest.raises(dl.CheckError, match=text) as caught:
            check_verdict(right | change, truth)
        assert change.get("kind") == "hang" or truth.fault not in str(caught.value)
    with pytest.raises(dl.CheckError, match="a dictionary"):
        check_verdict({"kind": "wrong_order"}, truth)


def test_there_is_a_hint_for_every_fault():
    for fault, operations in FAULTS.items():
        wrong = next(other for other in FAULTS if other != fault)
        with pytest.raises(dl.CheckError, match=f"speaks against {wrong}. [A-Z]"):
            check_verdict({"kind": wrong, "rank": 0, "operation": operations[0]}, Plan(fault))
