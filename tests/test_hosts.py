"""Emulated hosts: that they are separate, shaped, counted by the kernel, and gone afterwards."""

from __future__ import annotations

import ctypes
import errno
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from ddplab import hosts as hosts_module
from ddplab._links import CLONE_NEWNET, enter
from ddplab.hosts import Hosts, HostsError, hosts_problem, link_bytes
from ddplab.launch import RankError, launch
from ddplab.link import Link

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest to find a helper below

ROOT = Path(__file__).resolve().parent.parent
PR_CAPBSET_DROP, CAP_SETFCAP, CAPABILITIES = 24, 31, 41

PROBLEM = hosts_problem()
emulated = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))


@pytest.fixture(scope="module")
def four():
    with Hosts(4, link="1gbit") as hosts:
        yield hosts


def namespaces_of(pid: int | str = "self") -> set[str]:
    """The network namespace of a process and those it holds open, by the kernel's number."""
    links = [Path(f"/proc/{pid}/ns/net"), *Path(f"/proc/{pid}/fd").iterdir()]
    found = set()
    for link in links:
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return {name for name in found if name.startswith("net:")}


def namespaces_in_use() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found |= namespaces_of(process.name)
        except OSError:
            continue
    return found


def where_am_i():
    return os.readlink("/proc/self/ns/net"), [name for _, name in socket.if_nameindex()]


