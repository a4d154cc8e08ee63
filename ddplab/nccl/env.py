"""Mistakes in the environment variables that gloo and NCCL read.

Both libraries choose their network interface by a variable, in two dialects. GLOO_SOCKET_IFNAME takes exact names,
separated by commas (torch, ProcessGroupGloo). NCCL_SOCKET_IFNAME takes prefixes; `=` in front means exact names and
`^` means all but these (NCCL user guide, "Environment Variables"). A value in the wrong dialect fails deep inside, or
picks loopback silently.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One problem: the variable, its value, what is wrong with it and what to do."""

    variable: str
    value: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value}: {self.problem}; {self.remedy}"


def check_env(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Findings about the interface names in `environ` (default: this process's); empty where all is well."""
    environ = os.environ if environ is None else environ
    interfaces = [name for _, name in socket.if_nameindex()]
    return [
        *_check_gloo(environ.get("GLOO_SOCKET_IFNAME", ""), interfaces),
        *_check_nccl(environ.get("NCCL_SOCKET_IFNAME", ""), interfaces),
    ]


def _check_gloo(value: str, interfaces: list[str]) -> list[Finding]:
    found = []
    for name in value.split(",") if value else []:
        if name.startswith(("^", "=")):
            problem = f"gloo takes exact interface names, no {name[0]}"
        elif _is_address(name):
            problem = f"{name} looks like an address, and gloo takes interface names"
        elif name not in interfaces:
            problem = f"there is no interface {name!r} here"
        else:
            continue
        found.append(Finding("GLOO_SOCKET_IFNAME", value, problem, _choose(interfaces)))
    return found


def _check_nccl(value: str, interfaces: list[str]) -> list[Finding]:
    mode = value[:1] if value[:1] in ("^", "=") else ""
    names = [name for name in value[len(mode) :].split(",") if name]
    found = []
    for name in names:
        if _is_address(name):
            problem = f"{name} looks like an address, and NCCL takes interface names or prefixes of them"
            found.append(Finding("NCCL_SOCKET_IFNAME", value, problem, _choose(interfaces)))
    if names and not found:

        def listed(interface: str) -> bool:
            return any(interface == name if mode == "=" else interface.startswith(name) for name in names)

        if not [interface for interface in interfaces if listed(interface) != (mode == "^")]:
            problem = "no interface is left" if mode == "^" else "no interface here matches"
            found.append(Finding("NCCL_SOCKET_IFNAME", value, problem, _choose(interfaces)))
    return found


def _choose(interfaces: list[str]) -> str:
    return f"choose from {', '.join(interfaces)}"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("/")[0].partition("%")[0])
        return True
    except ValueError:
        return False
