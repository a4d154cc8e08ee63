"""ddplab: how gradients get from N workers to N workers, and how to make that fast.

Every public name loads on first use (PEP 562), so `import ddplab` is cheap and the parts that read files or
reason about schedules never load torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# public name -> the module that defines it
_HOME = {
    name: module
    for module, names in {
        "schedule": "Schedule ScheduleError ring star chain direct tree halving_doubling hierarchical",
        "cost": "Link Topology Prediction Fit predict fit ring_seconds",
        "launch": "launch RankError resolve_backend",
        "hosts": "Hosts HostsError hosts_problem link_bytes",
        "execute": "all_reduce",
        "hierarchy": "Hierarchy",
        "twolevel": "hierarchical_all_reduce",
        "bench": "bench",
        "ddp": "NaiveDDP FlatDDP OverlappedDDP BucketedDDP",
        "accumulate": "accumulate assert_grads_in_sync",
        "answers": "ask check_answers",
        "checks": "CheckError check_all_gather check_reduce_scatter check_ring",
        "ddp_checks": "check_ddp",
        "level_checks": "check_two_level",
        "steptimes": "Timeline",
        "timeline": "Compression predict_step best_bucket_cap",
        "profile": "Profile record",
        "assumed": "assumed_profile",
        "paced": "paced",
        "calibration": "Costs calibrate",
        "measured": "measure_timeline",
        "hookcosts": "calibrate_hook",
        "hookstages": "HookStages calibrate_stages",
        "headline": "Headline headline ThreeRuns three_runs",
        "capstone": "StepFit fit_step noop_hook link_for save_profile load_profile thinned speedups "
        "resnet50_step resnet50_job",
        "crossover": "Compressor Crossover crossover",
        "stepcounts": "StepCounts",
        "hooks.base": "HookState NonFiniteGradient comm_hook",
        "hooks.hierarchical": "Hierarchical hierarchical_hook",
        "hooks.cast": "Fp16 Bf16 fp16 bf16 fp16_hook bf16_hook",
        "hooks.onebit": "OneBit onebit onebit_hook",
        "hooks.int8": "Int8 int8 int8_hook",
        "hooks.twophase": "TwoPhase",
        "hooks.codec": "SignCodec Int8Codec",
        "hooks.sparse": "TopK RandomK topk randomk topk_hook randomk_hook",
        "hooks.powersgd": "PowerSGD powersgd powersgd_hook",
        "rounding": "rounding_error rounded_sum",
        "onebit_adam": "OneBitAdam",
        "local_sgd": "PostLocalSGD DiLoCo",
        "paired": "paired Paired",
        "convergence": "converge verdicts",
        "recipes": "RECIPES Recipe",
        "compression_checks": "check_onebit check_routing_bytes",
        "figures": "Figure LinkFigure LinkLoads RingStepper Stepper OverlapFigure BucketFigure WindowFigure "
        "TuningFigure CompressionFigure CrossoverFigure HeadlineFigure StrategyFigure",
        "strategies": "Strategy strategies strategy_table",
        "strategyruns": "measure_strategies",
        "compare": "compare",
        "nccl": "check_env nccl_env ask_nccl parse_log parse_nccl_tests tuning_model sweep",
        "results": "load_results save_results",
        "controls": "controls",
        "claims": "claim ClaimError",
        "why": "why Diagnosis",
        "hang_checks": "check_parting check_odd_ranks check_verdict",
        "dcgm": "parse_dmon link_rates parse_nvlink nvlink_rates parse_topo watch_links link_peak link_utilisation "
        "link_verdict dcgm_field dcgm_fields explain_dcgm DcgmError GpuUnavailable DcgmField GpuTopology LinkPeak "
        "LinkVerdict LinkWatch",
        "flight": "read_flight dump_flight FlightError",
        "inspector": "read_inspector InspectorError",
        "trace": "analyze_trace TraceError TraceReport",
        "trace.capture": "capture CaptureError",
    }.items()
    for name in names.split()
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ddplab' has no attribute {name!r}")
    module = importlib.import_module(f"ddplab.{_HOME[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """`ddplab.launch` is the function, also after something imported the module of the same name.

    Importing a submodule binds it on its package; that would hide a function that shares the module's name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple:
        """A cell's function that uses `dl` carries the package by name; pickle knows only plain modules."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
