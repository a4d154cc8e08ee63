"""NCCL from the outside: is the environment right, what did a log say, what would NCCL choose and why. None of it needs
a GPU."""

# An action is the module `ddplab.cli.nccl_ACTION` with `EXAMPLE`, `arguments(parser)`, `run(args)`, and a line below.

from __future__ import annotations

EXAMPLE = """\
ddplab nccl check
ddplab nccl check NCCL_PROTO=LL NCCL_BUFFSIZE=8MB"""

ACTIONS = {
    "check": "mistakes in NCCL's, gloo's and torch's environment variables",
    "log": "a log of NCCL_DEBUG=INFO: transports, rings, choices, warnings",
    "tests": "the output of nccl-tests, text or JSON, as a table",
    "model": "NCCL's own cost model of one node, and what forcing a choice costs",
    "sweep": "measure the values of a knob: helps, hurts or no effect",
}
