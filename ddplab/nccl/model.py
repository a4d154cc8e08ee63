"""NCCL's own cost model: how long each algorithm and protocol would take on one node, and hence which one it picks.

When a communicator starts, NCCL computes a latency and a bandwidth for every algorithm (ring, tree, NVLS) with every
protocol (LL, LL128, Simple), and at each call it takes the pair with the least latency + bytes / bandwidth. The
formulas and constants here are those of NCCL 2.30.7, src/graph/tuning.cc (ncclTopoTuneModel, ncclTopoGetAlgoTime),
for an all-reduce on one node whose GPUs are joined by NVLink. They say what NCCL believes, not what a machine does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Ring", "Tree", "NVLS")

# Microseconds, by protocol: the fixed cost of a call, and that of one step over NVLink.
_BASE_US = {"Ring": (6.6, 14.0, 8.4), "Tree": (6.8, 14.0, 8.4)}
_STEP_US = {"Ring": (0.6, 1.9, 3.4), "Tree": (0.6, 1.25, 4.0)}
_NVLS_US = 25.0

# Bandwidths above which a generation of GPUs does not get on one node, GB/s: LL in all, the others for each channel.
_GENERATIONS = ("Volta", "Ampere", "Hopper", "Blackwell")
_LL_MAX = (39.0, 87.7, 141.0, 282.0)
_RING_LL128_MAX = (20.0, 20.0, 36.7, 40.0)
_TREE_MAX = (26.5, 24.0, 38.7, 70.0)
_TREE_LL128_MAX = (20.0, 20.0, 36.7, 55.6)
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)

# A tree's bandwidth at medium sizes, as a share of the formula: 64 B, 128 B, 256 B ... 256 MiB.
_TREE_SHARE = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)


@dataclass(frozen=True)
class Machine:
    """The GPUs of one node as the model sees them.

    ranks: GPUs in use.  compute_capability: 70 (V100), 80 (A100), 90 (H100, H200), 100 (B200).
    channels, channel_GBps: rings that NCCL's search lays over the NVLinks, and the rate of each; a log shows twice the
        channels ("24 coll channels" on 8 x A100), because NCCL doubles them afterwards.
    tree_GBps: the rate of a channel's tree (default: that of its ring).   single_nic_tree: NCCL's plainest pattern.
    nvls_channels, nvls_GBps, nvls_cap_GBps: the same for reduction in the switch (NVLS); 0 where there is none.
    basis: how all this is known.
    """

    name: str
    ranks: int
    compute_capability: int
    channels: int
    channel_GBps: float
    tree_GBps: float | None = None
    single_nic_tree: bool = False
    nvls_channels: int = 0
    nvls_GBps: float = 0.0
    nvls_cap_GBps: float = math.inf
    basis: str = "given"

    @property
    def generation(self) -> str:
        """The row of NCCL's constants that holds for these GPUs."""
        cc = self.compute_capability
        return _GENERATIONS[3 if cc >= 100 else 2 if cc >= 90 else 1 if cc >= 80 else 0]


def _node(name: str, capability: int, links: str, graphs: dict[int, tuple]) -> dict[int, Machine]:
    basis = f"found by NCCL 2.30.7's own channel search on {links}"
    return {ranks: Machine(name, ranks, capability, *graph, basis=basis) for ranks, graph in graphs.items()}


# What NCCL's search (src/graph/search.cc, compiled for the host) finds on each node, by GPUs in use: channels, GB/s of
# a ring's, GB/s of a tree's, the plainest tree or not, and for NVLS channels, GB/s, and the limit on GB/s.
NODES = {
    "8xV100": _node("8xV100", 70, "a cube mesh of 6 NVLinks a GPU, 20 GB/s each", {8: (6, 20.0)}),
    "8xA100": _node("8xA100", 80, "NVSwitch, 12 NVLinks a GPU, 20 GB/s each",
                    {2: (12, 20.0, 40.0), **dict.fromkeys(range(3, 9), (12, 20.0))}),
    "8xH100": _node("8xH100", 90, "NVSwitch, 18 NVLinks a GPU, 20.6 GB/s each",
                    {2: (12, 30.0, 60.0, False, 2, 60.0, 60.0), 3: (12, 30.0, 40.0, False, 3, 60.0, 60.0),
                     4: (12, 30.0, 30.0, False, 4, 60.0, 60.0), 5: (12, 30.0, 30.0, False, 5, 60.0, 60.0),
                     6: (12, 30.0, 30.0, False, 6, 50.0, 60.0), 7: (12, 30.0, 30.0, False, 7, 40.0, 60.0),
                     8: (12, 30.0, 30.0, False, 8, 40.0, 60.0)}),
    "8xB200": _node("8xB200", 100, "NVSwitch, 18 NVLinks a GPU, 40.1 GB/s each",
                    {2: (16, 45.0, 90.0, False, 2, 90.0, 90.0), 3: (16, 45.0, 60.0, True, 3, 90.0, 90.0),
                     4: (16, 45.0, 50.0, True, 4, 90.0, 90.0), 5: (16, 45.0, 45.0, False, 5, 90.0, 90.0),
                     6: (16, 45.0, 45.0, False, 6, 90.0, 90.0), 7: (16, 45.0, 45.0, False, 7, 90.0, 90.0),
                     8: (16, 45.0, 45.0, False, 8, 80.0, 90.0)}),
}  # fmt: skip


