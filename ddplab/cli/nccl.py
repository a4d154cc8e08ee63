"""NCCL from the outside: is the environment right, what did a log say, what would NCCL choose and why. None of it needs
a GPU."""

# An action is the module `ddplab.cli.nccl_ACTION` with `EXAMPLE`, `arguments(parser)`, `run(args)`, and a line below.

from __future__ import annotations

EXAMPLE = """\
ddplab nccl check
ddplab nccl check NCCL_PROTO=LL NCCL_BUFFSIZE=8MB"""

ACTIONS = {
    "check": "mistakes in NCCL's, gloo's and torch's environment variables",
}
