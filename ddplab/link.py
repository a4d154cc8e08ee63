"""What bytes travel over: a `Link` with a rate and a latency, and a `Topology` of hosts with one link each.

Rates are in bytes a second, in each direction: links are full duplex.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from numbers import Real

from ddplab.transfers import count

TCP_EFFICIENCY = 1448 / 1514  # payload of a full TCP segment with timestamps over its Ethernet frame, MTU 1500
EMULATED_BURST_BYTES = 128 * 1024  # the token bucket of an emulated host's link

_RATE = re.compile(
    r"\s*(?P<number>[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(?P<prefix>[kKmMgGtT]?)(?P<binary>[iI]?)"
    r"(?:(?P<bits>[bB][iI][tT][sS]?(?:/[sS]|[pP][sS])?|b(?:/s|ps))|(?P<bytes>B(?:/s|ps)|[bB]ytes?/s)|(?P<ethernet>[bB][eE]))\s*"
)


@dataclass(frozen=True)
class Link:
    """One full-duplex link.

    rate_Bps: bytes a second on the wire.  latency_s: seconds that a step costs before its first byte; the default, 50
    microseconds, is assumed (one TCP message between neighbours): `fit` finds yours.  wire_efficiency: payload over
    wire bytes.  burst_bytes: wire bytes that an idle link lets through at once, as a token-bucket filter does; 0 for a
    real link.  name: for tables.  Raises ValueError for a number that no link can have.
    """

    rate_Bps: float
    latency_s: float = 50e-6
    wire_efficiency: float = TCP_EFFICIENCY
    burst_bytes: float = 0
    name: str = ""

    def __post_init__(self) -> None:
        for field, legal, rule in (
            ("rate_Bps", lambda x: 0 < x < math.inf, "a positive number of bytes a second"),
            ("latency_s", lambda x: 0 <= x < math.inf, "a number of seconds, 0 or more"),
            ("wire_efficiency", lambda x: 0 < x <= 1, "above 0 and at most 1"),
            ("burst_bytes", lambda x: 0 <= x < math.inf, "a number of bytes, 0 or more"),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, Real) or not legal(value):
                hint = "; Link.parse reads text" if isinstance(value, str) else ""
                raise ValueError(f"A link's {field} must be {rule}, not {value!r}{hint}.")

    @property
    def payload_Bps(self) -> float:
        """Bytes of payload a second, in each direction."""
        return self.rate_Bps * self.wire_efficiency

    @classmethod
    def parse(cls, text: str | Link, **fields: float) -> Link:
        """A link from text: bits as in "1gbit", "1 gbps", "10 Gbit/s", "10GbE"; bytes as in "25GB/s", "100 MB/s".

        A single small b means bits, a capital B bytes: "1 gbps" is 0.125 GB/s (but `tc` calls bytes a second bps).
        k, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024; their case does not matter. `fields` sets the others,
        such as latency_s. Raises ValueError with examples for anything else.
        """
        if isinstance(text, Link):
            return replace(text, **fields)
        match = _RATE.fullmatch(text) if isinstance(text, str) else None
        rate = 0.0
        if match:
            base = 1024 if match["binary"] else 1000
            power = "kmgt".index(match["prefix"].lower()) + 1 if match["prefix"] else 0
            rate = float(match["number"]) * base**power / (1 if match["bytes"] else 8)
        if not 0 < rate < math.inf or (match["binary"] and (match["ethernet"] or not match["prefix"])):
            raise ValueError(
                f"Link {text!r} is not a rate: write a positive number with a unit a second, in bits "
                '("1gbit", "1 gbps", "10 Gbit/s") or in bytes ("25GB/s", "100 MB/s").'
            )
        return cls(rate, **{"name": text.strip(), **fields})

    def emulated(self) -> Link:
        """This link as `ddplab.Hosts` emulates it: a token-bucket filter, of 128 KiB if it has no burst yet."""
        return self if self.burst_bytes else replace(self, burst_bytes=EMULATED_BURST_BYTES)

    def __str__(self) -> str:
        return self.name or f"{self.rate_Bps / 1e9:g} GB/s"


@dataclass(frozen=True)
class Topology:
    """Hosts behind one switch, each with `ranks_per_host` ranks and one `link` that they share.

    Rank r lives on host r // ranks_per_host. Ranks on the same host do not load the host's link: they use `inner_link`,
    of which every rank has its own, or, where it is None, talk free of charge and infinitely fast. Links may be text.
    """

    hosts: int = 4
    ranks_per_host: int = 1
    link: Link = Link(1e9 / 8, name="1gbit")
    inner_link: Link | None = None

    def __post_init__(self) -> None:
        for field in ("hosts", "ranks_per_host"):
            object.__setattr__(self, field, count(getattr(self, field), f"A topology's {field}", error=ValueError))
        object.__setattr__(self, "link", Link.parse(self.link))
        if self.inner_link is not None:
            object.__setattr__(self, "inner_link", Link.parse(self.inner_link))

    @property
    def ranks(self) -> int:
        """hosts * ranks_per_host."""
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        inner = f", inside {self.inner_link}" if self.inner_link else ""
        return f"{self.hosts} hosts x {self.ranks_per_host} ranks, {self.link}{inner}"


def _nvlink(name: str, nominal: float, usable: float) -> Link:
    return Link(nominal, latency_s=5e-6, wire_efficiency=usable / nominal, name=name)


# Links met in the field, one direction, per GPU or adapter. NVLink: links x rate per link, and the part of it that NCCL
# counts as usable (NCCL 2.30.7, src/graph/topo.h:20-24: 20.0 of 25 GB/s for V100 and A100, 20.6 of 25 for H100, 40.1
# of 50 for B200; claim C08). Assumed latencies: 5 us for NVLink (claim C27 uses the same), 50 us for TCP on Ethernet.
FIELD_LINKS = {
    link.name: link
    for link in (
        _nvlink("nvlink-v100", 6 * 25e9, 6 * 20.0e9),
        _nvlink("nvlink-a100", 12 * 25e9, 12 * 20.0e9),
        _nvlink("nvlink-h100", 18 * 25e9, 18 * 20.6e9),
        _nvlink("nvlink-b200", 18 * 50e9, 18 * 40.1e9),
        Link(1.25e9, name="10gbe"),
        Link(3.125e9, name="25gbe"),
        Link(12.5e9, name="100gbe"),
    )
}
