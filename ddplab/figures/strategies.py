"""DDP, ZeRO-1, FSDP2, HSDP or local SGD: a calculator of memory and traffic for the reader's own model and machines."""

from __future__ import annotations

import html
from typing import Any

from ddplab._arguments import choice
from ddplab.figures.base import Figure, still_svg
from ddplab.strategies import strategies
from ddplab.transfers import count, number

# bytes of a parameter, of its gradient, of its optimizer state (Adam)
KINDS = {"fp32, Adam": (4, 4, 8), "bf16 with an fp32 copy, Adam": (2, 2, 12)}
_SPANS = {"billions": (1e-3, 1e5), "memory_GB": (0.1, 1e5), "gbit": (0.01, 1e5)}
_COUNTS = {"hosts": 100_000, "per_host": 1024, "blocks": 10_000, "every": 1_000_000}


class StrategyFigure(Figure):
    """A table of strategies that follows the reader's numbers, and the simplest that fits.

    billions: parameters in 10^9.  hosts, per_host: machines, and GPUs in each.  memory_GB: of a GPU, 10^9 bytes.
    gbit: what leaves a host, in Gbit/s.  kind: one of `KINDS`.  blocks, every: see `strategies`.
    ValueError for other numbers.
    """

    module = "strategies.js"

    def __init__(
        self,
        billions: float = 7.0,
        *,
        hosts: int = 2,
        per_host: int = 8,
        memory_GB: float = 80.0,
        gbit: float = 100.0,
        kind: str = "bf16 with an fp32 copy, Adam",
        blocks: int = 32,
        every: int = 100,
        caption: str = "",
    ) -> None:
        given: dict[str, Any] = {"billions": billions, "memory_GB": memory_GB, "gbit": gbit}
        whole: dict[str, Any] = {"hosts": hosts, "per_host": per_host, "blocks": blocks, "every": every}
        for name, (least, most) in _SPANS.items():
            number(given[name], name, least, most)
        for name, most in _COUNTS.items():
            if count(whole[name], name, error=ValueError) > most:
                raise ValueError(f"{name} is at most {most}, not {whole[name]}")
        choice(kind, "kind", KINDS)
        super().__init__(
            caption, **given, **whole, kind=kind, kinds={name: list(three) for name, three in KINDS.items()}
        )

    def _rows(self) -> list[tuple[str, float, float]]:
        s, (p, g, o) = self.state, KINDS[self.state["kind"]]
        found = strategies(
            s["billions"] * 1e9, hosts=s["hosts"], ranks_per_host=s["per_host"], param_bytes=p, grad_bytes=g,
            state_bytes=o, blocks=s["blocks"], every=s["every"],
        )  # fmt: skip
        return [(one.name, one.held / 1e9, one.leaving / 1e9) for one in found]

    def text(self) -> str:
        """The opening state in words."""
        s = self.state
        listed = "; ".join(f"{name}: holds {held:.4g}, leaves a host {away:.4g}" for name, held, away in self._rows())
        gpus = f"{s['hosts']} x {s['per_host']} GPUs of {s['memory_GB']:g} GB"
        return f"GB for {s['billions']:g} billion parameters, {s['kind']}, on {gpus}. {listed}."

    def svg(self) -> str:
        """The opening state: memory as bars against what a GPU has."""
        rows, memory = self._rows(), self.state["memory_GB"]
        longest = max(memory, *(held for _, held, _ in rows))
        at = f"{230 + 330 * memory / longest:.1f}"
        parts = [f'<line x1="{at}" x2="{at}" y1="30" y2="{40 + 26 * len(rows)}" stroke="#222"/>']
        parts.append(f'<text x="10" y="20">GB held by a GPU; the line is what it has, {memory:g} GB</text>')
        for i, (name, held, _) in enumerate(rows):
            y, fits = 36 + 26 * i, held <= memory
            fill, edge = ("#b9cfee", "#555") if fits else ("#f2c4c0", "#b3261e")
            parts.append(f'<text x="10" y="{y + 14}">{html.escape(name)}</text>')
            parts.append(
                f'<rect x="230" y="{y}" width="{330 * held / longest:.1f}" height="18" fill="{fill}" stroke="{edge}"/>'
            )
            parts.append(f'<text x="{236 + 330 * held / longest:.1f}" y="{y + 14}">{held:.4g}</text>')
        return still_svg(660, 46 + 26 * len(rows), "".join(parts))
