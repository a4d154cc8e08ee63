"""Reading `nvidia-smi nvlink`: the state of every link, and the cumulative counters that become a rate in pairs.

nvidia-smi's texts are documented nowhere; these shapes come from public transcripts of several driver versions. Its
counters are KiB since the driver was loaded. What one GPU sends its peer receives: adding all Tx and all Rx counts
every byte twice.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddplab.dcgm.errors import gpu_failure

if TYPE_CHECKING:
    import pandas as pd

_GPU = re.compile(r"GPU (\d{1,4}): (.{1,120}?)(?: \(UUID: ([\w-]{1,80})\))?\s*")
_LINK = re.compile(r"Link (\d{1,3}): (.+)")
_SPEED = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) GB/s")
_COUNTER = re.compile(r"(Data|Raw)?\s?(Tx|Rx)\d?: (?:(\d{1,30}) (?:KiB|KBytes)|(N/A))", re.IGNORECASE)
KIB = 1024


def read_links(text: str) -> dict[tuple[int, int], dict]:
    """(gpu, link) -> what the text says of it; `parse_nvlink` makes a table of it."""
    if not isinstance(text, str):
        raise ValueError(f"nvidia-smi output is text, not {type(text).__name__}")
    links: dict[tuple[int, int], dict] = {}
    gpu: tuple[int, str] | None = None
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if not line.strip():
            continue
        if match := _GPU.fullmatch(line.strip()):
            gpu = int(match[1]), match[2]
        elif match := _LINK.fullmatch(line.strip()):
            if gpu is None:
                raise ValueError(f"line {number}: a link without its GPU: the text is cut off above")
            row = links.setdefault((gpu[0], int(match[1])), {"gpu": gpu[0], "name": gpu[1], "link": int(match[1])})
            row |= _facts(match[2], number, line)
        elif failure := gpu_failure(text):
            raise failure
        else:
            raise ValueError(f"line {number} is no output of `nvidia-smi nvlink`: {line.strip()[:80]!r}")
    if not links:
        if gpu is not None:
            raise ValueError(f"GPU {gpu[0]} ({gpu[1]}) has no NVLink lines: it has no NVLink, or the text is cut off")
        raise ValueError("this text has no output of `nvidia-smi nvlink` in it")
    return links


def parse_nvlink(text: str) -> pd.DataFrame:
    """The output of `nvidia-smi nvlink` with -s, -gt d, -gt r or -g 0 as a table: one row a link of a GPU.

    Columns: gpu, name, link, and for -s: active, speed_GBps (the line rate of one direction; NaN where inactive), for
    counters: tx_KiB, rx_KiB, and raw_tx_KiB, raw_rx_KiB from -gt r (with protocol); NaN where the tool says N/A.
    Raises GpuUnavailable for nvidia-smi's own failures and ValueError, with the line, for other text.
    """
    import pandas as pd

    links = read_links(text)
    order = ["gpu", "name", "link", "active", "speed_GBps", "tx_KiB", "rx_KiB", "raw_tx_KiB", "raw_rx_KiB"]
    frame = pd.DataFrame(list(links.values()))
    frame = frame[[column for column in order if column in frame]]
    numbers = [column for column in order[4:] if column in frame]
    return frame.astype(dict.fromkeys(numbers, float))


def _facts(said: str, number: int, line: str) -> dict:
    """What one line says of its link."""
    if said.startswith("P2P is supported") or re.match(r"(Replay|Recovery|CRC|ECC)\b", said):
        return {}  # a capability or an error counter beside the state
    if said.lower() in ("<inactive>", "inactive"):
        return {"active": False, "speed_GBps": None}
    if match := _SPEED.fullmatch(said):
        return {"active": True, "speed_GBps": float(match[1])}
    parts = [_COUNTER.fullmatch(part.strip()) for part in said.split(",")]
    if all(parts):
        raw = {True: "raw_", False: ""}
        return {f"{raw[(p[1] or '').lower() == 'raw']}{p[2].lower()}_KiB": None if p[4] else float(p[3]) for p in parts}
    raise ValueError(f"line {number} says nothing known of a link: {line.strip()[:80]!r}")


def nvlink_rates(before: str | pd.DataFrame, after: str | pd.DataFrame, seconds: float) -> pd.DataFrame:
    """Rates between two readings of `nvidia-smi nvlink -gt d`, `seconds` apart.

    One row a link: device ("GPU 0"), link ("NVLink 3"), tx_GBps, rx_GBps (1e9 bytes a second); NaN where a reading has
    N/A. Raises ValueError where a counter went down ("counter reset": the driver was loaded again), where the links are
    not the same, or for text without counters.
    """
    import pandas as pd

    if not (isinstance(seconds, (int, float)) and 0 < seconds < float("inf")):
        raise ValueError(f"the time between two readings is a positive number of seconds, not {seconds!r}")
    both = [parse_nvlink(part) if isinstance(part, str) else part for part in (before, after)]
    for part in both:
        if not {"tx_KiB", "rx_KiB"} & set(part):
            raise ValueError("no counters here: take two readings of `nvidia-smi nvlink -gt d`")
    t0, t1 = (part.set_index(["gpu", "link"]) for part in both)
    if set(t0.index) != set(t1.index):
        gone = sorted(set(t0.index) ^ set(t1.index))[0]
        raise ValueError(f"the two readings differ in their links: GPU {gone[0]} link {gone[1]} is in one of them only")
    rows = []
    for key in t0.index:
        row = {"device": f"GPU {key[0]}", "link": f"NVLink {key[1]}"}
        for way in ("tx", "rx"):
            column = f"{way}_KiB"
            moved = t1[column][key] - t0[column][key] if column in t0 and column in t1 else float("nan")
            if moved < 0:
                raise ValueError(
                    f"counter reset: GPU {key[0]} link {key[1]} {way} goes from {t0[column][key]:.0f} down to "
                    f"{t1[column][key]:.0f} KiB; the driver was loaded again in between, take both readings afresh"
                )
            row[f"{way}_GBps"] = moved * KIB / seconds / 1e9
        rows.append(row)
    return pd.DataFrame(rows)
