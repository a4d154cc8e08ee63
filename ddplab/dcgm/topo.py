"""Reading `nvidia-smi topo -m`: who is joined to whom and how, and whether each GPU has a NIC and a CPU close by."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddplab.dcgm.errors import gpu_failure

if TYPE_CHECKING:
    import pandas as pd

# Nearest first. What a byte crosses on its way, from nvidia-smi's own legend.
CELLS = {
    "NV": "NVLink",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, not the CPU",
    "PHB": "a PCIe host bridge: the CPU",
    "NODE": "PCIe host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
_CELL = r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS"
_DEVICE = re.compile(r"(?:GPU|NIC|DLA)\d{1,4}|mlx\d_\d{1,3}(?:_bond_\d+)?|mlx5_bond_\d{1,3}")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_RANGE = re.compile(r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*")


@dataclass(frozen=True)
class GpuTopology:
    """What `nvidia-smi topo -m` says.

    cells: (row, column) -> "NV18", "PIX", ..., without the diagonal.  devices: GPU0, NIC0, ... in order.  cpus, numa,
    gpu_numa_id: GPU -> text as printed, "0-31", "0" or "0-1"; None for N/A.  nics: NIC0 -> mlx5_0.
    """

    devices: tuple[str, ...]
    cells: dict[tuple[str, str], str]
    cpus: dict[str, str | None] = field(default_factory=dict)
    numa: dict[str, str | None] = field(default_factory=dict)
    gpu_numa_id: dict[str, str | None] = field(default_factory=dict)
    nics: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs among the devices."""
        return tuple(name for name in self.devices if name.startswith("GPU"))

    @property
    def links(self) -> dict[tuple[str, str], str]:
        """(GPU, GPU) -> cell, each pair once; empty for a single GPU."""
        pairs = ((a, b) for i, a in enumerate(self.gpus) for b in self.gpus[i + 1 :])
        return {pair: self.cells[pair] for pair in pairs if pair in self.cells}

    def matrix(self) -> pd.DataFrame:
        """The matrix as a table, "X" on the diagonal."""
        import pandas as pd

        names = list(self.devices)
        return pd.DataFrame([[self.cells.get((a, b), "X") for b in names] for a in names], names, names)

    def affinity(self) -> pd.DataFrame:
        """One row a GPU: gpu, peers (its links to other GPUs), nic (the nearest), path, cpus, numa, advice."""
        import pandas as pd

        return pd.DataFrame([self._row(gpu) for gpu in self.gpus])

    def _row(self, gpu: str) -> dict:
        others = [self.cells[gpu, other] for other in self.gpus if (gpu, other) in self.cells]
        near = sorted(
            (rank(self.cells[gpu, nic]), nic)
            for nic in self.devices
            if not nic.startswith(("GPU", "DLA")) and (gpu, nic) in self.cells
        )
        nic = near[0][1] if near else None
        path = self.cells[gpu, nic] if nic else None
        advice = []
        if others and not all(cell.startswith("NV") for cell in others):
            far = max((cell for cell in others if not cell.startswith("NV")), key=rank)
            advice.append(f"some peers over {far} ({CELLS[far]}), not NVLink: NCCL will be as slow as that path")
        if path == "SYS":
            advice.append("its nearest NIC is in another NUMA node: move a NIC, or keep this GPU off other machines")
        elif path in ("PHB", "NODE"):
            advice.append("its nearest NIC is behind the CPU: GPUDirect RDMA is slow or off there")
        cpus = self.cpus.get(gpu)
        if cpus:
            advice.append(f"bind its process to cores {cpus}")
        return {
            "gpu": gpu,
            "peers": ", ".join(sorted(set(others), key=rank)) or None,
            "nic": self.nics.get(nic, nic) if nic else None,
            "path": path,
            "cpus": cpus,
            "numa": self.numa.get(gpu),
            "advice": "; ".join(advice) or "nothing to change",
        }


def rank(cell: str) -> int:
    """How far a cell is: 0 for NVLink, 5 for SYS."""
    return list(CELLS).index("NV" if cell.startswith("NV") else cell)


