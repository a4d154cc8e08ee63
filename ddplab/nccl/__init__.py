"""NCCL and gloo from the outside: the environment they read, what they log, NCCL's cost model, knobs measured."""

from ddplab.nccl.env import Finding, check_env
from ddplab.nccl.log import NcclLog, parse_log
from ddplab.nccl.model import MACHINES, Machine, TuningModel, tuning_model
from ddplab.nccl.tests import NcclTests, parse_nccl_tests

__all__ = [
    "MACHINES",
    "Finding",
    "Machine",
    "NcclLog",
    "NcclTests",
    "TuningModel",
    "check_env",
    "parse_log",
    "parse_nccl_tests",
    "tuning_model",
]