def qdiscs() -> dict[str, dict]:
    """The shaping of each device in this network namespace, as the kernel tells it over netlink."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in ip.get_links()}
        found = {}
        for qdisc in ip.get_qdiscs():
            if qdisc.get_attr("TCA_KIND") == "tbf":
                parameters = qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")
                found[names[qdisc["index"]]] = parameters["rate"]
        return found


@emulated
def test_ranks_live_on_their_own_hosts_and_the_machine_sees_no_device():
    before = socket.if_nameindex()
    with Hosts(2, ranks_per_host=2) as hosts:
        assert hosts.ranks == 4
        places = launch(where_am_i, hosts=hosts)
        assert socket.if_nameindex() == before
    names = [name for name, _ in places]
    assert names[0] == names[1] != names[2] == names[3]
    assert os.readlink("/proc/self/ns/net") not in names
    assert all({"lo", "e0"} <= set(devices) for _, devices in places)


@emulated
def test_both_directions_of_each_link_are_shaped():
    with Hosts(2, link="200 Mbit/s") as hosts:
        assert [list(found.items()) for found in launch(qdiscs, hosts=hosts)] == [[("e0", 25_000_000)]] * 2
        inside = os.open(f"/proc/{hosts._holder.pid}/ns/net", os.O_RDONLY)
        source = inspect.getsource(qdiscs)
        code = f"from __future__ import annotations\n{source}\nimport json; print(json.dumps(qdiscs()))"
        user = hosts.namespaces(0)[0]
        if user is None:  # as root we may look at the other ends too
            out = subprocess.run(
                [sys.executable, "-c", code],
                preexec_fn=lambda: enter(inside, CLONE_NEWNET),
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
            assert json.loads(out) == {"p0": 25_000_000, "p1": 25_000_000}
        os.close(inside)


@emulated
def test_each_host_has_small_send_buffers_and_reno(four):
    def settings():
        net = Path("/proc/sys/net/ipv4")
        return (net / "tcp_wmem").read_text().split()[2], (net / "tcp_congestion_control").read_text().strip()

    machine = settings()
    assert launch(settings, hosts=four) == [("262144", "reno")] * 4
    assert settings() == machine


@emulated
def test_the_kernel_counts_the_payload_on_the_right_links(four):
    nbytes = 4_000_000

    def send():
        before = link_bytes()
        t = torch.ones(nbytes // 4)
        if dist.get_rank() == 1:
            dist.send(t, 3)
        if dist.get_rank() == 3:
            dist.recv(t, 1)
        dist.barrier()
        after = link_bytes()
        return after.sent - before.sent, after.received - before.received

    start = four.counters()
    inside = launch(send, hosts=four)
    outside = [(b.sent - a.sent, b.received - a.received) for a, b in zip(start, four.counters(), strict=True)]
    for counted in (inside, outside):
        for host, (sent, received) in enumerate(counted):
            for value, expected in ((sent, host == 1), (received, host == 3)):
                if expected:
                    assert nbytes < value < 1.01 * nbytes
                else:
                    assert value < 0.02 * nbytes  # acknowledgements, the rendezvous and the barrier
    for seen, out in zip(inside, outside, strict=True):
        assert out[0] >= seen[0] and out[1] >= seen[1]


@emulated
def test_ranks_of_one_host_do_not_load_its_link():
    def exchange():
        before = link_bytes()
        t = torch.ones(1_000_000)
        if dist.get_rank() == 0:
            dist.send(t, 1)
        if dist.get_rank() == 1:
            dist.recv(t, 0)
        return link_bytes().sent - before.sent

    with Hosts(2, ranks_per_host=2) as hosts:
        assert max(launch(exchange, hosts=hosts)) < 40_000


@emulated
def test_ranks_listen_on_their_hosts_address_only(four):
    def listeners():
        dist.all_reduce(torch.ones(1))
        found = set()
        for table in ("tcp", "tcp6"):
            path = Path("/proc/self/net", table)
            for line in path.read_text().splitlines()[1:] if path.exists() else []:
                fields = line.split()
                if fields[3] == "0A":
                    packed = int(fields[1].partition(":")[0], 16).to_bytes(4, sys.byteorder)
                    found.add(socket.inet_ntoa(packed))
        dist.barrier()
        return found

    assert launch(listeners, hosts=four) == [{f"10.98.0.{10 + r}"} for r in range(4)]


@emulated
def test_link_bytes_outside_hosts_counts_loopback():
    def exchange():
        before = link_bytes()
        dist.all_reduce(torch.ones(1_000_000))
        dist.barrier()
        return link_bytes().sent - before.sent

    assert min(launch(exchange, ranks=2)) > 4_000_000  # both ranks send half of it twice, all over lo


@emulated
def test_hosts_that_fail_inside_the_block_are_gone_with_all_they_held():
    with pytest.raises(RankError, match="rank 1: ValueError: no"), Hosts(2) as hosts:
        held = namespaces_of(hosts._holder.pid)
        assert len(held) == 3 and held <= namespaces_in_use()  # the switch's and the two hosts'

        def fail():
            if dist.get_rank() == 1:
                raise ValueError("no")

        launch(fail, hosts=hosts)
    assert not held & namespaces_in_use()
    with pytest.raises(HostsError, match="not up: use them inside `with Hosts"):
        launch(where_am_i, hosts=hosts)
    with pytest.raises(HostsError, match="not up"):
        hosts.counters()


@emulated
def test_a_killed_holder_is_reported_and_hosts_can_come_up_again():
    hosts = Hosts(1)
    with hosts:
        with pytest.raises(HostsError, match="up already"):
            hosts.__enter__()
        os.kill(hosts._holder.pid, signal.SIGKILL)
        hosts._holder.wait()
        with pytest.raises(HostsError, match="not up"):
            hosts.counters()
    with hosts:
        assert len(hosts.counters()) == 1


@emulated
def test_a_killed_caller_leaves_no_process_and_no_namespace(tmp_path):
    note = tmp_path / "note"
    os.mkfifo(note)
    code = (
        "from ddplab.hosts import Hosts\nfrom ddplab.launch import launch\n"
        "def hang(note):\n    import os, time\n"
        "    with open(note, 'a') as f: f.write(f'{os.getpid()}\\n')\n    time.sleep(1000)\n"
        "with Hosts(2) as hosts:\n    print(hosts._holder.pid, flush=True)\n"
        f"    launch(hang, {str(note)!r}, hosts=hosts, timeout=500)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    holder = int(process.stdout.readline())
    with open(os.open(note, os.O_RDWR), "rb", buffering=0) as fifo:  # our own writing end: no early end of file
        pids = [holder, *(int(fifo.readline()) for _ in range(2))]
    held = namespaces_of(holder)
    fds = [os.pidfd_open(pid) for pid in pids]
    process.kill()
    process.communicate()
    for fd in fds:
        assert select.select([fd], [], [], 10)[0], "a process outlived its caller"
        os.close(fd)
    assert not held & namespaces_in_use()
    assert list(tmp_path.iterdir()) == [note]


def drop_capabilities(keep: tuple[int, ...] = ()) -> None:
    """Turn root into a user without rights, who still may read the files of this test's Python."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(CAPABILITIES):
        if capability not in keep:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def run_without_rights(code: str, keep: tuple[int, ...] = ()) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    drop = (lambda: drop_capabilities(keep)) if os.geteuid() == 0 else None
    result = subprocess.run([sys.executable, "-c", code], env=env, preexec_fn=drop, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@emulated
def test_a_user_without_rights_gets_hosts_in_a_user_namespace_even_from_a_process_with_threads():
    code = """
import threading
from ddplab.hosts import Hosts, link_bytes
from ddplab.launch import launch

threading.Thread(target=threading.Event().wait, daemon=True).start()

def total():
    import torch, torch.distributed as dist
    t = torch.full((250_000,), float(dist.get_rank()))
    dist.all_reduce(t)
    dist.barrier()
    return t[0].item(), link_bytes().sent > 1_000_000

with Hosts(2) as hosts:
    print(launch(total, hosts=hosts), hosts.namespaces(0)[0] is not None, hosts.counters()[1].sent > 1_000_000)
"""
    if os.geteuid() != 0 and PROBLEM is None:
        keep = ()
    else:
        keep = (CAP_SETFCAP,)  # root needs it to map its own number 0; another user needs nothing
    assert run_without_rights(code, keep) == "[(1.0, True), (1.0, True)] True True\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to take away what Linux gives every user")
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_reason_is_told_where_namespaces_are_forbidden():
    out = run_without_rights("from ddplab.hosts import hosts_problem; print(hosts_problem())")
    assert out.startswith("hosts cannot be emulated here (user namespace: Operation not permitted): ")
    assert out.count("\n") == 1 and "run as root" in out


