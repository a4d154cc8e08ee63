"""DDP, ZeRO-1, FSDP2, HSDP or local SGD? What each holds on a rank, and what each sends, as closed forms.

Nothing here knows activations: they come on top, and are alike for all. `measure_strategies` has torch build them on
real ranks and compares what they hold and send with these forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplab.transfers import count, number

if TYPE_CHECKING:
    import pandas as pd

_MOST = 1e15


@dataclass(frozen=True)
class Strategy:
    """One way to train on several ranks, by what a parameter costs. All in bytes for the whole model.

    params, grads, state: what a rank keeps of parameters, gradients and optimizer state.  extra: what it needs besides,
    at its peak.  sent: what it sends for one optimizer step, as an average where it does not send in each.
    leaving: what all ranks of a host together send to other hosts.
    """

    name: str
    params: float
    grads: float
    state: float
    extra: float
    sent: float
    leaving: float

    @property
    def held(self) -> float:
        """All that a rank needs, without activations."""
        return self.params + self.grads + self.state + self.extra


def strategies(
    parameters: float,
    *,
    hosts: int = 1,
    ranks_per_host: int = 8,
    param_bytes: float = 4,
    grad_bytes: float = 4,
    state_bytes: float = 8,
    blocks: int = 32,
    every: int = 100,
) -> list[Strategy]:
    """Memory and traffic of each strategy for a model of so many parameters; derived, activations not included.

    param_bytes, grad_bytes, state_bytes: bytes of a parameter, of its gradient, of its optimizer state. The default is
        fp32 with Adam. bf16 with a master copy in fp32 is 2, 2, 12 (ZeRO, section 3.1).
    blocks: equal blocks that FSDP gathers one by one; two are there at a time, since the next is fetched early.
    every: local steps between two averages of local SGD and DiLoCo.

    Rings everywhere: a flat ring over all ranks leaves each host once. Sources: Rajbhandari et al. (2020); torch's
    ZeroRedundancyOptimizer, DistributedDataParallel and fully_shard for what is kept. ValueError for other numbers.
    """
    number(parameters, "parameters", 0, _MOST, above=True)
    for name, value in (("param_bytes", param_bytes), ("grad_bytes", grad_bytes), ("state_bytes", state_bytes)):
        number(value, name, 0, 1000, above=name != "state_bytes")
    for name, value in (("hosts", hosts), ("ranks_per_host", ranks_per_host), ("blocks", blocks), ("every", every)):
        count(value, name, error=ValueError)
    p, g, s = (parameters * size for size in (param_bytes, grad_bytes, state_bytes))
    ranks = hosts * ranks_per_host
    one_way, inside, across = (
        (n - 1) / n for n in (ranks, ranks_per_host, hosts)
    )  # of a reduce-scatter, an all-gather
    gathered = min(2 / blocks, 1) * p + g / blocks
    far = hosts > 1

    def flat(name: str, params: float, grads: float, state: float, extra: float, volume: float) -> Strategy:
        """Rings over all ranks; `volume`: bytes that go round once."""
        sent = one_way * volume
        return Strategy(name, params, grads, state, extra, sent, sent * far)

    return [
        flat("DDP", p, g, s, g, 2 * g),
        flat("ZeRO-1", p, g, s / ranks, g, g + p),
        flat("ZeroRedundancyOptimizer", p, g, s / ranks, g, 2 * g + p),
        flat("FSDP2, parameters kept", p / ranks, g / ranks, s / ranks, p + g / blocks, p + g),
        flat("FSDP2", p / ranks, g / ranks, s / ranks, gathered, 2 * p + g),
        Strategy(
            "HSDP", p / ranks_per_host, g / ranks_per_host, s / ranks_per_host,
            gathered if ranks_per_host > 1 else 0.0,
            inside * (2 * p + g) + 2 * across * g / ranks_per_host, 2 * across * g,
        ),
        flat("local SGD", p, g, s, 0.0, 2 * p / every),
        flat("DiLoCo", p, g, s, 2 * p, 2 * p / every),
    ]  # fmt: skip


def strategy_table(parameters: float, **how: float) -> pd.DataFrame:
    """`strategies` as a table, one row each, in GB (10^9 bytes)."""
    import pandas as pd

    rows = [
        (one.name, one.params, one.grads, one.state, one.extra, one.held, one.sent, one.leaving)
        for one in strategies(parameters, **how)
    ]
    columns = ["params_GB", "grads_GB", "state_GB", "extra_GB", "held_GB", "sent_GB", "leaving_host_GB"]
    table = pd.DataFrame(rows, columns=["strategy", *columns]).set_index("strategy")
    return table / 1e9
