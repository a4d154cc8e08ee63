"""The texts of dcgmi and nvidia-smi: every layout gives the stated table, every refusal its advice."""

from __future__ import annotations

import csv
import math
import pickle

import pytest
from conftest import ROOT

import ddplab as dl
from ddplab.dcgm.dmon import DmonReader
from ddplab.dcgm.errors import error_from
from ddplab.dcgm.replay import recognise

DATA = ROOT / "tests/data/dcgm"
SAME = ("dmon_2.3.txt", "dmon_3.3.txt", "dmon_4.6.txt")  # one run in three layouts


def text(name: str) -> str:
    return (DATA / name).read_bytes().decode()


def column(frame, name: str, entity: str = "GPU", id: int = 0) -> list:
    part = frame[(frame.entity == entity) & (frame.id == id)]
    return [None if isinstance(v, float) and math.isnan(v) else v for v in part[name]]


# ---------------------------------------------------------------- fields


def test_the_field_table_is_that_of_dcgm():
    with open(DATA / "fields_4.6.0.tsv", encoding="utf8") as file:
        stated = list(csv.DictReader(file, delimiter="\t"))
    assert len(stated) == 39
    for row in stated:
        field = dl.dcgm_field(int(row["id"]))
        assert (field.short, field.name) == (row["short"], row["name"])
        assert dl.dcgm_field(field.short) is dl.dcgm_field(str(field.id)) is field
        if row["unit"]:  # what DCGM prints; most columns have none, and the table has to know
            assert field.unit == row["unit"]
    table = dl.dcgm_fields()
    assert set(table.kind) == {"gauge", "rate", "counter"} and table.id.is_unique and table.short.is_unique
    assert {int(row["id"]) for row in stated} | set(range(1040, 1076)) == set(table.id)


def test_203_and_204_are_utilisations_and_1011_is_a_rate():
    assert list(dl.dcgm_fields(203, 204).unit) == ["percent", "percent"]
    assert not dl.dcgm_fields(203, "MCUTL").link.any()
    nvlink = dl.dcgm_field(1011)
    assert (nvlink.unit, nvlink.kind, nvlink.link, nvlink.way, nvlink.profiling) == (
        "B/s",
        "rate",
        "NVLink",
        "tx",
        True,
    )
    assert dl.dcgm_field(1091).kind == "counter" and dl.dcgm_field(1002).si == 1 and dl.dcgm_field(203).si == 0.01
    assert dl.dcgm_field("NVL17R").id == 1075 and dl.dcgm_field(9) is None and dl.dcgm_field("7" * 99) is None
    with pytest.raises(KeyError, match="no field 'NVLXX'"):
        dl.dcgm_fields("NVLXX")


# ---------------------------------------------------------------- dmon


@pytest.mark.parametrize("name", SAME)
def test_three_layouts_hold_the_same_run(name):
    frame = dl.parse_dmon(text(name))
    assert len(frame) == 4 and list(frame["sample"]) == [0, 0, 1, 1] and list(frame.id) == [1, 0, 1, 0]
    assert column(frame, "NVLTX") == [None, 186203998123.0]
    assert column(frame, "SMACT", id=1) == [None, 0.871] and column(frame, "POWER") == [655.12, 659.774]
    assert frame.NVLTX.mean() / 1e9 == pytest.approx(186.204, abs=1e-3)  # not 93.1: N/A is not 0
    assert frame.equals(dl.parse_dmon(text(SAME[0]))) and frame.attrs["units"]["POWER"] == "W"


def test_a_blank_cell_moves_nothing():
    frame = dl.parse_dmon(text("dmon_4.4_blank.txt"))
    assert [column(frame, n, id=1) for n in ("GPUTL", "SMACT", "TMPTR")] == [[98.0], [None], [60.0]]
    assert frame.attrs["units"] == {"GPUTL": "", "SMACT": "", "TMPTR": "C"}
    stripped = "\n".join(line.rstrip() for line in text("dmon_4.4_blank.txt").splitlines()) + "\n"
    assert dl.parse_dmon(stripped).equals(frame)  # editors take trailing blanks away


