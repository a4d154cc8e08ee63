"""NCCL and gloo from the outside: the environment they read."""

from ddplab.nccl.env import Finding, check_env

__all__ = ["Finding", "check_env"]
