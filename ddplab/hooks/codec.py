"""Codecs: how a flat tensor becomes few bytes and comes back. One bit a value, or eight, and a scale for each chunk.

Values are encoded chunk after chunk so that what one chunk needs stays in the processor's cache: the whole tensor is
read once and its residual written once. On CUDA, where a chunk is too little work, whole-tensor operations
give the same bytes (`codec_torch.py`).
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch

from ddplab._arguments import instance, shown
from ddplab.hooks import codec_torch
from ddplab.transfers import count

_SIGN, _ONE = np.uint32(0x80000000), np.uint32(0x3F800000)  # of a float32: its sign bit, and the bits of 1.0
# Row b holds the eight signs that byte b stands for, first value in the highest bit; a set bit is a minus.
_SIGNS = (1 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)).astype(np.float32)


class Codec:
    """`encode` into bytes, `decode`, and `mean` of several encodings. Chunk k of a tensor has a float32 scale.

    The bytes of n values, `nbytes(n)`, are the scales of its ceil(n / chunk) chunks, then the codes of all values.
    Values of any floating dtype are encoded as float32.
    """

    chunk = 65536
    bits = 8

    def __init__(self) -> None:
        self._work = threading.local()  # encoding and decoding go on at once, in two threads

    def nbytes(self, n: int) -> int:
        """Bytes of n encoded values."""
        n = count(n, "n, the number of values,", least=0, error=ValueError)
        return 4 * -(-n // self.chunk) + -(-n * self.bits // 8)

    def encode(
        self, values: torch.Tensor, out: torch.Tensor, old: torch.Tensor | None = None, new: torch.Tensor | None = None
    ) -> bool:
        """Write `values + old` into `out`, and what the code did not say into `new`, which may be `old`.

        values: flat, n elements.  out: uint8, nbytes(n), starting at a multiple of 4 bytes.  old, new: float32, n
        elements, or None for no error feedback. Returns False if a value is NaN or infinite; `new` is then worthless.
        (On CUDA it returns True, whatever the values: to look is to wait.)
        """
        if not isinstance(values, torch.Tensor) or not values.is_floating_point() or values.dim() != 1:
            raise TypeError(f"a codec encodes a one-dimensional floating tensor, not {shown(values)}")
        scales, codes = self._parts(out, values.numel())
        if values.is_cuda:
            total = values.float() + (0.0 if old is None else old)
            decoded = self.encode_whole(total, scales, codes)
            if new is not None:
                torch.sub(total, decoded, out=new)
            return True
        finite, scale_of = True, scales.numpy()
        for k, at in enumerate(range(0, values.numel(), self.chunk)):
            part = slice(at, at + self.chunk)
            piece = values[part]
            rest = self._buffer("rest", torch.float32)[: piece.numel()] if new is None else new[part]
            torch.add(piece, 0.0 if old is None else old[part], out=rest)  # and -0.0 becomes 0.0
            scale = self._encode_chunk(rest, codes[at * self.bits // 8 : -(-(at + self.chunk) * self.bits // 8)])
            scale_of[k], finite = scale, finite and math.isfinite(scale)
        return finite

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The values of `data` (uint8, nbytes(out.numel())), written into `out`: flat, contiguous, float32."""
        return self.mean(instance(data, torch.Tensor, "data are a uint8 tensor").view(1, -1), out)

    def mean(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The mean of what the rows encode, written into `out`. rows: uint8, shape (N, nbytes(out.numel()) or more),
        each row starting at a multiple of 4 bytes."""
        if not isinstance(out, torch.Tensor) or out.dtype != torch.float32 or out.dim() != 1:
            raise TypeError(f"a codec decodes into a one-dimensional float32 tensor, not {shown(out)}")
        parts = [self._parts(row, out.numel()) for row in rows]
        if out.is_cuda:
            return out.copy_(sum(self.decode_whole(s, c, out.numel()) for s, c in parts) / len(rows))
        for k, at in enumerate(range(0, out.numel(), self.chunk)):
            piece = out[at : at + self.chunk]
            inside = slice(at * self.bits // 8, -(-(at + piece.numel()) * self.bits // 8))
            for i, (scales, codes) in enumerate(parts):
                self._decode_chunk(codes[inside], float(scales[k]) / len(rows), piece, add=i > 0)
        return out

    def _parts(self, data: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and codes, as views."""
        if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or data.numel() < self.nbytes(n):
            raise ValueError(f"{n} encoded values are a uint8 tensor of {self.nbytes(n)} elements, not {shown(data)}")
        split = 4 * -(-n // self.chunk)
        return data[:split].view(torch.float32), data[split : self.nbytes(n)]

    def _buffer(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """This thread's work space for one chunk: allocating afresh costs as much as the work."""
        if not hasattr(self._work, name):
            setattr(self._work, name, torch.empty(self.chunk, dtype=dtype))
        return getattr(self._work, name)

    def _encode_chunk(self, rest: torch.Tensor, codes: torch.Tensor) -> float:
        """Write the codes, take what they say from `rest`, return the scale."""
        raise NotImplementedError

    def _decode_chunk(self, codes: torch.Tensor, scale: float, out: torch.Tensor, add: bool) -> None:
        """Write (or add) the values of one chunk."""
        raise NotImplementedError

    def encode_whole(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Write all scales and codes of float32 `values`, none of them -0.0; return what they say. Any device."""
        raise NotImplementedError

    def decode_whole(self, scales: torch.Tensor, codes: torch.Tensor, n: int) -> torch.Tensor:
        """The n values of `scales` and `codes`. Any device."""
        raise NotImplementedError


class SignCodec(Codec):
    """One bit a value: its sign (0 and -0.0 count as +), and the mean magnitude of each chunk of 65536 as the scale."""

    bits = 1

    def _encode_chunk(self, rest: torch.Tensor, codes: torch.Tensor) -> float:
        n, values = rest.numel(), rest.numpy()
        minus = self._buffer("minus", torch.bool)[:n].numpy()
        codes.numpy()[:] = np.packbits(np.signbit(values, out=minus))
        sign = self._buffer("sign", torch.float32)[:n]  # +-1.0, by moving the sign bit: no branch, no comparison
        word = sign.numpy().view(np.uint32)
        np.bitwise_or(np.bitwise_and(values.view(np.uint32), _SIGN, out=word), _ONE, out=word)
        scale = torch.dot(sign, rest).item() / n
        if not math.isfinite(scale):  # the values, or only their sum?
            scale = rest.double().abs().mean().item()
        rest.add_(sign, alpha=-scale)
        return scale

    def _decode_chunk(self, codes: torch.Tensor, scale: float, out: torch.Tensor, add: bool) -> None:
        if not hasattr(self._work, "table"):
            self._work.table = np.empty_like(_SIGNS)
        table = np.multiply(_SIGNS, np.float32(scale), out=self._work.table)
        whole = out.numel() // 8 * 8
        rows = out[:whole].numpy().reshape(-1, 8)
        into = self._buffer("sum", torch.float32)[:whole].numpy().reshape(-1, 8) if add else rows
        np.take(table, codes[: whole // 8].numpy(), axis=0, out=into, mode="clip")
        if add:
            np.add(rows, into, out=rows)
        if whole < out.numel():
            last = torch.from_numpy(table[int(codes[-1])][: out.numel() - whole])
            out[whole:] = out[whole:] + last if add else last

    def encode_whole(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return codec_torch.encode_signs(values, scales, codes, self.chunk)

    def decode_whole(self, scales: torch.Tensor, codes: torch.Tensor, n: int) -> torch.Tensor:
        return codec_torch.decode_signs(scales, codes, n, self.chunk)


class Int8Codec(Codec):
    """One byte a value: rounded to the nearest of 255 steps between -max and max of each chunk of 16384."""

    chunk = 16384
    bits = 8

    def _encode_chunk(self, rest: torch.Tensor, codes: torch.Tensor) -> float:
        low, high = (t.item() for t in torch.aminmax(rest))  # NaN if there is one
        step = float(np.float32(max(-low, high) / 127)) if low == low else math.nan  # as the receiver will see it
        if step == 0 or not math.isfinite(step):
            codes.zero_()
            return step
        codes = codes.view(torch.int8)
        rounded = torch.div(rest, step, out=self._buffer("rounded", torch.float32)[: rest.numel()])
        codes.copy_(rounded.round_().clamp_(-127, 127))
        rest.sub_(rounded, alpha=step)
        return step

    def _decode_chunk(self, codes: torch.Tensor, scale: float, out: torch.Tensor, add: bool) -> None:
        if add:
            out.add_(codes.view(torch.int8), alpha=scale)
        else:
            torch.mul(codes.view(torch.int8), scale, out=out)

    def encode_whole(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return codec_torch.encode_int8(values, scales, codes, self.chunk)

    def decode_whole(self, scales: torch.Tensor, codes: torch.Tensor, n: int) -> torch.Tensor:
        return codec_torch.decode_int8(scales, codes, n, self.chunk)
