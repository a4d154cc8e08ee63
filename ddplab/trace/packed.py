"""Text of a plain or a gzip file; of one that is cut short or damaged, all that comes before the damage."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from ddplab._files import open_to_read

_PIECE = 1 << 14  # packed bytes: what is lost before a damaged place
_GZIP = 31  # zlib's window bits for a gzip header and its checksum


class Readable(Protocol):
    def read(self, size: int) -> bytes: ...


class Gzip:
    """Reads a gzip file of any number of members. Python's own reader drops the last block before an error."""

    def __init__(self, raw: BinaryIO):
        self.raw, self.unpack, self.rest = raw, zlib.decompressobj(_GZIP), b""
        self.error: Exception | None = None

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, none at the end. EOFError where the file is cut short, zlib.error where it is damaged."""
        out = bytearray()
        while len(out) < size and self.error is None:
            if self.unpack.eof:  # of this member; another may follow, or zeros to the end of a block
                self.rest = self.unpack.unused_data.lstrip(b"\0") or self.raw.read(_PIECE).lstrip(b"\0")
                if not self.rest:
                    break
                self.unpack = zlib.decompressobj(_GZIP)
            packed = self.rest or self.raw.read(_PIECE)
            try:
                if not packed:
                    raise EOFError
                out += self.unpack.decompress(packed, size - len(out))
                self.rest = self.unpack.unconsumed_tail
            except (EOFError, zlib.error) as error:
                self.error = error  # what came before it goes first
        if self.error is not None and not out:
            raise self.error
        return bytes(out)


@contextmanager
def text_of(path: str | Path) -> Iterator[Readable]:
    """The file's text as bytes, unpacked where it begins as gzip does."""
    with open_to_read(path) as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        yield Gzip(raw) if packed else raw
