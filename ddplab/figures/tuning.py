"""NCCL's cost model with sliders: time or bus bandwidth by message size, and what NCCL would choose."""

from __future__ import annotations

import math
from typing import Any

from ddplab.figures.base import Figure, still_svg
from ddplab.nccl import model as source
from ddplab.nccl.model import NODES, PROTOCOLS, Machine, TuningModel, tuning_model

_HUES = {"LL": "#3b7ddd", "LL128": "#d9730d", "Simple": "#2e9e5b", "NVLS": "#9a60d0"}
_DASHES = {"Ring": "", "Tree": "7 4", "NVLS": "2 3"}
_LOW, _HIGH = 10, 32  # powers of two of the message size, as in the JavaScript
_SIZES = {2**power for power in range(_LOW, _HIGH + 1)} | {25 * 2**20}  # DDP's bucket among them


class TuningFigure(Figure):
    """Lines of time or bus bandwidth over message size for each algorithm and protocol of a node.

    model: a `TuningModel`, or the name of a machine. The reader moves to another node, and changes message and GPUs;
        NCCL_PROTO and NCCL_ALGO show what forcing one costs. The figure computes as `tuning_model` does.
    nbytes: the message that it opens at, 1 KiB to 4 GiB.   show: "time" or "bandwidth".
    Raises ValueError for another size or kind.
    """

    module = "tuning.js"

    def __init__(
        self, model: TuningModel | str = "8xA100", *, nbytes: float = 25 * 2**20, show: str = "time", caption: str = ""
    ) -> None:
        if not (isinstance(nbytes, (int, float)) and 2**_LOW <= nbytes <= 2**_HIGH):
            raise ValueError(f"nbytes lies between 1 KiB and 4 GiB, not {nbytes!r}")
        if show not in ("time", "bandwidth"):
            raise ValueError(f'show is "time" or "bandwidth", not {show!r}')
        self.model = tuning_model(model) if isinstance(model, str) else model
        self.nbytes, sizes = nbytes, sorted({*_SIZES, nbytes})
        machine = self.model.machine
        nodes = {**NODES, machine.name: {**NODES.get(machine.name, {}), machine.ranks: machine}}
        super().__init__(
            caption,
            facts=facts(),
            nodes={name: [described(one) for _, one in sorted(graphs.items())] for name, graphs in nodes.items()},
            names=list(nodes),
            machine=machine.name,
            graph=sorted(nodes[machine.name]).index(machine.ranks),
            sizes=sizes,
            size_at=sizes.index(nbytes),
            show=show,
            protocol="unset",
            algorithm="unset",
        )

    def text(self) -> str:
        """The opening state in words."""
        pair = self.model.choose(self.nbytes)
        return (
            f"NCCL's cost model for {self.model.machine.name}: at {_binary(self.nbytes)} it would choose "
            f"{'/'.join(pair)}, {self.model.seconds(self.nbytes, *pair) * 1e6:.3g} us."
        )

    def svg(self) -> str:
        """The opening state."""
        left, right, top, bottom = 74, 600, 30, 260
        is_time = self.state["show"] == "time"
        grid = [_LOW + i / 4 for i in range((_HIGH - _LOW) * 4 + 1)]

        def value(power: float, a: str, p: str) -> float:
            seconds = self.model.seconds(2**power, a, p)
            ranks = self.model.machine.ranks
            return seconds * 1e6 if is_time else 2**power / seconds / 1e9 * 2 * (ranks - 1) / ranks

        ends = [value(power, *pair) for pair in self.model.pairs for power in (_LOW, _HIGH)]
        low, high = math.floor(math.log10(min(ends))), math.ceil(math.log10(max(ends)))

        def x(power: float) -> float:
            return left + (power - _LOW) / (_HIGH - _LOW) * (right - left)

        def y(v: float) -> float:
            return bottom - (math.log10(v) - low) / (high - low) * (bottom - top)

        unit = "us" if is_time else "GB/s"
        parts = [f'<text x="10" y="18">{self.text()}</text>']
        for decade in range(low, high + 1):
            at = y(10.0**decade)
            parts.append(f'<path d="M{left} {at:.1f}H{right}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 4}" y="{at + 4:.1f}" text-anchor="end">{10.0**decade:g} {unit}</text>')
        for power in (10, 20, 30):
            parts.append(f'<path d="M{x(power):.1f} {top}V{bottom}" stroke="#ddd"/>')
            parts.append(f'<text x="{x(power):.1f}" y="{bottom + 16}" text-anchor="middle">{_binary(2**power)}</text>')
        lowest = -99.0
        for a, p in sorted(self.model.pairs, key=lambda pair: y(value(_HIGH, *pair))):
            line = "L".join(f"{x(power):.1f} {y(value(power, a, p)):.1f}" for power in grid)
            hue, dash = _HUES["NVLS" if a == "NVLS" else p], f' stroke-dasharray="{_DASHES[a]}"' * (a != "Ring")
            parts.append(f'<path d="M{line}" fill="none" stroke="{hue}" stroke-width="2"{dash}/>')
            lowest = max(y(value(_HIGH, a, p)) + 4, lowest + 13)
            parts.append(f'<text x="{right + 5}" y="{lowest:.1f}">{a}/{p}</text>')
        return still_svg(700, max(bottom + 26, lowest + 8), "".join(parts))


def facts() -> dict[str, Any]:
    """NCCL's constants, as the JavaScript wants them."""
    rows = zip(
        source._GENERATIONS,
        source._LL_MAX,
        source._RING_LL128_MAX,
        source._TREE_MAX,
        source._TREE_LL128_MAX,
        source._NVLS_EFFICIENCY,
        strict=True,
    )
    keys = ("ll", "ringLL128", "tree", "treeLL128", "nvls")
    return {
        "base": source._BASE_US,
        "step": source._STEP_US,
        "nvlsUs": source._NVLS_US,
        "limits": {name: dict(zip(keys, limits, strict=True)) for name, *limits in rows},
        "treeShare": [source._TREE_SHARE[i] for i, _ in enumerate(PROTOCOLS)],
    }


def described(machine: Machine) -> dict[str, Any]:
    """A machine, as the JavaScript wants it."""
    return {
        "name": machine.name,
        "ranks": machine.ranks,
        "generation": machine.generation,
        "channels": machine.channels,
        "rate": machine.channel_GBps,
        "treeRate": machine.tree_GBps or machine.channel_GBps,
        "treeShare": 0.85 if machine.single_nic_tree else 1,
        "nvlsChannels": machine.nvls_channels,
        "nvlsRate": machine.nvls_GBps,
        "nvlsCap": machine.nvls_cap_GBps if math.isfinite(machine.nvls_cap_GBps) else None,
    }


def _binary(size: float) -> str:
    power = min(3, int(math.log2(size) // 10))
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
