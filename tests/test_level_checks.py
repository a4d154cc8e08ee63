"""The checker of two levels names what is wrong: whose numbers are missing, how often it was divided, what crossed."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import ddplab as dl
from ddplab import level_checks
from ddplab.level_checks import _what


def right(tensor, intra, inter):
    dist.all_reduce(tensor, group=intra)
    dist.all_reduce(tensor, group=inter)
    tensor /= dist.get_world_size()


def no_crossing(tensor, intra, inter):
    dist.all_reduce(tensor, group=intra)
    tensor /= dist.get_world_size()


def a_sum(tensor, intra, inter):
    dist.all_reduce(tensor, group=intra)
    dist.all_reduce(tensor, group=inter)


def means_of_sums(tensor, intra, inter):
    right(tensor, intra, inter)
    tensor /= dist.get_world_size(intra)


def a_copy(tensor, intra, inter):
    return right(tensor.clone(), intra, inter)


def shifted(tensor, intra, inter):
    right(tensor, intra, inter)
    tensor.copy_(tensor.roll(1))


def raises(tensor, intra, inter):
    right(tensor, intra, inter)
    tensor.view(2, -1)


WRONG = {
    no_crossing: "rank 0, element 0 of 12: the mean lacks ranks 2 and 3",
    a_sum: "holds the sum. DDP wants the mean",
    means_of_sums: "was divided inside and again at the end",
    a_copy: r"what the rank began with. Write the result into the tensor itself",
    shifted: "a block out of place",
    raises: r"13 elements: .*RuntimeError",
}


def in_one_launch(hosts: int, ranks_per_host: int) -> list[str | None]:
    return [level_checks._values(fn, hosts, ranks_per_host) for fn in (right, *WRONG)]


def test_what_is_wrong_is_named() -> None:
    import re

    rows = dl.launch(in_one_launch, 2, 2, ranks=4, device="cpu")
    for rank, (good, *bad) in enumerate(rows):
        assert good is None
        for words, (fn, expected) in zip(bad, WRONG.items(), strict=True):
            assert words is not None, (rank, fn.__name__)
            if rank == 0:
                assert re.search(expected, f"rank 0, {words}"), (fn.__name__, words)


def test_the_whole_tensor_across_is_too_much(capsys: pytest.CaptureFixture) -> None:
    """`right` gives the right mean, but every rank sends the whole tensor across: g times what is needed."""
    if problem := dl.hosts_problem():
        pytest.skip(problem)
    with pytest.raises(dl.CheckError, match=r"2.0\d S leaves a host, and 1.00 S is enough"):
        dl.check_two_level(right)
    assert "The mean over all 4 ranks" in capsys.readouterr().out


def test_a_rank_that_waits_alone_is_named() -> None:
    def alone(tensor, intra, inter):
        if dist.get_rank() == 1:
            dist.barrier()

    with pytest.raises(dl.CheckError, match="alone did not come back on rank 1 within 3 s: does every rank"):
        dl.check_two_level(alone, timeout=3)


def test_in_words() -> None:
    assert "lacks rank 1:" in _what(0b1101, 0, 4, 2)
    assert "the sum lacks rank 3:" in _what(4 * 0b0111, 0, 4, 2)
    assert "twice by all ranks" in _what(15 / 4, 0, 4, 2)
    assert "added twice" in _what(15.5, 0, 4, 2)
