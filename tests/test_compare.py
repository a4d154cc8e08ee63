"""compare: the four schemes train the same model, and their bytes are those of the closed forms."""

import sys

import pytest
import torch
from torch import nn

import ddplab as dl
from ddplab._schemes import SCHEMES, broadcast_half, reduce_half
from ddplab.compare import ROWS, _steps, compare, union_seconds

STEPS, WARMUP, BATCH = 2, 2, 3


def small_model():
    """Images to 10 logits: 2 parameters tensors of 3 channels pooled, 40 numbers in all."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


def one_process(ranks):
    """Sums of the parameters after training one process on all ranks' batches."""
    torch.manual_seed(0)
    model = small_model()
    batches = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1 + rank)
        images = torch.randn(BATCH, 3, 64, 64, generator=generator)
        batches.append((images, torch.randint(10, (BATCH,), generator=generator)))
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WARMUP + STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [float(p.detach().double().sum()) for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_scheme_equals_one_process_on_the_whole_batch(ranks):
    def all_schemes():
        return {name: _steps(name, small_model, BATCH, False, 0.0, None, STEPS, WARMUP) for name in ROWS}

    expected = one_process(ranks)
    for seen in dl.launch(all_schemes, ranks=ranks, show=False):
        for name in ROWS:
            assert seen[name]["parameters"] == pytest.approx(expected, abs=1e-5), name
            assert len(seen[name]["step_s"]) == STEPS
            assert all(0 <= c <= s for c, s in zip(seen[name]["communication_s"], seen[name]["step_s"], strict=True))


def test_bytes_by_the_kernel_are_those_of_the_closed_forms():
    if problem := dl.hosts_problem():
        pytest.skip(problem)
    profile = dl.Profile.of([(1_000_000, 0.01)] * 3, forward_s=0.01)
    with dl.Hosts(4, link="10gbit") as hosts:
        # the median of three steps: on a busy machine TCP sends some bytes twice
        frame = compare(profile, hosts=hosts, steps=3).set_index("scheme")
    size, n = profile.nbytes, 4
    ring = 2 * (n - 1) / n * size
    expected = {  # the rank that sends least, the rank that sends most
        "dp_star": (size, (n - 1) * size),
        "dp_nccl": (size, 2 * size),  # the two ends of the chain send once, those between twice
        "ddp": (ring, ring),
        "ddp_no_overlap": (ring, ring),
    }
    for name, (least, most) in expected.items():
        assert frame.loc[name, "sent_min_B"] == pytest.approx(least, rel=0.01), name
        assert frame.loc[name, "sent_max_B"] == pytest.approx(most, rel=0.01), name
    assert frame.loc["dp_star", "busiest_over_mean"] == pytest.approx(n / 2, rel=0.01)
    assert frame.loc["ddp", "busiest_over_mean"] == pytest.approx(1, rel=0.01)
    assert (frame.basis == "paced").all()
    assert frame.loc["dp_star", "how"].startswith("DataParallel's traffic, emulated")
    assert (frame.exposed_ms == frame.step_ms - frame.compute_ms).all()
    assert frame.efficiency_pct.tolist() == pytest.approx((frame.compute_ms / frame.step_ms * 100).tolist())


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_halves_of_a_chain_reduce_to_rank_0_and_broadcast_from_it(ranks):
    whole = dl.chain(ranks, chunks=3)
    everybody = tuple(range(ranks))
    held = reduce_half(whole).states()[-1]
    assert held[0] == [everybody] * 3
    assert all(chunk != everybody for row in held[1:] for chunk in row)
    copied = broadcast_half(whole).states()[-1]
    assert all(chunk == (0,) for row in copied for chunk in row)


def test_union_of_spans():
    assert union_seconds([]) == 0
    assert union_seconds([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4


def test_bad_input_is_refused_in_one_sentence_before_any_rank_starts(monkeypatch):
    monkeypatch.setattr(sys.modules[_steps.__module__], "_launch", lambda *_: pytest.fail("ranks were started"))
    for arguments, words in [
        ({"schemes": ["dp"]}, "dp_star, dp_nccl, ddp, ddp_no_overlap"),
        ({"schemes": []}, "schemes are"),
        ({"model": "resnet999"}, "resnet999"),
        ({"batch": 0}, "batch must be"),
        ({"steps": True}, "steps must be"),
        ({"warmup": 1}, "warmup must be"),
    ]:
        with pytest.raises(ValueError, match=words):
            compare(**arguments)
    for arguments, words in [
        ({"ranks": 0}, "from 1 to 256, not 0"),
        ({"ranks": 2.5}, "from 1 to 256, not 2.5"),
        ({"backward_s": -0.1}, "backward_s, in seconds, is a number, 0 or more, not -0.1"),
        ({"backward_s": "slow"}, "not 'slow'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb, in MiB, is a positive number, not 0"),
        ({"device": "tpu"}, "tpu"),
        ({"schemes": "dp"}, r"schemes are .*, not \['dp'\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            compare(**arguments)
    for arguments, words in [
        ({"model": None}, "a function that builds a module, not a NoneType"),
        ({"model": nn.Linear(2, 2)}, "a function that builds a module, not a Linear"),
        ({"hosts": "1gbit"}, "hosts is a ddplab.Hosts that is up, not '1gbit'"),
    ]:
        with pytest.raises(TypeError, match=words):
            compare(**arguments)
    assert set(ROWS) < set(SCHEMES)


def test_a_torchrun_job_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="without torchrun"):
        compare()


def test_mixed_dtypes_have_no_single_flat_buffer():
    def run():
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))])
        try:
            SCHEMES["dp_star"](model, lr=0.1)
        except ValueError as error:
            return str(error)

    assert "one dtype" in dl.launch(run, ranks=1, show=False)[0]
