"""2,000 mangled texts of each format: a table or one of our own errors, no traceback from inside, no hang."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable

import pytest
from conftest import ROOT
from damage import for_seeds

import ddplab as dl
from ddplab.dcgm.dmon import read_dmon
from ddplab.dcgm.replay import recognise
from ddplab.dcgm.smi import read_links

DATA = ROOT / "tests/data/dcgm"
PIECES = [
    "  ",
    " ",
    "\t",
    "\n",
    "\r",
    "N/A",
    "-",
    "#",
    "#Entity ",
    "GPU 0",
    "9" * 400,
    "1e999",
    "nan",
    "\x1b[4m",
    "\x00",
]
PIECES += ["X", "é", "\ufeff", "Link 0: ", "Error", "Result: -33: ", "Legend:", "٣", "0-1", ": ", "KiB", "NV"]


def mangled(text: str, draw: random.Random) -> str:
    """`text` after one to five edits: cut out, written over, lines doubled or swapped, or torn off."""
    for _ in range(draw.randint(1, 5)):
        at, length, piece = draw.randrange(len(text) + 1), draw.randint(1, 60), draw.choice(PIECES)
        what, lines = draw.choice(["cut", "put", "put", "double", "swap", "end"]), text.splitlines(keepends=True)
        if what == "cut":
            text = text[:at] + text[at + length :]
        elif what == "put":
            text = text[:at] + piece + text[at + len(piece) * (length % 2) :]
        elif what == "end":
            text = text[:at]
        elif lines:
            i, j = at % len(lines), length % len(lines)
            if what == "double":
                lines.insert(i, lines[j])
            else:
                lines[i], lines[j] = lines[j], lines[i]
            text = "".join(lines)
    return text


def survives(read: Callable[[str], object], text: str) -> None:
    """`read` gives a table or raises on purpose: the innermost line is a `raise` of the package's."""
    try:
        read(text)
    except (dl.DcgmError, dl.GpuUnavailable, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        assert "/ddplab/" in last.filename and last.line.startswith("raise"), (
            f"{last.filename}:{last.lineno}: {error!r}"
        )
        assert len(str(error)) < 1000


def rates_since(text: str) -> object:
    return dl.nvlink_rates((DATA / "nvlink_gt_d_t0.txt").read_text(), text, 1.0)


NEW = ["dmon_3.3.txt", "dmon_header_only_error.txt", "dmon_4.4_blank.txt", "dmon_4.6.txt", "dmon_4.6_link.txt"]
FORMATS = {  # the texts, a reader without pandas, the whole way
    "dmon to 2.3": (["dmon_2.3.txt", "dmon_2.x_error.txt"], read_dmon, [dl.parse_dmon]),
    "dmon from 2.4": (NEW, read_dmon, [dl.parse_dmon, lambda text: dl.link_rates(dl.parse_dmon(text, 1.0))]),
    "nvlink": (["nvlink_s.txt", "nvlink_gt_d_t1.txt"], read_links, [dl.parse_nvlink, rates_since]),
    "topo": (["topo_m_ansi.txt", "nvidia_smi_fail.txt"], dl.parse_topo, [lambda text: dl.parse_topo(text).affinity()]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_mangled_text_gives_a_table_or_our_own_error(name):
    files, read, tables = FORMATS[name]
    originals = [(DATA / file).read_bytes().decode() for file in files]

    def check(seed):
        draw = random.Random(seed)
        text = mangled(draw.choice(originals), draw)
        survives(read, text)
        survives(recognise, text)
        if not draw.randrange(20):  # pandas takes most of the time
            for table in tables:
                survives(table, text)
        return text

    for_seeds(check)


@pytest.mark.parametrize(
    "text", [" " * 200_000 + "\n", "A" * 200_000, "x\n" * 20_000, "\n" * 20_000, "Result " * 20_000]
)
def test_endless_lines_and_texts_are_refused_at_once(text):
    for read in (read_dmon, read_links, dl.parse_topo, recognise):  # a backtracking pattern would take hours
        with pytest.raises(ValueError):
            read(text)
