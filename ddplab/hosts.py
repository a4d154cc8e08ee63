"""Emulated hosts: N network namespaces on this machine, joined by links of a known speed.

    with Hosts(4, link="1gbit") as hosts:
        launch(train, hosts=hosts)          # one rank a host, over four 1 Gbit/s links
        print(hosts.counters())             # what the kernel counted on each link

Real bytes take real time on them: a token bucket filter shapes both directions of every link. What is emulated is the
rate; the latency is that of this machine's kernel. Linux only, as root or as a user who may create user namespaces
(`hosts_problem()` says why not). The namespaces have no names, nothing of them is visible in the machine's own
network, and they vanish with their holder, which ends when the `with` block or the caller does.
"""

from __future__ import annotations

import errno
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplab._links import read_counters

if TYPE_CHECKING:
    from ddplab.link import Link, Topology

DEVICE = "e0"  # each host's network device
_MOST_HOSTS = 64
_SETUP_S = 60
_LEAST_BPS, _MOST_BPS = 10_000, 2**32 - 1  # the kernel's 32-bit fields: time to send a burst, rate
_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")


class HostsError(RuntimeError):
    """Hosts cannot be emulated here, or are closed already. The message says why and what helps."""


class LinkBytes(NamedTuple):
    """Bytes the kernel counted on a device, headers included (about 0.2% over the payload for large messages)."""

    sent: int
    received: int


