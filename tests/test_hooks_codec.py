"""The codecs against what they say they do, written down with plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from ddplab.hooks.codec import Int8Codec, SignCodec

CODECS = pytest.mark.parametrize("codec", [SignCodec(), Int8Codec()], ids=["sign", "int8"])
SIZES = [0, 1, 7, 8, 9, 100, 16383, 16384, 16385, 65536, 65537, 200_003]


def encoded(codec, values, old=None, new=None):
    out = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    return out, codec.encode(values, out, old, new)


def decoded(codec, data, n):
    return codec.decode(data, torch.empty(n))


def signs(values):
    """The 1-bit code in one line a chunk: what SignCodec has to say of `values`."""
    return torch.cat([torch.where(c >= 0, c.abs().mean(), -c.abs().mean()) for c in values.split(SignCodec.chunk)])


def steps(values):
    parts = []
    for c in values.split(Int8Codec.chunk):
        step = c.abs().max() / 127
        parts.append((c / step).round() * step if step > 0 else torch.zeros_like(c))
    return torch.cat(parts)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("codec, expected", [(SignCodec(), signs), (Int8Codec(), steps)], ids=["sign", "int8"])
def test_decodes_to_the_definition_and_holds_the_rest_back(codec, expected, n):
    generator = torch.Generator().manual_seed(n)
    values, old = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    values[::7] = old[::7] = 0.0
    before, new = old.clone(), torch.full((n,), math.nan)
    data, finite = encoded(codec, values, old, new)
    assert finite and torch.equal(old, before)
    got = decoded(codec, data, n)
    torch.testing.assert_close(got, expected(values + old) if n else torch.empty(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got + new, values + old, rtol=1e-6, atol=1e-6)
    in_place = before.clone()
    again, _ = encoded(codec, values, in_place, in_place)
    assert torch.equal(again, data) and torch.equal(in_place, new)


@pytest.mark.parametrize("n", SIZES)
def test_bytes_are_those_of_the_bits_and_the_scales(n):
    assert SignCodec().nbytes(n) == math.ceil(n / 8) + 4 * math.ceil(n / 65536)
    assert Int8Codec().nbytes(n) == n + 4 * math.ceil(n / 16384)


def test_zeros_of_both_signs_are_plus():
    g, residual = torch.tensor([0.0, -0.0, 1.0, -3.0]), torch.zeros(4)
    data, _ = encoded(SignCodec(), g, residual, residual)
    assert data.numel() == 5 and data[:4].view(torch.float32).item() == 1.0 and data[4].item() == 0b0001_0000
    got = decoded(SignCodec(), data, 4)
    assert got.tolist() == [1, 1, 1, -1] and residual.tolist() == [-1, -1, 0, -2]
    assert (got + residual).tolist() == g.tolist()
    bare, _ = encoded(SignCodec(), g)
    assert torch.equal(bare, data), "without error feedback -0.0 is a plus, too"


def test_error_feedback_finds_every_value_in_the_end():
    g = torch.tensor([0.1, -0.2, 0.3, 5.0])
    residual, total = torch.zeros(4), torch.zeros(4)
    for _ in range(200):
        data, _ = encoded(SignCodec(), g, residual, residual)
        total += decoded(SignCodec(), data, 4)
    assert (total / 200 - g).abs().max() < 0.04
    torch.testing.assert_close(total + residual, 200 * g, rtol=1e-5, atol=1e-3)


@CODECS
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 70_000])
def test_says_when_a_value_is_not_finite(codec, poison, at):
    values = torch.ones(70_001)
    values[at] = poison
    assert not encoded(codec, values)[1]


@CODECS
@pytest.mark.parametrize("value", [3e38, 1e-45, 1e-38, 0.0, -0.0])
def test_extreme_values_are_finite(codec, value):
    values, new = torch.full((70_000,), value), torch.empty(70_000)
    data, finite = encoded(codec, values, torch.zeros(70_000), new)
    got = decoded(codec, data, 70_000)
    assert finite and torch.isfinite(got).all() and torch.isfinite(new).all()
    torch.testing.assert_close(got + new, values, rtol=1e-5, atol=0)


@CODECS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_dtype_is_encoded_as_float32(codec, dtype):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    new, same = torch.empty(1000), torch.empty(1000)
    data, _ = encoded(codec, values, torch.zeros(1000), new)
    expected, _ = encoded(codec, values.float(), torch.zeros(1000), same)
    assert torch.equal(data, expected) and torch.equal(new, same)


@CODECS
@pytest.mark.parametrize("n", [1, 13, 65_536, 131_077])
def test_mean_of_encodings_is_the_mean_of_what_they_say(codec, n):
    padding = torch.empty(-codec.nbytes(n) % 4, dtype=torch.uint8)  # every row starts at a multiple of 4 bytes
    rows = torch.stack([torch.cat([encoded(codec, torch.randn(n) * (r + 1))[0], padding]) for r in range(3)])
    expected = torch.stack([decoded(codec, row, n) for row in rows]).mean(dim=0)
    torch.testing.assert_close(codec.mean(rows, torch.empty(n)), expected, rtol=1e-5, atol=1e-6)


@CODECS
@pytest.mark.parametrize("n", SIZES[1:])
def test_the_operations_for_cuda_give_the_same_bytes(codec, n):
    """They run on any device; on CUDA they are the ones that run."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)) + 0.0
    values[::5] = 0.0
    rest = torch.empty(n)
    data, _ = encoded(codec, values, torch.zeros(n), rest)
    other = torch.zeros_like(data)
    scales, codes = codec._parts(other, n)
    said = codec.encode_whole(values, scales, codes)
    split = 4 * math.ceil(n / codec.chunk)
    torch.testing.assert_close(scales, data[:split].view(torch.float32), rtol=1e-6, atol=0)
    if codec.bits == 1:
        assert torch.equal(codes, data[split:])
    else:  # the two scales may differ in the last bit, and a value may sit on the edge between two steps
        assert (codes.view(torch.int8).int() - data[split:].view(torch.int8).int()).abs().max() <= 1
    torch.testing.assert_close(codec.decode_whole(scales, codes, n), said, rtol=0, atol=0)
    torch.testing.assert_close(codec.decode_whole(*codec._parts(data, n), n), decoded(codec, data, n), rtol=0, atol=0)
