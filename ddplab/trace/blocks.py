"""A trace file as blocks of whole events, so that a file of any size is read in tens of megabytes.

Kineto writes each event over several lines that open and close at one indent; what re-serialises traces writes other
indents, one event a line, or a single line. A block is cut after an event's closing brace. In an indented file that
place is certain, elsewhere a guess that decoding confirms: a block cut inside a string or a nested object is no list of
whole JSON values. What does not decode is walked through event by event (`ddplab.trace.walk`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from ddplab._files import words
from ddplab.trace.errors import EARLY, REMEDY, NotATrace, TraceError, place
from ddplab.trace.events import BROKEN, Event, Head, decode, decode_head, without_infinity
from ddplab.trace.packed import text_of
from ddplab.trace.walk import walk

BLOCK = 1 << 16  # bytes: a block and its events stay in the processor's cache; larger ones are slower
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_SPACE = re.compile(rb"[ \t\r\n]*")


class Blocks:
    """Iterates over a file's events, list by list; `head` and `notes` are complete once it has ended.

    partial: leave out what is damaged, and say so in `notes`, rather than raise TraceError. exact: see `decode`.
    """

    def __init__(self, path: str | Path, partial: bool = False, exact: bool = False):
        self.path, self.partial, self.exact = path, partial, exact
        self.head = Head()
        self.notes: list[str] = []
        self._damage: list[tuple[int, str]] = []  # (offset in the file's text, reason)
        self._at = 0  # offset of the buffer's first byte
        self._over = False  # the file has no more bytes

    def __iter__(self) -> Iterator[list[Event]]:
        try:
            with text_of(self.path) as self._text:
                yield from self._events()
        except OSError as error:
            raise TraceError(self.path, f"cannot be read: {words(error)}") from error
        if self._damage:
            line, column = place(self.path, self._damage[0][0])
            what = "1 damaged place" if len(self._damage) == 1 else f"{len(self._damage)} damaged places"
            self.notes.append(f"left out {what}, the first at line {line}, column {column}: {self._damage[0][1]}")

    def _read(self, size: int) -> bytes:
        """The next bytes, none where the file ends; also where a packed file is broken, which is noted."""
        if self._over:
            return b""
        try:
            block = self._text.read(size)
        except (EOFError, zlib.error) as error:
            reason = f"gzip: {EARLY}" if isinstance(error, EOFError) else f"the gzip file is damaged: {error}"
            if not self.partial:
                raise TraceError(self.path, reason + REMEDY) from error
            self.notes.append(reason)
            block = b""
        self._over = not block
        return block

    def _events(self) -> Iterator[list[Event]]:
        buffer, listed = self._start()
        indent = _SPACE.match(buffer)[0].rpartition(b"\n")
        close = b"\n" + indent[2] + b"}," if indent[1] else b"},"
        need = 0
        while True:
            block = self._read(max(BLOCK, need))
            buffer += block
            cut = buffer.rfind(close)
            if cut < 0 and len(close) > 2:
                close = b"},"  # one event a line, or a single line
                cut = buffer.rfind(close)
            end = cut + len(close) - 1  # after the brace
            try:
                found, used, ended = (
                    (decode(memoryview(buffer)[:end], self.exact), end + 1, False) if cut >= 0 else ([], 0, False)
                )
            except BROKEN:
                found, used, ended = self._walk(buffer[:end], last=False)
            if not block and not used:
                break
            need = 0 if used else len(buffer)  # an event longer than the buffer: read on in doubling steps
            yield found
            self._at, buffer = self._at + used, buffer[used:]
            if ended:
                return self._tail(buffer, listed)
        found, used, ended = self._walk(buffer, last=True)
        yield found
        self._at += used
        if ended:
            self._tail(buffer[used:], listed)
        elif not listed and not (self._damage and self._damage[-1][1] == EARLY):  # a bare list may lack its end
            self._damaged(len(buffer) - used, EARLY)

    def _start(self) -> tuple[bytes, bool]:
        """The first bytes after the list's opening bracket, and whether the file is that bare list."""
        buffer = self._read(BLOCK)
        if buffer[:3] == b"\xef\xbb\xbf":
            buffer, self._at = buffer[3:], 3
        if not buffer.strip():
            raise TraceError(self.path, *self.notes or ["the file is empty"])
        if buffer[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise TraceError(self.path, "the text is UTF-16, a trace is UTF-8", 1, 1)
        begin = _SPACE.match(buffer).end()
        if buffer[begin : begin + 1] == b"[":
            self._at += begin + 1
            return buffer[begin + 1 :], True
        if buffer[begin : begin + 1] != b"{":
            raise TraceError(
                self.path, "this is no JSON: a trace begins with { or [", *place(self.path, self._at + begin)
            )
        while not (opening := _EVENTS.search(buffer)):
            block = self._read(len(buffer))
            buffer += block
            if not block:
                if _decodes(buffer):
                    raise NotATrace(self.path, 'no list "traceEvents": this is no profiler trace')
                raise TraceError(self.path, EARLY, *place(self.path, self._at + len(buffer)))
        self._take_head(buffer[: opening.end()] + b"]}", 0)
        self._at += opening.end()
        return buffer[opening.end() :], False

    def _tail(self, buffer: bytes, listed: bool) -> None:
        """What follows the list's closing bracket."""
        while block := self._read(max(BLOCK, len(buffer))):
            buffer += block
        if not listed:
            self._take_head(b'{"traceEvents":[]' + buffer, len(b'{"traceEvents":[]'))
        elif buffer.strip():
            self._damaged(_SPACE.match(buffer).end(), "text after the end of the list")

    def _take_head(self, text: bytes, ahead: int) -> None:
        """Keep what the file says of itself. `ahead`: bytes of `text` that stand before the buffer's first."""
        try:
            try:
                found = decode_head(text)
            except BROKEN:
                text = without_infinity(text)
                found = decode_head(text)
        except BROKEN as error:
            stripped = text.rstrip()
            at = re.search(r"\(byte (\d+)\)", str(error))
            offset = min(int(at[1]) if at else len(stripped), len(stripped)) - ahead
            early = offset + ahead >= len(stripped) - 1 and self._over
            self._damaged(max(offset, 0), EARLY if early else f"no valid JSON: {error}")
            return
        self.head.distributed = found.distributed if self.head.distributed is None else self.head.distributed
        self.head.base_ns = found.base_ns or self.head.base_ns

    def _walk(self, text: bytes, last: bool) -> tuple[list[Event], int, bool]:
        found, used, ended, damage = walk(text, last, self.partial, self.exact)
        for offset, reason in damage:
            self._damaged(offset, reason)
        return found, used, ended

    def _damaged(self, offset: int, reason: str) -> None:
        if not self.partial:
            raise TraceError(self.path, reason + REMEDY, *place(self.path, self._at + offset))
        self._damage.append((self._at + offset, reason))


def _decodes(text: bytes) -> bool:
    try:
        decode_head(text)
    except BROKEN:
        return False
    return True
