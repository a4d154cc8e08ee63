"""Which ranks share a host, and the two groups in which a rank talks: inside its host, and across hosts."""

from __future__ import annotations

import hashlib
import operator
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddplab._arguments import shown
from ddplab.hooks.wire import among, connected, give_back, member_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LEVELS = ("inter", "intra")


class Hierarchy:
    """Ranks by host. Making one makes its process groups, so every rank of `group` does it, with the same `hosts`.

    hosts: lists of ranks, one a host, such as [[0, 1], [2, 3, 4]]; hosts may differ in size. Or a mesh with the
        dimensions "inter" and "intra": its layout is taken, its groups are not. None asks the ranks where they run:
        emulated host, torchrun's node, or host name.
    group: the ranks to arrange, all by default. `hosts` speaks of global ranks.

    Attributes:
        hosts: tuple of tuples of global ranks.  ranks: how many there are.
        intra: the group of this rank's host; `local` is this rank's place in it, `size` how many it has.
        rails: ranks of the smallest host. The first `rails` ranks of each host own a block of what they add up.
        inter: the group of the ranks of the same place in their hosts, this one among them; None from place `rails` on.

    Raises ValueError, on every rank, where hosts leave out or repeat a rank or where the ranks were given different
    hosts; TypeError for hosts that are no lists of ranks; RuntimeError without `torch.distributed` or outside `group`.
    """

    def __init__(
        self, hosts: Sequence[Sequence[int]] | DeviceMesh | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "Hierarchy makes process groups: use it in a function given to ddplab.launch, or under torchrun."
            )
        group = member_of(group, "Hierarchy")
        everyone = dist.get_process_group_ranks(group)
        given = _table(hosts) if hasattr(hosts, "mesh_dim_names") else hosts
        if given is not None:
            given = _lists(given)
        said: list[Any] = [None] * len(everyone)
        dist.all_gather_object(said, where_am_i() if given is None else given, group=group)
        if given is None and not any(isinstance(where, list) for where in said):
            places = dict.fromkeys(said)
            given = [[r for r, where in zip(everyone, said, strict=True) if where == place] for place in places]
        elif any(where != said[0] for where in said):
            listed = "; ".join(f"rank {r}: {where}" for r, where in zip(everyone, said, strict=True))
            raise ValueError(f"The ranks were given different hosts: {listed}.")
        self._arrange(given, everyone)
        self.everyone = group
        rails = [[host[place] for host in self.hosts] for place in range(self.rails)]
        self.intra, self.inter = _groups(self.hosts, group), _groups(rails, group)
        self._made = [self.intra, self.inter]

    def _arrange(self, hosts: Sequence[Sequence[int]], everyone: Sequence[int]) -> None:
        self.hosts = tuple(tuple(sorted(host)) for host in hosts)  # torch sorts the ranks of a group
        listed = [rank for host in self.hosts for rank in host]
        if not self.hosts or not all(self.hosts) or sorted(listed) != sorted(everyone):
            raise ValueError(
                f"hosts must name each of the ranks {sorted(everyone)} once, and no host without ranks, "
                f"not {self.hosts}."
            )
        self.ranks, self.rails = len(listed), min(map(len, self.hosts))
        mine = next(host for host in self.hosts if dist.get_rank() in host)
        self.local, self.size = mine.index(dist.get_rank()), len(mine)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Hierarchy:
        """The hierarchy of a mesh with the dimensions "inter" and "intra", on the mesh's own groups: makes none."""
        table, made = _table(mesh), cls.__new__(cls)
        if any(host != sorted(host) for host in table):
            raise ValueError(
                f"The ranks of a host must ascend in a mesh, not {table}: torch's groups sort them. "
                "ddplab.Hierarchy(mesh) makes groups of its own and takes any order."
            )
        made._arrange(table, [rank for host in table for rank in host])
        made.intra, made.inter = mesh.get_group("intra"), mesh.get_group("inter")
        made.everyone = dist.group.WORLD if made.ranks == dist.get_world_size() else None
        made._made = []
        return made

    def close(self) -> None:
        """Give back the groups that were made here, not those of a mesh or of others. Every rank calls it, when all are
        through; a second call does nothing. An all-reduce afterwards is a RuntimeError."""
        for group in self._made:
            give_back(group)
        self.intra = self.inter = None
        self._made = []

    def require_open(self) -> None:
        """RuntimeError after `close()`."""
        if self.intra is None:
            raise RuntimeError("this Hierarchy is closed: make a new one")

    def require_agreement(self, tensor: torch.Tensor, op: str, device: torch.device | str) -> None:
        """ValueError on every rank unless all are about to reduce the same shape and dtype over the same hosts."""
        from ddplab.execute import require_same

        if self.everyone is None:
            raise ValueError(
                "This mesh covers only some of the job's ranks and has no group of all of them to check in: pass "
                "check=False, or ddplab.Hierarchy(mesh, group) with a group of them."
            )
        self.require_open()
        hosts = hashlib.blake2b(repr(self.hosts).encode(), digest_size=4).hexdigest()
        require_same(tensor, op, f"hosts {[len(host) for host in self.hosts]} {hosts}", self.everyone, device)


def where_am_i() -> str:
    """A name of the host on which this rank runs."""
    return os.environ.get("DDPLAB_HOST") or os.environ.get("GROUP_RANK") or socket.gethostname()


def _lists(hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        listed = [list(host) for host in hosts]
        if any(isinstance(rank, bool) for host in listed for rank in host):
            raise TypeError
        return [[operator.index(rank) for rank in host] for host in listed]
    except TypeError:
        what = "hosts are lists of ranks, one a host, such as [[0, 1], [2, 3]]"
        raise TypeError(f"{what}, not {shown(hosts)}.") from None


def _table(mesh: DeviceMesh) -> list[list[int]]:
    names = getattr(mesh, "mesh_dim_names", None)
    if tuple(names or ()) != LEVELS:
        raise ValueError(
            f"A hierarchy needs a mesh with the dimensions {LEVELS}, not {names if names else shown(mesh)}: "
            'init_device_mesh("cpu", (hosts, ranks_per_host), mesh_dim_names=("inter", "intra")).'
        )
    return mesh.mesh.tolist()


def _groups(table: Sequence[Sequence[int]], parent: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A new group for each row of ranks; the one that this rank is in, None if it is in no row."""
    whole, backend, mine = dist.get_world_size(parent) == dist.get_world_size(), dist.get_backend_config(parent), None
    for ranks in map(list, table):
        inside = dist.get_rank() in ranks
        if whole:  # all ranks make all groups, as torch wants it
            made = dist.new_group(ranks, backend=backend)
        elif inside:  # the others may know nothing of this hierarchy
            made = among(ranks, backend)
        mine = connected(made, backend) if inside else mine
    return mine
