"""The core of every lab as a program: what the lab measures, in small, with a check that needs no eyes.

    ddplab labs run                                     # on four ranks of this machine
    torchrun ... -m ddplab labs run 02 09               # on the ranks of a job, on as many machines as it has

A core is a function that takes a `Job` and returns rows: what was found, what a closed form says, whether they agree.
It calls the package as the lab does, through `launch`, which joins the job that torchrun started, or starts ranks here.
Under torchrun every process runs the same cores; all see all results, so all agree on the outcome.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplab.cores.job import Job, Row

# the lab's number -> the module of this folder and the function in it
CORES = {
    "01": ("collectives", "dp_vs_ddp"),
    "02": ("collectives", "ring"),
    "03": ("collectives", "nccl_knobs"),
    "04": ("training", "ddp_four_steps"),
    "05": ("training", "accumulation"),
    "06": ("remains", "profiler_traces"),
    "07": ("remains", "links"),
    "08": ("remains", "hang"),
    "09": ("collectives", "hierarchical"),
    "10": ("training", "compression"),
    "11": ("training", "resnet50"),
}


def core_of(lab: str) -> Callable[[Job], list[Row]]:
    """The function of a lab, "01" to "11"; KeyError for another."""
    module, name = CORES[lab]
    return getattr(importlib.import_module(f"ddplab.cores.{module}"), name)


def run_cores(labs: Sequence[str], job: Job) -> Iterator[tuple[str, list[Row]]]:
    """(lab, rows) of each lab in turn. An exception of a core ends the run: its job is no longer in step."""
    for lab in labs:
        yield lab, core_of(lab)(job)
