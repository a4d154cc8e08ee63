"""Do our four DDPs train as torch's does, and as one process on the whole batch? ResNet-18, 20 steps, 2 to 4 ranks.

    python benchmarks/ddp_equals_torch.py            # about three minutes
    python benchmarks/ddp_equals_torch.py --ranks 2 --steps 5

BatchNorm is in eval mode: then the mean over ranks is the gradient of the whole batch exactly. Ranks start from
different seeds and read different images. Expected: parameters within 1e-10 in float64; in float32 the gradients of
the first step within 1e-6, relative in norm; in bfloat16, at two ranks, the parameters after one step are torch's. From
three ranks on, the order of additions decides the last digits of a bfloat16 sum, all digits where the gradients cancel,
and so those of every parameter that is hardly larger than its step: units in the last place then count thousands for
a few elements. Parameters that start at zero are nothing but the gradient, and are compared in norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddplab as dl
from ddplab.results import provenance

WRAPPERS = {name: getattr(dl, name) for name in ("NaiveDDP", "FlatDDP", "OverlappedDDP", "BucketedDDP")}


def images(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Two images of 32 x 32 for `rank` at `step`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64).to(dtype)


def train(wrap: Callable | None, dtype: torch.dtype, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters after `steps` and gradients of the first step, flat; without `wrap` of one process on all images."""
    from torchvision.models import resnet18

    rank = dist.get_rank()
    torch.manual_seed(rank if wrap else 0)
    module = resnet18(num_classes=10).to(dtype).eval()
    model: nn.Module = wrap(module) if wrap else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    first = torch.empty(0)
    for step in range(steps):
        optimizer.zero_grad()
        mine = [rank] if wrap else range(dist.get_world_size())
        (model(torch.cat([images(r, step, dtype) for r in mine])).sin() ** 2).mean().backward()
        getattr(model, "finish", lambda: None)()
        if step == 0:
            first = torch.cat([p.grad.flatten() for p in module.parameters()]).clone()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()]), first


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The distance of two bfloat16 tensors, element by element, in units in the last place."""

    def ordered(t: torch.Tensor) -> torch.Tensor:
        bits = t.view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    return (ordered(a) - ordered(b)).abs()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def errors(steps: int) -> list[dict]:
    """On every rank: a row for each of our DDPs."""
    torch64, solo64 = (train(wrap, torch.float64, steps)[0] for wrap in (DistributedDataParallel, None))
    torch32, solo32 = (train(wrap, torch.float32, 1)[1] for wrap in (DistributedDataParallel, None))
    start16, torch16 = (train(DistributedDataParallel, torch.bfloat16, n)[0] for n in (0, 1))
    moved = start16 != 0
    rows = [
        {
            "ddp": "torch's",
            "float64_solo": float((torch64 - solo64).abs().max()),
            "float32_solo": relative(torch32, solo32),
        }
    ]
    for name, wrap in WRAPPERS.items():
        mine64, mine32 = train(wrap, torch.float64, steps)[0], train(wrap, torch.float32, 1)[1]
        mine16 = train(wrap, torch.bfloat16, 1)[0]
        rows.append(
            {
                "ddp": name,
                "float64_torch": float((mine64 - torch64).abs().max()),
                "float64_solo": float((mine64 - solo64).abs().max()),
                "float32_torch": relative(mine32, torch32),
                "float32_solo": relative(mine32, solo32),
                "bf16_ulps_torch": int(ulps(mine16, torch16)[moved].max()),
                "bf16_from_zero_torch": relative(mine16[~moved], torch16[~moved]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks (default 2 3 4)")
    parser.add_argument("--steps", type=int, default=20, help="steps in float64 (default 20)")
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        for found in dl.launch(errors, args.steps, ranks=ranks, timeout=900, device="cpu"):
            rows += [{"ranks": ranks, **row} for row in found]
    worst = pd.DataFrame(rows).groupby(["ranks", "ddp"], sort=False).max()
    print("; ".join(f"{key} {value}" for key, value in provenance().items()))
    print(worst.to_string(float_format="{:.1e}".format))


if __name__ == "__main__":
    main()