def test_link_entities_and_repeated_headings():
    links = dl.parse_dmon(text("dmon_4.6_link.txt"))
    assert list(zip(links.entity, links.id, strict=True)) == [("GPU 0 LINK", 0), ("GPU 0 LINK", 11), ("SW 1 LINK", 2)]
    rates = dl.link_rates(links)
    assert list(rates.device) == ["GPU 0", "GPU 0", "SW 1"] and list(rates.link) == [
        "NVLink 0",
        "NVLink 11",
        "NVLink 2",
    ]
    long = dl.parse_dmon(text("dmon_repeat_header.txt"), interval_s=0.5)
    assert len(long) == 17 and list(long["sample"]) == list(range(17)) and long.time_s.iloc[-1] == 8.0


def test_rates_are_no_counters_and_ratios_no_percents():
    head = "#Entity         SMACT        PCITX                       NVLTX                       TXTPT          \n"
    units = "ID                                                                                   KB/s           \n"
    row = "GPU 0           {:<13}{:<28}{:<28}{:<15}\n"
    frame = dl.parse_dmon(
        head
        + units
        + row.format("0.904", 1240331, 186204331870, 1240)
        + row.format("0.904", 1240331, 186204400102, 1240),
        interval_s=1.0,
    )
    rates = dl.link_rates(frame.drop(columns="TXTPT"))
    nvlink = rates[rates.link == "NVLink"].tx_GBps
    assert nvlink.mean() == pytest.approx(186.204366) and nvlink.mean() > 100  # not the difference, 0.00007
    assert rates[rates.link == "PCIe"].tx_GBps.mean() == pytest.approx(0.00124, rel=1e-3)
    assert dl.link_rates(frame.drop(columns="PCITX")).query("link == 'PCIe'").tx_GBps.mean() == pytest.approx(0.00124)
    assert 100 * frame.SMACT.mean() * dl.dcgm_field("SMACT").si == pytest.approx(90.4)


def test_a_real_counter_becomes_a_rate_and_a_reset_is_an_error():
    lines = "#Entity         PCICTX                      \nID                                          \n"
    lines += "".join(f"GPU 0           {v:<28}\n" for v in (1000, 2_000_001_000, 5_000_001_000))
    with pytest.raises(ValueError, match="needs interval_s"):
        dl.link_rates(dl.parse_dmon(lines))
    rates = dl.link_rates(dl.parse_dmon(lines, interval_s=0.5))
    assert list(rates.tx_GBps.dropna()) == [4.0, 6.0]
    with pytest.raises(ValueError, match="counter reset"):
        dl.link_rates(dl.parse_dmon(lines + "GPU 0           7\n", interval_s=0.5))


def test_warnings_tell_what_the_numbers_do_not():
    head = "#Entity         GPUTL             NVLTX                       \nID\n"
    silent = dl.parse_dmon(head + f"GPU 3           {100:<18}{0:<28}\n" * 3)
    assert "GPU 3: NVLTX is 0 in all samples while GPUTL reaches 100" in silent.attrs["warnings"][0]
    mig = dl.parse_dmon(head + f"GPU-I 0         {100:<18}N/A\n" * 2)
    assert "by design for a MIG instance" in mig.attrs["warnings"][0]
    article = dl.parse_dmon(
        "#Entity         GPUTL             MCUTL             \nID\nGPU 0           100               62\n"
    )
    assert "203 and 204" in article.attrs["warnings"][0]
    with pytest.raises(ValueError, match="ask dmon for 1009 to 1012"):
        dl.link_rates(article)
    both = dl.parse_dmon("#Entity         NBWLT                       \nID              MB/s\nGPU 0           100\n")
    with pytest.raises(ValueError, match="NBWLT adds both directions"):
        dl.link_rates(both)


def test_what_a_paste_brings_along():
    frame = dl.parse_dmon(text("dmon_3.3.txt"))
    around = "\ufeffuser@node:~$ dcgmi dmon -e 203,155\r\n" + text("dmon_3.3.txt").replace("\n", "\r\n") + "^C\r\n"
    assert dl.parse_dmon(around).equals(frame)
    torn = dl.parse_dmon(text("dmon_4.6.txt")[:-130])
    assert len(torn) == 3 and "cut off" in torn.attrs["warnings"][0]
    late = text("dmon_4.6.txt") + "Error getting values information. Return -21: Host engine connection invalid\n"
    frame = dl.parse_dmon(late)
    assert len(frame) == 4 and "line 7" in frame.attrs["warnings"][0] and "host engine" in frame.attrs["warnings"][0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "no output of `dcgmi dmon`"),
        ("GPU 0 1 2\n", "line 1: values without a heading"),
        ("#Entity\nID\n", "line 1: the heading names no field"),
        ("#Entity   A  A\n", "line 1: the heading names A twice"),
        ("#Entity   A\nID\nGPU 0     1\n#Entity   B\n", "line 4: the heading changes from A to B"),
        ("# Entity  A  B\n      Id\n     GPU 0  1\n", "line 3 has 1 values under 2 headings"),
        ("#Entity   SMACT        TMPTR\nID\nGPU 0 0.904        61\n", "line 3: the values do not stand below"),
        ("#Entity   SMACT\nID\nGPU 0     fast\n", "line 3: 'fast' under SMACT is not a number"),
        ("#Entity   SMACT\nID\nhello\n", "line 3 is no output"),
    ],
)
def test_other_text_is_refused_with_its_line(wrong, said):
    with pytest.raises(ValueError, match=said):
        dl.parse_dmon(wrong)
    with pytest.raises(ValueError, match="is text, not bytes"):
        dl.parse_dmon(b"#Entity")


