"""NCCL and gloo from the outside: the environment they read, what they log, NCCL's cost model, knobs measured."""

from ddplab.nccl.ask import ask_nccl
from ddplab.nccl.env import check_env, nccl_env
from ddplab.nccl.finding import Finding
from ddplab.nccl.judge import judge
from ddplab.nccl.knobs import Knob
from ddplab.nccl.log import NcclLog, parse_log
from ddplab.nccl.model import NODES, Machine, TuningModel, tuning_model
from ddplab.nccl.sweep import Sweep, sweep
from ddplab.nccl.tests import NcclTests, parse_nccl_tests

__all__ = [
    "Finding",
    "Knob",
    "NODES",
    "Machine",
    "NcclLog",
    "NcclTests",
    "Sweep",
    "TuningModel",
    "ask_nccl",
    "check_env",
    "judge",
    "nccl_env",
    "parse_log",
    "parse_nccl_tests",
    "sweep",
    "tuning_model",
]
