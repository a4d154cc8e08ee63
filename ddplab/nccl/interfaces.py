"""Network interfaces by name, in the two dialects of gloo and NCCL.

GLOO_SOCKET_IFNAME takes exact names, separated by commas (torch, ProcessGroupGloo). NCCL_SOCKET_IFNAME takes prefixes;
`^` in front means all but these, and then `=` means exact names (NCCL, socket.cc). A value in the wrong dialect fails
deep inside, or picks loopback silently.
"""

from __future__ import annotations

import ipaddress

from ddplab.nccl.finding import Finding


def check_gloo(value: str, interfaces: list[str]) -> list[Finding]:
    """Findings about GLOO_SOCKET_IFNAME=value on a machine with these interfaces."""
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


def check_nccl(value: str, interfaces: list[str]) -> list[Finding]:
    """Findings about NCCL_SOCKET_IFNAME=value on a machine with these interfaces."""
    excluded = value.startswith("^")
    exact = value.removeprefix("^").startswith("=")
    names = [name for name in value.removeprefix("^").removeprefix("=").split(",") if name]
    found = []
    for name in names:
        if _is_address(name):
            problem = f"{name} looks like an address, and NCCL takes interface names or prefixes of them"
            found.append(Finding("NCCL_SOCKET_IFNAME", value, problem, _choose(interfaces)))
    if names and not found:

        def listed(interface: str) -> bool:
            return any(interface == name if exact else interface.startswith(name) for name in names)

        if not [interface for interface in interfaces if listed(interface) != excluded]:
            problem = "no interface is left" if excluded else "no interface here matches"
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