class Hosts:
    """`n` hosts, each with one network device on a link of the given rate to a common switch.

    `link` is a rate such as "1gbit" or a `Link`. `launch(..., hosts=hosts)` runs rank r on host r // ranks_per_host;
    ranks of one host talk through that host's loopback. HostsError where hosts cannot be emulated.
    """

    def __init__(self, n: int = 4, link: str | Link = "1gbit", ranks_per_host: int = 1):
        for name, value, most in (("n", n, _MOST_HOSTS), ("ranks_per_host", ranks_per_host, 1024)):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"Hosts: {name} is a whole number from 1 to {most}, not {value!r}")
        from ddplab.link import Link

        link = Link.parse(link).emulated()  # with the burst of the token bucket that shapes it
        if link.rate_Bps > _MOST_BPS:
            raise ValueError(f"Hosts: tbf shapes links up to 34 Gbit/s, not {link.rate_Bps * 8 / 1e9:g} Gbit/s")
        if link.rate_Bps < _LEAST_BPS:
            raise ValueError(f"Hosts: tbf shapes links from 80 kbit/s on, not {link.rate_Bps * 8:g} bit/s")
        self.n, self.link, self.ranks_per_host = n, link, ranks_per_host
        self._lock = threading.Lock()
        self._holder: subprocess.Popen[str] | None = None
        self._built: dict[str, Any] = {}

    @property
    def ranks(self) -> int:
        """How many ranks the hosts hold together."""
        return self.n * self.ranks_per_host

    @property
    def topology(self) -> Topology:
        """What `predict` needs to know of these hosts; `predict(schedule, nbytes, hosts)` takes it from here."""
        from ddplab.cost import Topology

        return Topology(self.n, self.ranks_per_host, self.link)

    def __enter__(self) -> Hosts:
        if self._holder is not None:
            raise HostsError("these hosts are up already")
        if sys.platform != "linux":
            raise HostsError(f"hosts are emulated with Linux network namespaces; this is {sys.platform}")
        order = {"hosts": self.n, "rate_Bps": int(self.link.rate_Bps), "burst_bytes": int(self.link.burst_bytes)}
        self._holder = subprocess.Popen(
            [sys.executable, "-c", _run("hold"), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the caller, which closes us
        )
        try:
            if not select.select([self._holder.stdout], [], [], _SETUP_S)[0]:
                raise HostsError(f"the kernel did not make the hosts within {_SETUP_S} s; is this machine overloaded?")
            line = self._holder.stdout.readline()
            if not line:
                raise HostsError(f"the holder of the hosts died: {self._holder.stderr.read().strip()[-500:]}")
            self._built = json.loads(line)
            if "error" in self._built:
                raise HostsError(_explain(self._built))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the hosts. Ranks that still run in them keep a network without links."""
        with self._lock:
            holder, self._holder, self._built = self._holder, None, {}
        if holder is not None:
            holder.kill()  # it holds nothing but namespaces, which the kernel takes down
            holder.wait()
            for stream in (holder.stdin, holder.stdout, holder.stderr):
                stream.close()

    def __reduce__(self) -> Any:
        raise TypeError("Hosts stay with the caller: pass them as launch(..., hosts=hosts), not to the function")

    def counters(self) -> list[LinkBytes]:
        """(sent, received) bytes of each host's link since it came up, as the kernel counts them."""
        with self._lock:
            holder = self._alive()
            try:
                holder.stdin.write("counters\n")
                holder.stdin.flush()
                return [LinkBytes(*pair) for pair in json.loads(holder.stdout.readline())]
            except (OSError, ValueError):
                raise HostsError("the holder of the hosts was killed, and the hosts with it") from None

    def namespaces(self, rank: int) -> tuple[str | None, str]:
        """Paths of the user namespace (None where root made the hosts) and the network namespace of `rank`'s host."""
        pid = self._alive().pid
        fd = self._built["namespaces"][rank // self.ranks_per_host]
        return (f"/proc/{pid}/ns/user" if self._built["user"] else None), f"/proc/{pid}/fd/{fd}"

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host, as `subprocess.Popen(command, **options)` would on this machine.

        For a program that brings its own ranks, such as torchrun: `launch` needs none. The host's device is "e0", its
        address 10.98.0.(10 + host), and only the other hosts can reach what listens there. End the program before the
        hosts, which do not end it.
        """
        if not isinstance(host, int) or not 0 <= host < self.n:
            raise ValueError(f"host is from 0 to {self.n - 1}, not {host!r}")
        user, net = self.namespaces(host * self.ranks_per_host)
        return subprocess.Popen([sys.executable, "-c", _run("become"), user or "", net, *command], **options)

    def _alive(self) -> subprocess.Popen[str]:
        if self._holder is None or self._holder.poll() is not None:
            raise HostsError("the hosts are not up: use them inside `with Hosts(...) as hosts:`")
        return self._holder


_worked = False  # once they came up there is no need to try again; where they did not, the reader may have helped


def hosts_problem() -> str | None:
    """Why hosts cannot be emulated here and what helps, found by trying until it works; None where they can."""
    global _worked
    try:
        if not _worked:
            with Hosts(2, link="1gbit"):
                _worked = True
        return None
    except HostsError as error:
        return str(error)


def link_bytes() -> LinkBytes:
    """(sent, received) bytes of this rank's network device so far: its host's link, or `lo` where it is on no host.

    `lo` belongs to the whole machine: other programs' local traffic counts too.
    """
    counters = read_counters()
    return LinkBytes(*counters[DEVICE if os.environ.get("DDPLAB_HOST") else "lo"])


def _run(function: str) -> str:
    """The program that calls a function of `_links.py`, in a process of one thread."""
    root = str(Path(__file__).resolve().parent.parent)
    return f"import sys; sys.path.insert(0, {root!r}); from ddplab._links import {function}; {function}()"


def _explain(failure: dict[str, Any]) -> str:
    """One sentence from a failed step of the set-up: what failed, and the remedy."""
    step, number = failure["step"], failure["errno"]
    if "namespace" in step and _APPARMOR.exists() and _APPARMOR.read_text().strip() == "1":
        remedy = "AppArmor forbids user namespaces to plain users: run as root, or "
        remedy += "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
    elif "namespace" in step and number == errno.ENOSPC:
        remedy = "the limit of user namespaces is reached: run as root, or `sudo sysctl user.max_user_namespaces=15000`"
    elif "namespace" in step or number in (errno.EROFS, errno.EPERM, errno.EACCES):
        remedy = "this process may not do that: run as root, and a container with `--privileged`"
    elif number in (errno.ENOENT, errno.EOPNOTSUPP):
        module = {"tbf": "sch_tbf"}.get(step, step)
        remedy = f"the kernel has no {step}: `sudo modprobe {module}`"
    else:
        remedy = "the kernel refused; `ddplab doctor` shows its version"
    return f"hosts cannot be emulated here ({failure['error']}): {remedy}"
