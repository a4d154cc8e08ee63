"""The codecs as operations on whole tensors, for CUDA: one kernel per line instead of a loop over chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_WEIGHTS = (128, 64, 32, 16, 8, 4, 2, 1)  # the first value sits in the highest bit


def _chunks(values: torch.Tensor, chunk: int) -> torch.Tensor:
    """Shape (chunks, chunk), the last row filled up with zeros."""
    return F.pad(values, (0, -values.numel() % chunk)).view(-1, chunk)


def encode_signs(values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, chunk: int) -> torch.Tensor:
    """Write the mean magnitude of each chunk and a bit per value, set for a minus; return what they say."""
    n, rows = values.numel(), _chunks(values, chunk)
    lengths = torch.full((rows.shape[0],), float(chunk), device=values.device)
    if n % chunk:
        lengths[-1] = n % chunk
    scales.copy_(rows.abs().sum(dim=1) / lengths)
    minus = torch.signbit(values)
    bits = F.pad(minus, (0, -n % 8)).view(-1, 8).to(torch.uint8)
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=values.device)
    codes.copy_((bits * weights).sum(dim=1, dtype=torch.uint8))
    magnitude = scales.repeat_interleave(chunk)[:n]
    return torch.where(minus, -magnitude, magnitude)


def decode_signs(scales: torch.Tensor, codes: torch.Tensor, n: int, chunk: int) -> torch.Tensor:
    """Plus or minus its chunk's scale for every bit."""
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=codes.device)
    minus = (codes[:, None] & weights).view(-1)[:n] != 0
    magnitude = scales.repeat_interleave(chunk)[:n]
    return torch.where(minus, -magnitude, magnitude)


def encode_int8(values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, chunk: int) -> torch.Tensor:
    """Write the step of each chunk, its largest magnitude over 127, and each value in steps; return what they say."""
    n, rows = values.numel(), _chunks(values, chunk)
    scales.copy_(rows.abs().amax(dim=1) / 127)
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    rounded = (rows / steps).round_().clamp_(-127, 127)
    codes.view(torch.int8).copy_(rounded.view(-1)[:n])
    return (rounded * steps).view(-1)[:n]


def decode_int8(scales: torch.Tensor, codes: torch.Tensor, n: int, chunk: int) -> torch.Tensor:
    """Steps times their size."""
    return codes.view(torch.int8).float() * scales.repeat_interleave(chunk)[:n]