@dataclass(frozen=True)
class TuningModel:
    """Latency and bandwidth of an all-reduce for each algorithm and protocol on one node; see `tuning_model`."""

    machine: Machine

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(algorithm, protocol) that this machine offers, in NCCL's order: of equals, the first is taken."""
        nvls = [("NVLS", "Simple")] if self._nvls else []
        return [(a, p) for a in ("Tree", "Ring") for p in PROTOCOLS] + nvls

    @property
    def _nvls(self) -> bool:
        return self.machine.nvls_channels >= 2 and _NVLS_EFFICIENCY[self._row] > 0

    @property
    def _row(self) -> int:
        return _GENERATIONS.index(self.machine.generation)

    def latency_us(self, algorithm: str, protocol: str) -> float:
        """The part of the time that does not depend on the size, in microseconds. ValueError for an unknown pair."""
        p = self._protocol(algorithm, protocol)
        if algorithm == "NVLS":
            return _NVLS_US
        return _BASE_US[algorithm][p] + 2 * (self.machine.ranks - 1) * _STEP_US[algorithm][p]

    def busbw_GBps(self, algorithm: str, protocol: str) -> float:
        """Bus bandwidth at large sizes, in GB/s, as in a table of nccl-tests. ValueError for an unknown pair."""
        return self.algbw_GBps(algorithm, protocol) * 2 * (self.machine.ranks - 1) / self.machine.ranks

    def algbw_GBps(self, algorithm: str, protocol: str) -> float:
        """Bytes of the buffer per second at large sizes, in GB/s. ValueError for an unknown pair."""
        p, m, row = self._protocol(algorithm, protocol), self.machine, self._row
        peak = m.channels * m.channel_GBps
        if algorithm == "Tree":
            rate = min(m.channels * (m.tree_GBps or m.channel_GBps) * 0.92, m.channels * _TREE_MAX[row])
            if p == 0:
                rate = min(rate / 3.8, _LL_MAX[row])
            elif p == 1:
                rate = min(rate * 7 / 9, m.channels * _TREE_LL128_MAX[row])
            return rate / 2 * (0.85 if m.single_nic_tree else 1)
        if algorithm == "NVLS":
            rate = m.nvls_GBps * _NVLS_EFFICIENCY[row] * (m.nvls_channels - 1) / m.nvls_channels * 2
            rate = m.nvls_channels * min(rate, m.nvls_cap_GBps)
        elif p == 0:  # 4 bytes of data go with 4 bytes of flag
            rate = min(_LL_MAX[row], peak / 2)
        elif p == 1:  # 120 bytes of data go with 8 bytes of flag
            rate = min(peak * 0.92, m.channels * _RING_LL128_MAX[row])
        else:
            rate = peak
        return rate * m.ranks / (2 * (m.ranks - 1))

    def seconds(self, nbytes: float, algorithm: str, protocol: str) -> float:
        """Seconds that an all-reduce of `nbytes` bytes would take. ValueError for an unknown pair or negative bytes."""
        if not 0 <= nbytes < math.inf:  # also NaN
            raise ValueError(f"a message has 0 bytes or more, not {nbytes!r}")
        rate = self.algbw_GBps(algorithm, protocol)
        if algorithm == "Tree" and (lines := int(nbytes) >> 6):
            shares = _TREE_SHARE[PROTOCOLS.index(protocol)]
            if (power := lines.bit_length() - 1) < len(shares):
                rate *= shares[power]
        return self.latency_us(algorithm, protocol) * 1e-6 + nbytes / (rate * 1e9)

    def choose(self, nbytes: float, algorithms: Iterable[str] = ALGORITHMS, protocols: Iterable[str] = PROTOCOLS):
        """(algorithm, protocol) with the least time among those allowed, as NCCL_ALGO and NCCL_PROTO would allow them.

        ValueError where nothing is left, which NCCL answers with an invalid usage error.
        """
        algorithms, protocols = list(algorithms), list(protocols)
        allowed = [(a, p) for a, p in self.pairs if a in algorithms and p in protocols]
        if not allowed:
            asked = f"{' or '.join(algorithms) or 'no algorithm'} with {' or '.join(protocols) or 'no protocol'}"
            raise ValueError(f"{self.machine.name} does not offer {asked}; it has {self._known()}")
        return min(allowed, key=lambda pair: self.seconds(nbytes, *pair))

    def crossover(
        self, small: tuple[str, str] = ("Ring", "LL"), large: Iterable[tuple[str, str]] | None = None
    ) -> float:
        """Bytes above which `small` is no longer the fastest of the ring's protocols (or of `small` and `large`).

        Infinity where it stays the fastest; 0 where it never is.
        """
        others = list(large) if large is not None else [("Ring", p) for p in PROTOCOLS if ("Ring", p) != small]

        def behind(nbytes: float) -> bool:
            return self.seconds(nbytes, *small) > min(self.seconds(nbytes, *pair) for pair in others)

        low, high = 1.0, 2.0**40
        if behind(low):
            return 0.0
        if not behind(high):
            return math.inf
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if behind(middle) else (middle, high)
        return high

    def table(self) -> pd.DataFrame:
        """One row a pair: algorithm, protocol, latency_us, algbw_GBps, busbw_GBps; rings first."""
        import pandas as pd

        pairs = sorted(self.pairs, key=lambda pair: (ALGORITHMS.index(pair[0]), PROTOCOLS.index(pair[1])))
        return pd.DataFrame(
            {
                "algorithm": a,
                "protocol": p,
                "latency_us": self.latency_us(a, p),
                "algbw_GBps": self.algbw_GBps(a, p),
                "busbw_GBps": self.busbw_GBps(a, p),
            }
            for a, p in pairs
        )

    def times(self, sizes: Iterable[float]) -> pd.DataFrame:
        """One row a size and pair: size_B, algorithm, protocol, time_us, busbw_GBps, chosen (NCCL's choice: True)."""
        import pandas as pd

        factor, rows = 2 * (self.machine.ranks - 1) / self.machine.ranks, []
        for nbytes in sizes:
            best = self.choose(nbytes)
            for a, p in self.pairs:
                seconds = self.seconds(nbytes, a, p)
                busbw = nbytes / seconds / 1e9 * factor
                rows.append((nbytes, a, p, seconds * 1e6, busbw, (a, p) == best))
        return pd.DataFrame(rows, columns=["size_B", "algorithm", "protocol", "time_us", "busbw_GBps", "chosen"])

    def figure(self, **options):
        """The model with sliders: a `ddplab.figures.TuningFigure`."""
        from ddplab.figures.tuning import TuningFigure

        return TuningFigure(self, **options)

    def _protocol(self, algorithm: str, protocol: str) -> int:
        if (algorithm, protocol) not in self.pairs:
            raise ValueError(f"{self.machine.name} has no {algorithm}/{protocol}; it has {self._known()}")
        return PROTOCOLS.index(protocol)

    def _known(self) -> str:
        return ", ".join(f"{a}/{p}" for a, p in self.pairs)


