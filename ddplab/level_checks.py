"""Checks of exercises on two levels of groups: whose numbers arrived, how often divided, and what crossed the link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddplab._arguments import instance
from ddplab.checks import CheckError
from ddplab.transfers import count, number

_TOLERANCE = 1e-3
_BLANK = "not written: "


def check_two_level(fn: Callable, hosts: int = 2, ranks_per_host: int = 2, timeout: float = 30.0) -> None:
    """Check `fn(tensor, intra, inter)`: an all-reduce on two levels that leaves the *mean* over all ranks in `tensor`.

    `intra` is the group of the caller's host, `inter` that of the ranks of the same place on the other hosts. Runs it
    on real ranks with lengths that they divide and that they do not. Then, where hosts can be emulated, counts what
    leaves each: 2 (hosts - 1) / hosts of the tensor is enough. CheckError says which rank and element is wrong, and
    whose contribution is missing; RankError what the launch could not run.
    """
    from ddplab.hosts import Hosts, hosts_problem
    from ddplab.launch import RankError, launch

    instance(fn, Callable, "check_two_level takes a function of a tensor and two groups")
    hosts = count(hosts, "hosts", error=ValueError)
    ranks_per_host = count(ranks_per_host, "ranks_per_host", error=ValueError)
    number(timeout, "timeout, in seconds,", above=True)
    n = hosts * ranks_per_host
    try:
        reports = launch(_values, fn, hosts, ranks_per_host, ranks=n, timeout=timeout, device="cpu", show=False)
    except RankError as error:
        if error.rank is not None and "no answer within" not in str(error):
            raise
        name, who = getattr(fn, "__name__", "the function"), f" on rank {error.rank}" * (error.rank is not None)
        raise CheckError(
            f"{name} did not come back{who} within {timeout:g} s: does every rank of a group make the same calls?"
        ) from None
    for rank, report in enumerate(reports):
        if report and report.startswith(_BLANK):
            raise CheckError(report.removeprefix(_BLANK))
        if report:
            raise CheckError(f"rank {rank}, {report}")
    print(f"The mean over all {n} ranks, on each of them, for every length.")
    if problem := hosts_problem():
        print(f"What crosses was not counted: {problem}")
        return
    nbytes = 400_000 * ranks_per_host
    with Hosts(hosts, link="1gbit", ranks_per_host=ranks_per_host) as emulated:
        sent = launch(_leaving, fn, hosts, ranks_per_host, nbytes, hosts=emulated, timeout=timeout, show=False)
    most, enough = max(sent) / nbytes, 2 * (hosts - 1) / hosts
    if most > 1.1 * enough:
        raise CheckError(
            f"{most:.2f} S leaves a host, and {enough:.2f} S is enough: add up inside first, then send each block "
            "across once, by one rank."
        )
    print(f"{most:.2f} S leaves each host (counted by the kernel); a flat ring sends {2 * (n - 1) / n:.2f} S.")


def _groups(hosts: int, ranks_per_host: int) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (hosts, ranks_per_host), mesh_dim_names=("inter", "intra"))
    return mesh.get_group("intra"), mesh.get_group("inter")


def _values(fn: Callable, hosts: int, ranks_per_host: int) -> str | None:
    """In a rank: what is wrong with the result, if anything. Rank r brings 2**r, times the element's place from 1."""
    import torch
    import torch.distributed as dist

    from ddplab.answers import where

    rank, n = dist.get_rank(), dist.get_world_size()
    intra, inter = _groups(hosts, ranks_per_host)
    problem = None
    for size in (3 * n, 3 * n + 1, 1):
        place = torch.arange(1.0, size + 1)
        tensor = place * 2**rank
        try:
            fn(tensor, intra, inter)
        except NotImplementedError as error:
            return _BLANK + str(error)
        except Exception as error:
            return f"{size} elements: {where(error, fn)}"
        found = (tensor.double() / place.double() * n).tolist()
        for i, value in enumerate(found):
            if problem is None and abs(value - (2**n - 1)) > _TOLERANCE:
                problem = f"element {i} of {size}: {_what(value, rank, n, ranks_per_host)}"
    return problem


def _what(value: float, rank: int, n: int, ranks_per_host: int) -> str:
    """In words, from n times a result, in units of the element's place."""
    full = 2**n - 1
    if abs(value - 2**rank * n) < _TOLERANCE:
        return "holds what the rank began with. Write the result into the tensor itself, with tensor.copy_(...)."
    if abs(value - full * n) < _TOLERANCE:
        return "holds the sum. DDP wants the mean: divide once, by the number of all ranks."
    for divisor, what in ((n, "twice by all ranks"), (ranks_per_host, "inside and again at the end")):
        if divisor > 1 and abs(value - full / divisor) < _TOLERANCE:
            return f"was divided {what}. Sum on both levels and divide once."
    for factor, kind in ((1.0, "mean"), (1.0 / n, "sum")):  # whose numbers are in it, if it is a mean, or a sum
        members = round(value * factor)
        if abs(value * factor - members) < _TOLERANCE and 0 < members < full:
            missing = [r for r in range(n) if not members >> r & 1]
            names = " and ".join(map(str, missing))
            return f"the {kind} lacks rank{'s' * (len(missing) > 1)} {names}: each block needs everybody's numbers."
    return f"{value / n:g} times its place is no sum of these ranks' numbers: a block out of place, or added twice?"


def _leaving(fn: Callable, hosts: int, ranks_per_host: int, nbytes: int) -> int:
    """In a rank on a host: bytes that the kernel counted on the host's link during one call."""
    import torch
    import torch.distributed as dist

    from ddplab.hosts import link_bytes

    intra, inter = _groups(hosts, ranks_per_host)
    tensor = torch.ones(nbytes // 4)
    fn(tensor, intra, inter)  # connections
    dist.barrier()
    before = link_bytes().sent
    dist.barrier()
    fn(tensor, intra, inter)
    dist.barrier()
    return link_bytes().sent - before
