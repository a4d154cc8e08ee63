"""What do communication hooks put on the wire? The kernel's count against the state's own, and against fp32.

    python benchmarks/hook_wire_bytes.py [--record] [--methods fp16 int8 ...]

ResNet-18 (11.7 million parameters) under torch's DDP, one rank on each of 4 emulated hosts, from the third step on: DDP
rebuilds its buckets after the first. Expected of the fp32 ring's bytes: fp16 0.50, int8 0.25, 1-bit at most 0.035, and
the kernel within 3% of `wire_bytes`. --record writes labs/results/hook_wire_bytes.json.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

import ddplab as dl

RESULT = Path(__file__).parents[1] / "labs/results/hook_wire_bytes.json"
METHODS = ("fp16", "bf16", "int8", "onebit", "topk", "randomk", "powersgd")
WARMUP = 2


def quiet_buffers(kind: type) -> dict[str, bool]:
    """The option of DDP that keeps BatchNorm's statistics off the wire: its name changed in torch 2.13."""
    known = inspect.signature(kind).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def count(method: str, steps: int) -> dict[str, float]:
    """On one rank: bytes a step, counted by the kernel and by the hook's state."""
    from torch.nn.parallel import DistributedDataParallel
    from torchvision.models import resnet18

    torch.manual_seed(0)
    ddp = DistributedDataParallel(resnet18(), **quiet_buffers(DistributedDataParallel))
    state = None
    if method != "fp32":
        state, hook = getattr(dl, method)()
        ddp.register_comm_hook(state, hook)
    images, labels = torch.randn(2, 3, 32, 32), torch.randint(0, 1000, (2,))
    for step in range(WARMUP + steps):
        if step == WARMUP:
            dist.barrier()
            sent, wire = dl.link_bytes().sent, state.wire_bytes if state else 0
        ddp.zero_grad()
        torch.nn.functional.cross_entropy(ddp(images), labels).backward()
    dist.barrier()
    values = sum(p.numel() for p in ddp.parameters())
    ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * 4 * values
    found = {
        "ring_B": ring,
        "wire_B": (state.wire_bytes - wire) / steps if state else ring,
        "kernel_B": (dl.link_bytes().sent - sent) / steps,
    }
    if state:
        state.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="which hooks (default all)")
    parser.add_argument("--steps", type=int, default=4, help="counted steps (default 4)")
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    rows = []
    with dl.Hosts(4, link="10gbit") as hosts:
        for method in ("fp32", *args.methods):
            counts = dl.launch(count, method, args.steps, hosts=hosts, timeout=300)
            mean = {key: sum(one[key] for one in counts) / len(counts) for key in counts[0]}
            rows.append({"method": method, **mean})
            print(f"{method}: {mean['kernel_B']:.0f} bytes a step", flush=True)
    frame = pd.DataFrame(rows)
    frame["of_fp32"] = frame["kernel_B"] / frame["kernel_B"].iloc[0]
    frame["kernel_over_wire"] = frame["kernel_B"] / frame["wire_B"]
    print(frame.round({"ring_B": 0, "wire_B": 0, "kernel_B": 0, "of_fp32": 4, "kernel_over_wire": 4}).to_string())
    if args.record:
        about = dict(model="resnet18", ranks=4, steps=args.steps, kind="counted by the kernel, mean of the ranks")
        dl.save_results(RESULT, frame, **about, script="benchmarks/hook_wire_bytes.py --record")


if __name__ == "__main__":
    main()
