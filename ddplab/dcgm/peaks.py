"""The peak of a link: which generation, how many lanes or links, and in which direction.

Every peak here is that of ONE direction. Data sheets like to add both: 600 GB/s for an A100 is 300 out and 300 in, and
a counter called TX sees only one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# NVLink generation -> (GB/s of one link, one direction; links of a GPU; its GPUs). Data rate, as in data sheets: the
# line rate that nvidia-smi prints is higher (26.562 for a link of 25 GB/s), since it counts the coding.
NVLINK = {
    1: (20.0, 4, "P100"),
    2: (25.0, 6, "V100"),
    3: (25.0, 12, "A100"),
    4: (25.0, 18, "H100, H200, GH200"),
    5: (50.0, 18, "B200, GB200"),
}
# PCIe generation -> (GT/s of a lane, coding): payload of the coding, packet headers still in it.
PCIE = {
    1: (2.5, 8 / 10),
    2: (5.0, 8 / 10),
    3: (8.0, 128 / 130),
    4: (16.0, 128 / 130),
    5: (32.0, 128 / 130),
    6: (64.0, 242 / 256),
}
# What a GPU's name says. Export variants have fewer or slower links and boards with bridges other counts: not listed.
_MODELS = (
    (r"\bP100-SXM", 1),
    (r"\bV100-SXM", 2),
    (r"\bA100-SXM", 3),
    (r"\bH100 80GB HBM3\b|\bH200\b(?! NVL)|\bGH200\b", 4),
    (r"\bG?B200\b", 5),
)
_NVLINK = re.compile(r"nvlink[ -]?v?([0-9]+)(?:\s*x\s*([0-9]{1,3}))?", re.IGNORECASE)
_PCIE = re.compile(r"pcie?(?:[ -]?gen)?[ -]?([0-9]+)(?:\.0)?(?:\s*x\s*([0-9]{1,3}))?", re.IGNORECASE)


@dataclass(frozen=True)
class LinkPeak:
    """The most that a link carries in one direction.

    GBps: 1e9 bytes a second, one direction.  name: what it is, in words.  basis: "specified", "reported" (a driver said
    so) or "given" (you did).  link: what it is the peak of, "NVLink", "PCIe" or, for any, empty.  count: how many links
    share it.
    """

    GBps: float
    name: str
    basis: str
    link: str = ""
    count: int = 1

    def of(self, link: str) -> float | None:
        """GB/s for rows of this link: "NVLink" is a GPU's all together, "NVLink 3" one of them; else None."""
        kind, _, number = link.partition(" ")
        if self.link not in ("", kind):
            return None
        return self.GBps / self.count if number and self.link else self.GBps

    def __str__(self) -> str:
        return f"{self.GBps:.4g} GB/s in one direction ({self.name}, {self.basis})"


def link_peak(link: object) -> LinkPeak:
    """The peak of one direction: "nvlink4" (all links of its GPU), "nvlink3 x8", "pcie5", "pcie4 x8", a GPU's full name
    as nvidia-smi prints it, a rate such as "25gbit" or "300GB/s", a `ddplab.Link`, or a number of GB/s.

    PCIe without a width is x16. ValueError, with what is known, for anything else.
    """
    if isinstance(link, LinkPeak):
        return link
    if isinstance(link, (int, float)) and not isinstance(link, bool):
        if not 0 < link < 1e6:
            raise ValueError(f"a peak is a positive number of GB/s, not {link!r}")
        return LinkPeak(float(link), f"{link:g} GB/s", "given")
    if isinstance(link, str):
        text = " ".join(link.split())
        if (match := _NVLINK.fullmatch(text)) and (peak := _nvlink(int(match[1][:9]), match[2])):
            return peak
        if (match := _PCIE.fullmatch(text)) and (peak := _pcie(int(match[1][:9]), match[2])):
            return peak
        for pattern, generation in _MODELS:
            if re.search(pattern, text):
                return _nvlink(generation, None)
    from ddplab.link import Link

    try:
        known = Link.parse(link)
    except ValueError as error:
        raise ValueError(
            f"{link!r} is no link that has a peak here: nvlink1 to nvlink{max(NVLINK)}, pcie1 to pcie{max(PCIE)} (x1 "
            'to x16), or a rate such as "25gbit" or "300GB/s"'
        ) from error
    return LinkPeak(known.rate_Bps / 1e9, str(known), "given")


def _nvlink(generation: int, count: str | None) -> LinkPeak | None:
    if generation not in NVLINK or count == "0":
        return None
    each, most, gpus = NVLINK[generation]
    links = int(count or most)
    if links > most:
        raise ValueError(f"a GPU with NVLink {generation} has up to {most} links, not {links}")
    name = f"NVLink {generation}, {links} links of {each:g} GB/s, {gpus}"
    return LinkPeak(each * links, name, "specified", "NVLink", links)


def _pcie(generation: int, width: str | None) -> LinkPeak | None:
    lanes = int(width or 16)
    if generation not in PCIE or lanes not in (1, 2, 4, 8, 16):
        return None
    rate, coding = PCIE[generation]
    return LinkPeak(rate * coding / 8 * lanes, f"PCIe {generation} x{lanes}", "specified", "PCIe")
