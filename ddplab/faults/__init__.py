"""Eight faults that make data-parallel jobs hang, crash or crawl, run for real, with what such a job leaves behind.

    leave("remains/", "wrong_order", rank=2, step=4)
    print(dl.why("remains/"))

Each runs a small training (`job.py`) in which one rank does one thing wrong at one step (`catalog.py`). Every rank has
a black box (`blackbox.py`). The job ends by itself; nothing in the folder says what was wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddplab.faults.plan import FAULTS, Plan, draw
from ddplab.launch import RankError, launch

__all__ = ["FAULTS", "Plan", "draw", "leave", "run"]

_SPARE_S = 20.0  # for starting and for ending, over the time that ranks wait for each other


def leave(folder: str | Path, fault: str | None, **choices: Any) -> Plan:
    """Run a fault and leave in `folder`, made if it is missing, what the job left. The choices are those of `Plan`.

    Returns the plan. None as fault is a healthy run. ValueError for a choice that makes no sense, FileExistsError if
    the folder has something in it.
    """
    plan = Plan(fault, **choices)
    run(plan, folder)
    return plan


def run(plan: Plan, folder: str | Path, env: dict[str, str] | None = None) -> None:
    """Run one plan; `env` are environment variables for the ranks, as for `launch`."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} has something in it; a job's remains belong in a folder of their own")
    _load_dynamo()
    try:
        launch(
            _train, plan, str(folder), ranks=plan.ranks, timeout=plan.limit_s + _SPARE_S, device="cpu", show=False,
            env=env,
        )  # fmt: skip
        end = "all ranks returned"
    except RankError as error:
        end = str(error)
    (folder / "launcher.log").write_text(f"{end}\n", "utf8")


def _train(plan: Plan, folder: str) -> None:
    """In a rank."""
    import torch.distributed as dist

    from ddplab.faults.blackbox import BlackBox
    from ddplab.faults.catalog import JOBS

    with BlackBox(folder, dist.get_rank(), plan.limit_s * 0.6) as box:
        JOBS[plan.fault](plan, box).run()


def _load_dynamo() -> None:
    """DDP needs it, seconds to load; a job that fails never tells the fork server to have it ready."""
    from ddplab._forkserver import fork_server

    fork_server().preload_dynamo()
