"""What a check of the environment found."""

from __future__ import annotations

from dataclasses import dataclass

# The kinds of finding, with what each means for the job.
KINDS = {
    "unknown": "nobody reads a variable of this name",
    "renamed": "the variable has another name, or is gone",
    "illegal": "the value means something else than it looks like, or nothing",
    "no effect": "the variable is read, and changes nothing here",
    "hurts": "it works as written, and costs bandwidth, latency or the job",
}


@dataclass(frozen=True)
class Finding:
    """One problem: the variable, its value, what is wrong with it, what to do, and what kind it is (of KINDS)."""

    variable: str
    value: str
    problem: str
    remedy: str
    kind: str = "illegal"

    def __str__(self) -> str:
        return f"{self.variable}={self.value}: {self.problem}; {self.remedy}"