@pytest.mark.parametrize(
    ("step", "number", "remedy"),
    [
        ("user namespace", errno.ENOSPC, "`sudo sysctl user.max_user_namespaces=15000`"),
        ("network namespace", errno.EPERM, "run as root, and a container with `--privileged`"),
        ("sysctl", errno.EROFS, "a container with `--privileged`"),
        ("tbf", errno.ENOENT, "`sudo modprobe sch_tbf`"),
        ("bridge", errno.EOPNOTSUPP, "`sudo modprobe bridge`"),
        ("veth", errno.EOPNOTSUPP, "`sudo modprobe veth`"),
        ("address", errno.ENODEV, "`ddplab doctor`"),
    ],
)
def test_each_failure_has_a_remedy(monkeypatch, tmp_path, step, number, remedy):
    failure = {"step": step, "errno": number, "error": f"{step}: {os.strerror(number)}"}
    monkeypatch.setattr(hosts_module, "_APPARMOR", tmp_path / "none")
    text = hosts_module._explain(failure)
    assert text.startswith(f"hosts cannot be emulated here ({step}: ") and remedy in text
    (tmp_path / "one").write_text("1\n")
    monkeypatch.setattr(hosts_module, "_APPARMOR", tmp_path / "one")
    apparmor = "sysctl kernel.apparmor_restrict_unprivileged_userns=0" in hosts_module._explain(failure)
    assert apparmor == ("namespace" in step)


def test_other_systems_are_told(monkeypatch):
    monkeypatch.setattr(hosts_module, "_worked", False)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "platform", "darwin")
        for _ in range(2):  # nothing is remembered of a failure, for the reader may have mended what it named
            assert hosts_problem() == "hosts are emulated with Linux network namespaces; this is darwin"
    assert hosts_problem() == PROBLEM


def test_what_worked_once_is_not_tried_again(monkeypatch):
    made = []
    monkeypatch.setattr(hosts_module, "_worked", False)
    monkeypatch.setattr(Hosts, "__enter__", lambda hosts: made.append(hosts) or hosts)
    assert [hosts_problem(), hosts_problem()] == [None, None] and len(made) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "Hosts: n is a whole number from 1 to 64, not 0"),
        ({"n": "4"}, "Hosts: n is a whole number"),
        ({"n": 2, "ranks_per_host": 0}, "Hosts: ranks_per_host is a whole number"),
        ({"n": 2, "link": "fast"}, "'fast' is not a rate.*1gbit"),
        ({"n": 2, "link": "100 Gbit/s"}, "tbf shapes links up to 34 Gbit/s, not 100 Gbit/s"),
        ({"n": 2, "link": "8bit"}, "tbf shapes links from 80 kbit/s on, not 8 bit/s"),
    ],
)
def test_senseless_hosts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Hosts(**arguments)


def test_a_link_object_and_other_spellings_of_its_rate_are_accepted():
    rates = [Hosts(2, link=link).link.rate_Bps for link in ("1gbit", "1 gbps", Link(125e6))]
    assert rates == [125e6] * 3


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_hosts_that_the_ranks_do_not_fill_are_refused(ranks):
    hosts = Hosts(2, ranks_per_host=2)
    with pytest.raises(ValueError, match=f"{ranks} ranks do not fill 2 hosts of 2: use ranks=4"):
        launch(where_am_i, ranks=ranks, hosts=hosts)


def test_hosts_do_not_travel_to_the_ranks():
    hosts = Hosts(2)
    with pytest.raises(TypeError, match=r"the variable 'hosts' that it uses .*launch\(\.\.\., hosts=hosts\)"):
        launch(lambda: hosts.ranks, ranks=1)


@emulated
def test_a_program_of_ones_own_runs_on_a_host(four):
    """Its own device and address, the kernel's namespace of that host, and what it prints; ranks are not involved."""
    code = (
        "import os, socket; s = socket.create_server(('10.98.0.12', 0)); "
        "print(os.readlink('/proc/self/ns/net'), sorted(n for _, n in socket.if_nameindex()))"
    )
    seen = {}
    for host in (2, 3):
        program = four.popen(
            host, [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        seen[host] = (*program.communicate(timeout=60), program.returncode)
    out, err, code = seen[2]
    assert code == 0 and "'e0'" in out, err
    assert out.split()[0] != os.readlink("/proc/self/ns/net")
    assert seen[3][2] != 0 and "Cannot assign requested address" in seen[3][1], "the address is another host's"
    with pytest.raises(ValueError, match="host is from 0 to 3, not 4"):
        four.popen(4, ["true"])


@emulated
def test_a_program_that_does_not_exist_says_so(four):
    program = four.popen(0, ["no-such-program-anywhere"], stderr=subprocess.PIPE, text=True)
    assert "FileNotFoundError" in program.communicate(timeout=60)[1] and program.returncode == 1
