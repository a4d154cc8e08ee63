"""Watching links while something runs: DCGM where there is one, else NVML, else this machine's NIC counters."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ddplab.dcgm.dcgmi import DcgmSource
from ddplab.dcgm.errors import DcgmError, GpuUnavailable
from ddplab.dcgm.nic import HostSource, NicSource
from ddplab.dcgm.nvml import NvmlSource

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.hosts import Hosts

SOURCES = ("auto", "dcgm", "nvml", "nic")
LEAST_S = 0.001
_MOST_ROWS = 500_000  # kept for `frame`: days at one sample a second
_SLACK, _TRIES = 0.05, 5  # of an interval; readings of the counters until the moment is that well known


def watch_links(
    interval_s: float = 1.0, count: int | None = None, source: str = "auto", hosts: Hosts | None = None
) -> LinkWatch:
    """Watch the traffic of this machine's links, or of emulated `hosts`, every `interval_s` seconds.

        for rows in watch_links(1.0, count=5):              # one list of rows a sample; rows are dictionaries
            print(rows)
        with watch_links(0.05, hosts=hosts) as watch:       # in the background
            launch(train, hosts=hosts)
        watch.frame()

    source: "dcgm", "nvml", "nic", or "auto": the first of these that works; `watch.why` says why earlier ones did not.
    Rates are averages over the interval, in GB/s of 1e9 bytes, each direction by itself.  count: samples, None for no
    end. Raises ValueError for a wrong argument, GpuUnavailable or DcgmError where the source that you named does not
    work. The paths through DCGM and NVML have not been run on a GPU yet.
    """
    if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)) or not LEAST_S <= interval_s <= 86400:
        raise ValueError(f"interval_s is a number of seconds from {LEAST_S} to 86400, not {interval_s!r}")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"count is a whole number of samples, 1 or more, or None, not {count!r}")
    if source not in SOURCES:
        raise ValueError(f"source is {', '.join(SOURCES)}, not {source!r}")
    if hosts is not None:
        if source not in ("auto", "nic"):
            raise ValueError("emulated hosts have kernel counters only: leave source out")
        return LinkWatch(HostSource(hosts), interval_s, count, [])
    makers = {"dcgm": lambda: DcgmSource(interval_s), "nvml": NvmlSource, "nic": NicSource}
    if source != "auto":
        return LinkWatch(makers[source](), interval_s, count, [])
    why = []
    for name in ("dcgm", "nvml"):
        try:
            return LinkWatch(makers[name](), interval_s, count, why)
        except (GpuUnavailable, DcgmError) as error:
            why.append(f"{name}: {error}")
    return LinkWatch(NicSource(), interval_s, count, why)


class LinkWatch:
    """Samples of links, as they come (`for rows in watch`) or in the background (`with watch:`); see `watch_links`.

    source: where they come from, in words.  why: why better sources were not used.  peaks: (device, link) -> LinkPeak
    where a driver states one.  started: `time.monotonic()` at time_s = 0; that clock is the same in every process of a
    machine, so a rank can note when it did what.
    """

    def __init__(self, source: Any, interval_s: float, count: int | None, why: list[str]) -> None:
        self._source, self._interval, self._count = source, interval_s, count
        self.source, self.why, self.peaks = source.name, why, source.peaks
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._rows: deque[dict[str, Any]] = deque(maxlen=_MOST_ROWS)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._used, self.started = False, 0.0

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """One list a sample: dictionaries with sample, time_s, device, link, tx_GBps, rx_GBps (None where unknown)."""
        self._begin()
        try:
            yield from self._samples()
        finally:
            self.close()

    def __enter__(self) -> LinkWatch:
        self._begin()
        self._thread = threading.Thread(target=self._collect, name="ddplab-links", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        if self._failure is not None and error is None:
            raise self._failure

    def close(self) -> None:
        """Stop watching; what was seen stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._interval + 15)
        self._source.close()

    def frame(self) -> pd.DataFrame:
        """The last 500,000 rows: sample, time_s (end of the interval), device, link, tx_GBps, rx_GBps.

        `link_utilisation(watch.frame())` holds them against the peaks that drivers state, in `frame.attrs["peaks"]`.
        """
        import pandas as pd

        columns = ["sample", "time_s", "device", "link", "tx_GBps", "rx_GBps"]
        with self._lock:
            frame = pd.DataFrame(list(self._rows), columns=columns)
        frame = frame.astype({"tx_GBps": float, "rx_GBps": float})
        frame.attrs["peaks"] = dict(self.peaks)
        return frame

    def _begin(self) -> None:
        if self._used:
            raise RuntimeError("this watch has been used; call watch_links again")
        self._used, self.started = True, time.monotonic()

    def _collect(self) -> None:
        try:
            for _ in self._samples():
                pass
        except BaseException as error:  # told to whoever leaves the block
            self._failure = error

    def _samples(self) -> Iterator[list[dict[str, Any]]]:
        made = getattr(self._source, "samples", None)
        stream = made(self._stop) if made else polled(self._source.read, self._interval, self._stop)
        for number, (moment, found) in enumerate(stream):
            rows = [
                {"sample": number, "time_s": moment - self.started, "tx_GBps": None, "rx_GBps": None, **row}
                for row in found
            ]
            with self._lock:
                self._rows += rows
            yield rows
            if number + 1 == self._count:
                return


def polled(
    read: Any, interval_s: float, stop: threading.Event, clock: Any = time.monotonic
) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Rates from cumulative counters: (moment by `clock`, rows), every `interval_s` until `stop`.

    The time that really passed is divided by, not the one that was asked for; the last interval is shorter. A device
    that has just appeared, or whose counter went down (the driver was loaded again), has None in that sample.
    """
    slack = interval_s * _SLACK
    last, first = _reading(read, clock, slack)
    before = {(row["device"], row["link"]): row for row in first}
    due = last
    while True:
        due = max(due + interval_s, clock() - interval_s)  # a late sample does not make a burst of hurried ones
        ended = stop.wait(max(0.0, due - clock()))
        if ended and clock() - last < interval_s / 10:
            return
        now, rows = _reading(read, clock, slack)  # at the end, too: what the last, shorter interval carried
        yield now, [_rates(row, before.get((row["device"], row["link"]), {}), now - last) for row in rows]
        if ended:
            return
        before, last = {(row["device"], row["link"]): row for row in rows}, now


def _reading(read: Any, clock: Any, slack: float) -> tuple[float, list[dict[str, Any]]]:
    """(moment, rows): read until the moment is known to `slack` seconds, a few times at most.

    Where this process waits for a processor between reading and looking at the clock, an interval would seem longer
    than it was, the next one shorter, and its rate higher than the link.
    """
    best: tuple[float, float, list[dict[str, Any]]] | None = None
    for _ in range(_TRIES):
        asked = clock()
        rows = read()
        answered = clock()
        if best is None or answered - asked < best[0]:
            best = answered - asked, (asked + answered) / 2, rows
        if best[0] <= slack:
            break
    return best[1], best[2]


def _rates(row: dict[str, Any], old: dict[str, Any], seconds: float) -> dict[str, Any]:
    one = {"device": row["device"], "link": row["link"]}
    for way in ("tx", "rx"):
        if f"{way}_GBps" in row:
            one[f"{way}_GBps"] = row[f"{way}_GBps"]
            continue
        moved = row[f"{way}_bytes"] - old.get(f"{way}_bytes", float("inf"))
        one[f"{way}_GBps"] = moved / seconds / 1e9 if moved >= 0 and seconds > 0 else None
    return one
