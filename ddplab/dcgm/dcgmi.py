"""Live samples from DCGM: runs `dcgmi dmon` and reads it line by line. Not run on a GPU yet: tested against a fake.

The tool is the interface: it connects to the host engine, and its output is what all versions of DCGM have.
"""

from __future__ import annotations

import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from ddplab.dcgm.dmon import DmonReader, Row
from ddplab.dcgm.errors import DcgmError, GpuUnavailable
from ddplab.dcgm.fields import dcgm_field
from ddplab.dcgm.peaks import LinkPeak

FIELDS = (203, 1009, 1010, 1011, 1012)
LEAST_S = 0.1  # DCGM documents 100 ms as the shortest interval of the profiling fields
_PATIENCE_S = 10.0  # for the first line, and for a line beyond the interval


class DcgmSource:
    """`dcgmi dmon` with the PCIe and NVLink rates of all GPUs.

    Raises GpuUnavailable where there is no dcgmi, DcgmError where it refuses or answers nothing.
    """

    name = "DCGM (not run on a GPU yet)"

    def __init__(self, interval_s: float, command: str = "dcgmi") -> None:
        place = shutil.which(command)
        if place is None:
            raise GpuUnavailable(f"there is no {command} in the PATH. What to do: install datacenter-gpu-manager")
        self.peaks: dict[tuple[str, str], LinkPeak] = {}
        self._interval = max(interval_s, LEAST_S)
        ids = ",".join(map(str, FIELDS))
        try:
            self._process = subprocess.Popen(
                [place, "dmon", "-e", ids, "-d", str(round(self._interval * 1e3))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # newer versions print the heading on one and the error on the other
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C is for us; we end it
            )
        except OSError as error:
            raise GpuUnavailable(f"{place} does not run: {error.strerror}. What to do: install it again") from None
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()
        self._reader = DmonReader()
        try:
            self._first = self._row()  # an error comes before the first values
            if self._first is None:
                said = "a heading and no samples" if self._reader.names else "nothing"
                raise DcgmError(said, None, "see `dcgmi discovery -l`: is there a GPU?")
        except ValueError as error:
            self.close()
            hint = f"run `{command} dmon -e {ids}` by hand"
            raise DcgmError(f"not the output of dmon: {error}", None, hint) from None
        except BaseException:
            self.close()
            raise

    def samples(self, stop: threading.Event) -> Iterator[tuple[float, list[dict[str, Any]]]]:
        """(moment by `time.monotonic`, rows) for each sample until `stop`; rows have device, link, tx_GBps, rx_GBps."""
        seen, rows, before = set(), [], None
        row: Row | None = self._first
        while row is not None and not stop.is_set():
            key = row.entity, row.id
            if key in seen:  # an entity is missing from this sample; the next one has begun
                before = seen
                yield time.monotonic(), rows
                seen, rows = set(), []
            seen.add(key)
            rows += self._links(row)
            if before is not None and seen == before:  # complete: no need to wait for the next sample
                yield time.monotonic(), rows
                seen, rows = set(), []
            row = self._row()
        if rows and not stop.is_set():
            yield time.monotonic(), rows

    def close(self) -> None:
        """End dcgmi."""
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _pump(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _row(self) -> Row | None:
        """The next line of values; None where dcgmi has ended."""
        while True:
            try:
                line = self._lines.get(timeout=_PATIENCE_S + self._interval)
            except queue.Empty:
                raise DcgmError(
                    f"nothing for {_PATIENCE_S + self._interval:g} s", -11, "the host engine is stuck: restart it"
                ) from None
            if line is None:
                return None
            if row := self._reader.feed(line):
                return row

    def _links(self, row: Row) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, value in zip(self._reader.names, row.values, strict=True):
            f = dcgm_field(name)
            if f and f.way in ("tx", "rx") and f.kind == "rate" and not isinstance(value, str):
                place = found.setdefault(f.link, {"device": f"{row.entity} {row.id}", "link": f.link})
                place[f"{f.way}_GBps"] = None if value is None else value * f.si / 1e9
        return list(found.values())
