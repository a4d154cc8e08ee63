"""The environment variables of NCCL, and those of torch and gloo beside them, as data.

`knobs.csv` holds one line a variable. Names, defaults, legal values and the version that brought a variable were
taken from the source of NCCL 2.30.7 and of the releases since 2.3.5, not only from the guide; where the two differ,
the source counts. Torch's are those of torch 2.14.
"""

from __future__ import annotations

import csv
import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.resources import files

NCCL_VERSION = "2.30.7"

# What reads a variable: a transport or a part of NCCL; "all" is the core, "Simple", "LL" and "LL128" are protocols.
SCOPES = {
    "all": "every collective",
    "setup": "setup over TCP, whatever carries the data",
    "Simple": "the protocol Simple",
    "LL": "the protocol LL",
    "LL128": "the protocol LL128",
    "p2p": "NVLink or PCIe between the GPUs of a host",
    "shm": "shared host memory",
    "nvls": "NVLink SHARP",
    "mnnvl": "NVLink across hosts",
    "net": "any network between hosts",
    "socket": "TCP sockets",
    "ib": "InfiniBand and RoCE",
    "collnet": "reduction inside network switches",
    "sendrecv": "send and receive, which all-to-all uses",
    "sym": "symmetric windows",
    "rma": "one-sided transfers",
    "gin": "networking started by the GPU",
    "cudagraph": "CUDA graphs",
    "ras": "the health service",
    "log": "logs and dumps",
    "torch": "torch's process groups",
    "gloo": "gloo",
}

TOUCH = {
    "site": "say how your machines are built, where NCCL cannot find out",
    "log": "free to use: it only says more, or less",
    "tune": "may help: measure before and after, and remove it if nothing changes",
    "debug": "only to find a fault, or around one; then remove it",
    "leave": "not for users: undocumented, or only an escape",
    "gone": "no longer read, or replaced",
}

# Variables of plugins, tests and builds that share NCCL's prefix; NCCL itself reads none of them.
FOREIGN = re.compile(
    r"NCCL_(INSPECTOR|PROFILER?|TUNER_CONFIG|TESTS|FASTRAK|GPUDIRECTTCPX|TCPX|LLCM|SHIMNET|SHARP|UCX|IBEXT|PLUGIN|EP|"
    r"RESHARD|CHECKPOINT)_\w+|"
    r"NCCL_(VERSION|HOME|PATH|ROOT|ROOT_DIR|DIR|LIB|LIBS|LIB_DIR|LIBRARY|LIBRARIES|INCLUDE|INCLUDE_DIR|INCLUDE_DIRS|"
    r"SOURCE|SRC|TAG|BRANCH|PREFIX|CFLAGS|LDFLAGS|PLUGIN)"
)


@dataclass(frozen=True)
class Knob:
    """One environment variable.

    kind: how its value is read (see `ddplab.nccl.reading`); legal: values or a range, as text; default: the value in
    force without it ("" where it depends on the machine); unit: of a number; scope: a key of SCOPES; since: the NCCL
    release that brought it ("" is before 2.4, or not NCCL's); guide: whether NCCL's user guide explains it ("" where
    it is not NCCL's); touch: a key of TOUCH; what: what it does, or for one that is gone what came instead.
    """

    name: str
    kind: str
    legal: str
    default: str
    unit: str
    scope: str
    since: str
    guide: str
    touch: str
    what: str

    @property
    def library(self) -> str:
        """Who reads it: "NCCL", "torch" or "gloo"."""
        return self.scope if self.scope in ("torch", "gloo") else "NCCL"

    @property
    def words(self) -> list[str]:
        """The legal values, where they are listed."""
        return self.legal.split(",") if self.legal and ".." not in self.legal else []

    @property
    def range(self) -> tuple[int, int | None, int] | None:
        """(least, most, step) of a number; most is None where there is no limit."""
        found = re.fullmatch(r"(-?\d+)\.\.(-?\d*)(?:/(\d+))?", self.legal)
        return found and (int(found[1]), int(found[2]) if found[2] else None, int(found[3] or 1))

    @property
    def successor(self) -> str:
        """The variable that replaces one that is gone, or ""."""
        name = self.what.partition(": ")[2]
        return name if self.touch == "gone" and name in knobs() else ""


@functools.cache
def knobs() -> dict[str, Knob]:
    """Every known variable by name."""
    names = [field.name for field in fields(Knob)]
    with (files("ddplab.nccl") / "knobs.csv").open(encoding="utf-8", newline="") as lines:
        return {row["name"]: Knob(**{name: row[name] for name in names}) for row in csv.DictReader(lines)}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """The known word that was probably meant, regardless of case, or ""; a slip does not add or lose four letters."""
    upper = {name.upper(): name for name in known if abs(len(name) - len(word)) <= 3}
    near = difflib.get_close_matches(word.upper(), list(upper), n=1, cutoff=cutoff)
    return upper[near[0]] if near else ""


def older(version: str, release: str) -> bool:
    """Is NCCL `version` older than `release`? As numbers: 2.9 is older than 2.10."""
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:3]] for text in (version, release)]
    return numbers[0] < numbers[1][: len(numbers[0])]
