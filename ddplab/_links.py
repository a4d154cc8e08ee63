"""Inside the namespaces: build N hosts on shaped links, hold them, read their byte counters.

Runs as a small process of its own (`python -c`, started by `hosts.Hosts`), because entering a user namespace is
allowed only to a process with one thread, which a notebook kernel is not. The namespaces have no name: they exist as
open files of this process and vanish with it, together with every device in them.

    host 0        host 1                 each host: one network namespace with `e0`, 10.98.0.(10 + i)/24
      e0            e0       <- token bucket filter: what the host sends
      |             |
      p0            p1       <- token bucket filter: what the host receives
       \\            /
        bridge br0           in the holder's own namespace (a bridge in the machine's would meet its firewall)

It talks JSON lines: on stdout one line when ready (or an error), then one per request on stdin; end of stdin ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
PR_SET_DUMPABLE = 4

# Small send buffers: otherwise acknowledgements queue behind megabytes of the host's own data.
_SYSCTL = {
    "ipv4/tcp_wmem": "4096 16384 262144",
    "ipv4/tcp_congestion_control": "reno",
    "ipv6/conf/all/disable_ipv6": "1",  # no neighbour discovery in the byte counters
    "ipv6/conf/default/disable_ipv6": "1",
}
_QUEUE_MS = 100

_libc = ctypes.CDLL(None, use_errno=True)


class SetupError(Exception):
    """A step of the set-up failed; `errno` is the kernel's."""

    def __init__(self, step: str, errno: int, reason: str):
        super().__init__(f"{step}: {reason}")
        self.step, self.errno = step, errno


def _call(step: str, function: Callable[..., int], *args: int) -> None:
    if function(*args) != 0:
        number = ctypes.get_errno()
        raise SetupError(step, number, os.strerror(number))


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _call("user namespace" if flags & CLONE_NEWUSER else "network namespace", _libc.unshare, flags)


def enter(fd: int, flag: int) -> None:
    """Move this process (which has one thread) into the namespace behind the open file `fd`."""
    _call("entering a namespace", _libc.setns, fd, flag)


def enter_host(user: str | None, net: str) -> None:
    """Move this process (which has one thread) to the host of these namespaces, see `Hosts.namespaces`."""
    fds = [(os.open(path, os.O_RDONLY), flag) for path, flag in ((user, CLONE_NEWUSER), (net, CLONE_NEWNET)) if path]
    for fd, flag in fds:
        enter(fd, flag)
        os.close(fd)


def become() -> None:
    """Move to the host of argv[1] and argv[2], and become the program that the other arguments name."""
    user, net, *command = sys.argv[1:]
    enter_host(user or None, net)
    os.execvp(command[0], command)


def read_counters(path: str = "/proc/self/net/dev") -> dict[str, tuple[int, int]]:
    """(sent, received) bytes of each device of this process's network namespace."""
    counters = {}
    for line in Path(path).read_text().splitlines()[2:]:
        device, _, numbers = line.partition(":")
        fields = numbers.split()
        counters[device.strip()] = int(fields[8]), int(fields[0])
    return counters


def _step(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function; its error becomes a SetupError that says which step of the set-up it was."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # OSError, or netlink's error with the kernel's number in `code`
        number = getattr(error, "code", None) or getattr(error, "errno", None) or 0
        raise SetupError(name, number, os.strerror(number) if number else str(error)) from None


def _new_namespaces() -> bool:
    """As root a network namespace; as a plain user one inside a user namespace. True for the latter."""
    try:
        unshare(CLONE_NEWNET)
        return False
    except SetupError:
        uid, gid = os.getuid(), os.getgid()
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that ranks may open our /proc entries
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            _step("user namespace", Path("/proc/self", name).write_text, text)
        return True


def _tune() -> None:
    for name, value in _SYSCTL.items():
        path = Path("/proc/sys/net", name)
        if path.exists():
            _step("sysctl", path.write_text, value)


def build(hosts: int, rate_Bps: float, burst_bytes: int) -> dict[str, Any]:
    """Make the hosts; returns the file descriptor of each host's namespace and whether a user namespace was needed."""
    user = _new_namespaces()
    home = os.open("/proc/self/ns/net", os.O_RDONLY)

    from pyroute2 import IPRoute  # after unshare, which must find one thread

    def shape(ip: Any, device: int) -> None:
        _step("tbf", ip.tc, "add", "tbf", device, rate=rate_Bps, burst=burst_bytes, latency=f"{_QUEUE_MS}ms")

    namespaces = []
    with IPRoute() as ip:
        _tune()
        _step("bridge", ip.link, "add", ifname="br0", kind="bridge")
        bridge = ip.link_lookup(ifname="br0")[0]
        _step("bridge", ip.link, "set", index=bridge, state="up")
        for i in range(hosts):
            unshare(CLONE_NEWNET)
            namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
            _tune()
            enter(home, CLONE_NEWNET)
            peer = {"ifname": "e0", "net_ns_fd": namespaces[i]}
            _step("veth", ip.link, "add", ifname=f"p{i}", kind="veth", peer=peer)
            port = ip.link_lookup(ifname=f"p{i}")[0]
            _step("bridge", ip.link, "set", index=port, master=bridge, state="up")
            shape(ip, port)
    for i, namespace in enumerate(namespaces):
        enter(namespace, CLONE_NEWNET)
        with IPRoute() as ip:
            device = ip.link_lookup(ifname="e0")[0]
            _step("address", ip.addr, "add", index=device, address=f"10.98.0.{10 + i}", prefixlen=24)
            for index in (1, device):  # 1 is lo
                _step("address", ip.link, "set", index=index, state="up")
            shape(ip, device)
    enter(home, CLONE_NEWNET)
    return {"namespaces": namespaces, "user": user}


def hold() -> None:
    """The process: build what argv[1] (JSON) asks for, answer requests, end with stdin."""
    try:
        answer = build(**json.loads(sys.argv[1]))
    except SetupError as error:
        answer = {"step": error.step, "errno": error.errno, "error": str(error)}
    print(json.dumps(answer), flush=True)
    if "error" in answer:
        return
    for _ in sys.stdin:  # the only request: counters, seen from the bridge, so sent and received change places
        ports = read_counters("/proc/self/net/dev")
        print(json.dumps([ports[f"p{i}"][::-1] for i in range(len(answer["namespaces"]))]), flush=True)
