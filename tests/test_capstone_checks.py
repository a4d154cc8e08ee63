"""The capstone's checkers: the right answer passes, each usual mistake is named."""

from __future__ import annotations

from typing import Any

import pytest

from ddplab.capstone_checks import STATEMENTS, check_audit, check_implied, check_three_runs
from ddplab.checks import CheckError
from ddplab.headline import headline


def implied(before_s: float, after_s: float, speedup: float, nbytes: int, ranks: int) -> dict[str, float]:
    compute = (before_s - speedup * after_s) / (speedup - 1)
    return {
        "compute_s": compute,
        "busbw_Bps": 2 * (ranks - 1) / ranks * nbytes / before_s,
        "bits": 32 * after_s / before_s,
        "efficiency": compute / (compute + before_s),
    }


def but(**change: Any) -> Any:
    """`implied` with one entry computed by another function of the same arguments."""

    def wrong(*given: float) -> dict[str, float]:
        return {**implied(*given), **{name: f(*given) for name, f in change.items()}}

    return wrong


def test_the_right_ones_pass(capsys: pytest.CaptureFixture) -> None:
    check_implied(implied)
    check_three_runs(lambda noop, fp32, fp16: (2 * (fp32 - fp16), 2 * (fp32 - fp16) - (fp32 - noop)))
    check_audit(AUDIT)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "right: the headline contradicts 4 of 6 statements, 2 of 2 hypotheses"


AUDIT = {
    "8 cards reach 92% of linear speed-up": True,
    "more than 90% of NVLink's 300 GB/s are used": True,
    "all-reduces take 124.7 ms in 3 profiled steps": True,
    "a step's all-reduces take less than 1/3 of backward": True,
    "fp32 has 102.2 MB a step": False,
    "a step becomes 1.7 times faster, nothing hidden": False,
    "hypothesis: fp16 halves the time of communication to 45 ms": True,
    "hypothesis: 1-bit quantisation sends 3.1% in 45 ms": True,
}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda *given: None, "returns a dictionary with compute_s"),
        (lambda *given: given[5], "line 1 of <lambda>: IndexError"),
        (but(compute_s=lambda b, a, s, n, r: b / s), "if everything is hidden that can be"),
        (but(busbw_Bps=lambda b, a, s, n, r: n / b), "algorithm bandwidth"),
        (but(busbw_Bps=lambda b, a, s, n, r: 16 * (r - 1) / r * n / b), "in bits a second"),
        (but(bits=lambda b, a, s, n, r: a / b), "a value has 32 bits"),
        (but(efficiency=lambda b, a, s, n, r: b / (b + implied(b, a, s, n, r)["compute_s"])), "the part lost"),
        (but(efficiency=lambda *given: 0.92), "efficiency is 0.3412; .* returned 0.92"),
    ],
)
def test_a_wrong_implication_is_named(wrong: Any, says: str) -> None:
    with pytest.raises(CheckError, match=says):
        check_implied(wrong)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_wrong_verdict_is_named_with_a_hint(statement: str) -> None:
    with pytest.raises(CheckError) as caught:
        check_audit({**AUDIT, statement: not AUDIT[statement]})
    assert f'"{statement}"' in str(caught.value) and not str(caught.value).endswith("it.")


def test_the_audit_is_of_the_headline_that_is_given() -> None:
    """A coherent story: 8 cards at 92% on a fast link, fp16 halves."""
    fair = headline(0.002, 0.001, (0.023 + 0.002) / (0.023 + 0.001))
    with pytest.raises(CheckError, match="92%"):
        check_audit(AUDIT, fair)
    assert not STATEMENTS["8 cards reach 92% of linear speed-up"](fair)
    with pytest.raises(CheckError, match="one entry for each statement"):
        check_audit({})


def test_wrong_fits_are_named() -> None:
    with pytest.raises(CheckError, match="what the step waits for"):
        check_three_runs(lambda noop, fp32, fp16: (fp32 - noop, 0.0), seed=1)
    with pytest.raises(CheckError, match="ms are hidden"):
        check_three_runs(lambda noop, fp32, fp16: (2 * (fp32 - fp16), 0.5))
    with pytest.raises(CheckError, match="returns two numbers"):
        check_three_runs(lambda noop, fp32, fp16: fp32)
    with pytest.raises(CheckError, match="^line 1 of <lambda>: ZeroDivisionError"):
        check_three_runs(lambda noop, fp32, fp16: fp32 / 0)