def tuning_model(
    machine: str | Machine = "8xA100",
    *,
    ranks: int | None = None,
    channels: int | None = None,
    channel_GBps: float | None = None,
) -> TuningModel:
    """NCCL's cost model of an all-reduce on one node.

    machine: "8xV100", "8xA100", "8xH100", "8xB200", or a `Machine` of your own.
    ranks: GPUs in use, if not all.   channels, channel_GBps: in place of what NCCL's search finds.
    Raises ValueError for an unknown machine, for a number of GPUs that it does not have, for rates that make no sense.
    Source: NCCL 2.30.7, src/graph/tuning.cc; the channels come from its src/graph/search.cc.
    """
    if not isinstance(machine, Machine):
        if machine not in NODES:
            raise ValueError(f"no machine is called {machine!r}: take {', '.join(NODES)} (in Python, or a Machine)")
        graphs = NODES[machine]
        if ranks is not None and ranks not in graphs:
            raise ValueError(
                f"{machine} is known with {_spoken(graphs)} GPUs, not {ranks!r} (in Python, take a Machine)"
            )
        machine, ranks = graphs[8 if ranks is None else ranks], None
    given = {"ranks": ranks, "channels": channels, "channel_GBps": channel_GBps}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        machine = replace(machine, **given, basis=f"{machine.basis}; {', '.join(given)} given")
    for name, least, most in (("ranks", 2, 72), ("channels", 1, 32)):
        value = getattr(machine, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} is a whole number from {least} to {most}, not {value!r}")
    for name in ("channel_GBps", "tree_GBps"):
        value = getattr(machine, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is a positive rate in GB/s, not {value!r}")
    return TuningModel(machine)


def _spoken(numbers: Iterable[int]) -> str:
    low, *rest = sorted(numbers)
    return f"{low} to {rest[-1]}" if rest else f"{low}"