# ---------------------------------------------------------------- errors


def test_error_texts_instead_of_a_table():
    with pytest.raises(dl.DcgmError, match="profiling module is missing") as new:
        dl.parse_dmon(text("dmon_header_only_error.txt"))
    assert new.value.code == -33 and "dcgmi modules -l" in new.value.hint
    with pytest.raises(dl.DcgmError, match="another profiler") as old:
        dl.parse_dmon(text("dmon_2.x_error.txt"))
    assert old.value.code is None and "--pause" in old.value.hint
    with pytest.raises(dl.DcgmError, match="no samples"):
        dl.parse_dmon("#Entity   SMACT        \nID                     \n")
    again = pickle.loads(pickle.dumps(new.value))
    assert (str(again), again.code, again.hint) == (str(new.value), -33, new.value.hint)


@pytest.mark.parametrize(
    ("line", "code", "hint"),
    [
        ("Result: -21: Host engine connection invalid/disconnected", -21, "host engine does not run"),
        ("Result: -23: The GPUs of this group are incompatible with each other for the requested", -23, "one model"),
        ("Result: -29: Unable to watch ... requires the host engine to be running as root.", -29, "as root"),
        ("Result: -36: Profiling is not supported for this group of GPUs or GPU", -36, "GeForce"),
        ("Result: -37: The third-party Profiling module returned an unrecoverable error", -37, "another profiler"),
        ("Result: -38: The requested profiling metrics cannot be collected in a single pass", -38, "fewer"),
        ("Result: -44: ... doing so requires a newer driver version than what is", -44, "newer driver"),
        ("Result: -54: The hostengine and all modules are paused", -54, "--resume"),
        ("Result: Unable to watch one or more ... to be running as root.", None, "as root"),
        ("No data returned from the hostengine.", None, "ask again"),
        ("Error: unable to establish a connection to the specified host: localhost", None, "host engine does not run"),
        ("Error setting watches. Result: -99: something new", -99, "nv-hostengine.log"),
    ],
)
def test_each_error_is_mapped_to_what_to_do(line, code, hint):
    error = error_from(line if line.startswith(("Error", "No data")) else f"Error setting watches. {line}")
    assert error.code == code and hint in error.hint and hint in dl.explain_dcgm(line)
    if code not in (None, -99):
        assert dl.explain_dcgm(code) == error.hint
    reader = DmonReader()
    with pytest.raises(dl.DcgmError):
        reader.feed(line if line.startswith(("Error", "No data")) else f"Error setting watches. {line}")


def test_a_code_without_advice_is_a_key_error():
    with pytest.raises(KeyError, match="no advice for DCGM's code 5"):
        dl.explain_dcgm(5)


# ---------------------------------------------------------------- which text is it


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "dmon") for name in (*SAME, "dmon_2.x_error.txt", "dmon_4.6_link.txt")), ("nvlink_s.txt", "nvlink"),
     ("nvlink_gt_d_t0.txt", "nvlink counters"), ("topo_m_ansi.txt", "topo")],
)  # fmt: skip
def test_a_text_is_recognised(name, kind):
    assert recognise(text(name)) == kind


def test_failures_and_strangers_are_told_apart():
    with pytest.raises(dl.GpuUnavailable, match="no driver is loaded"):
        recognise(text("nvidia_smi_fail.txt"))
    assert recognise("Error setting watches. Result: -33: This request\n") == "dmon"
    for stranger in ("", "hello\n", "GPU util 3\n", "\x00\x01"):
        with pytest.raises(ValueError, match="none of the texts"):
            recognise(stranger)