def parse_topo(text: str) -> GpuTopology:
    """The output of `nvidia-smi topo -m`: with or without its escape codes, with tabs or pasted with blanks.

    Raises GpuUnavailable for nvidia-smi's own failures and ValueError, with the line, for other text (the matrix of
    `topo -p2p` is another one).
    """
    if not isinstance(text, str):
        raise ValueError(f"parse_topo reads text, not {type(text).__name__}")
    lines = [_ESCAPE.sub("", line) for line in text.removeprefix("\ufeff").splitlines()]
    start = next((i for i, line in enumerate(lines) if _heading(line)), None)
    if start is None:
        if failure := gpu_failure(text):
            raise failure
        raise ValueError("no heading of `nvidia-smi topo -m` (GPU0 GPU1 ... CPU Affinity) in this text")
    names = _heading(lines[start])
    if len(set(names)) < len(names):
        raise ValueError(f"line {start + 1}: the heading names a device twice")
    titles = [title for title in _AFFINITY if title in " ".join(lines[start].split())]
    cells: dict[tuple[str, str], str] = {}
    facts: dict[str, dict[str, str | None]] = {}
    rows = []
    for number, line in enumerate(lines[start + 1 :], start + 2):
        word = line.split()[0] if line.split() else ""
        if not word or word == "Legend:":
            if rows:
                break
            continue
        if word not in names:
            raise ValueError(f"line {number} begins with {word[:40]!r}, which the heading does not name")
        if word in rows:
            raise ValueError(f"line {number}: a second row for {word}")
        found, rest = _cells(line.replace(word, "", 1), len(names), number)
        rows.append(word)
        cells |= {(word, other): cell for other, cell in zip(names, found, strict=True) if cell != "X"}
        facts[word] = dict(zip(titles, _affinity(rest), strict=False))
        if found[names.index(word)] != "X":
            raise ValueError(f"line {number}: {word} to itself is not X: columns are missing")
    if rows != names:
        raise ValueError(f"the matrix has {len(rows)} rows for {len(names)} devices: the text is cut off")
    gpus = [name for name in names if name.startswith("GPU")]
    by_title = [{gpu: facts[gpu].get(title) for gpu in gpus} for title in _AFFINITY]
    nics = {m[1]: m[2] for line in lines if (m := re.fullmatch(r"\s*(NIC\d{1,4}):\s+(\S{1,80})\s*", line))}
    return GpuTopology(tuple(names), cells, *by_title, nics)


def is_topo(text: str) -> bool:
    """Does this text hold the heading of `nvidia-smi topo -m`?"""
    return any(_heading(_ESCAPE.sub("", line)) for line in text.splitlines())


def _heading(line: str) -> list[str]:
    """Device names of the heading line, or nothing where it is another line."""
    words = line.partition("CPU Affinity")[0].split()
    return words if words and words[0].startswith("GPU") and all(map(_DEVICE.fullmatch, words)) else []


def _cells(text: str, count: int, number: int) -> tuple[list[str], str]:
    """The first `count` cells of a row, and what follows them. Wide matrices can lack the blank between two cells."""
    found, at = [], 0
    pattern = re.compile(rf"\s*({_CELL})(?=\s|$|{_CELL})")
    while len(found) < count:
        match = pattern.match(text, at)
        if not match:
            p2p = re.match(r"\s*(OK|CNS|GNS|TNS|NS|DR|U)\b", text[at:])
            why = "this is the matrix of topo -p2p; run topo -m" if p2p else f"{text[at:].strip()[:20]!r} is no path"
            raise ValueError(f"line {number}: cell {len(found) + 1} of {count}: {why}")
        found.append(match[1])
        at = match.end()
    return found, text[at:]


def _affinity(rest: str) -> list[str | None]:
    """CPU Affinity, NUMA Affinity, GPU NUMA ID: a gap may be one tab, two, or blanks, so only words count."""
    return [word if _RANGE.fullmatch(word) else None for word in rest.split()]
