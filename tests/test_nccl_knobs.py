"""The table of variables and the readers of their values, against NCCL, torch and C themselves."""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import random
import re
from pathlib import Path

import pytest
import torch
from damage import for_seeds

from ddplab.nccl import reading
from ddplab.nccl.ask import ask_nccl, nccl_library
from ddplab.nccl.knobs import FOREIGN, NCCL_VERSION, SCOPES, TOUCH, knobs, nearest, older

KNOBS = knobs()
HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


@pytest.fixture(scope="module")
def library_text():
    """The strings of the installed NCCL, where it is the version of the table."""
    path = nccl_library()
    if path is None:
        pytest.skip("no NCCL is installed beside torch, so there is nothing to compare the table with")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        words = {word.decode() for word in re.findall(rb"NCCL_[A-Z0-9_]+", image)}
        version = re.search(rb"NCCL version (\d+\.\d+\.\d+)", image)[1].decode()
    if version != NCCL_VERSION:
        pytest.skip(f"the table is that of NCCL {NCCL_VERSION}, and {version} is installed")
    return words


def test_every_variable_of_the_table_is_in_nccls_library(library_text):
    missing = {k.name for k in KNOBS.values() if k.library == "NCCL" and k.touch != "gone"} - library_text
    assert missing == set()


def test_every_variable_in_nccls_library_is_in_the_table(library_text):
    # Words of its messages and constants; FOREIGN and these are no variables.
    constants = re.compile(
        r"NCCL_(ALL|ALLOC|ALLOC_HOST|BOOTSTRAP|CALL|COLL|DESTROY|ENV|INIT|NVLS|P2P|PROFILE|PROXY|RAS|REG|SHM|TUNING|NET|"
        r"SIGNAL(_NONE)?|LOG_\w+|PARAM_(FLAG|TYPE)\w*|NET_DEVICE_\w+|NET_MERGE_POLICY_\w+|IPC_(COLLECTIVE|SENDRECV)|"
        r"GIN_(CONNECTION|TYPE|IB_ALL)\w*|GIN_\w+_GPU_CONTEXT_\w+|IB_(SL|TC)_DEFAULT|\w*_)"
    )
    read = {word for word in library_text if not constants.fullmatch(word) and not FOREIGN.fullmatch(word)}
    candidates = {word for word in read if word not in KNOBS}
    # What is left are words of messages, such as a function's name; none of them may look like a setting's message.
    assert not [word for word in candidates if re.search(r"(ENABLE|DISABLE|NTHREADS|TIMEOUT|LEVEL|CHUNKSIZE)$", word)]


def test_torchs_variables_are_those_of_its_headers():
    text = "".join((HEADERS / name).read_text() for name in ("ProcessGroupNCCL.hpp", "ProcessGroupGloo.hpp"))
    lists = re.findall(r"static std::vector<std::string>\s*\w+\s*=\s*\{([^}]*)\}", text)
    aliases = [re.findall(r'"(\w+)"', names) for names in lists]
    assert len(aliases) > 15
    for name, *olds in aliases:
        assert KNOBS[name].touch != "gone", name
        for old in olds:
            assert (KNOBS[old].touch, KNOBS[old].successor) == ("gone", name)


def test_the_table_is_whole():
    assert len(KNOBS) > 300 and list(KNOBS) == sorted(KNOBS)
    for knob in KNOBS.values():
        assert knob.scope in SCOPES and knob.touch in TOUCH and knob.what, knob
        assert reading.complaint(knob, knob.default or "") is None or knob.library == "torch", knob
        if knob.touch == "gone":
            assert re.match(r"(since|renamed in|removed in) (torch )?\d+\.\d+", knob.what), knob
            assert knob.successor or knob.what.endswith(("nothing replaces it", "the tuning model decides")), knob
            assert not knob.successor or KNOBS[knob.successor].touch != "gone", knob
        assert bool(knob.words) + bool(knob.range) <= 1


def test_defaults_that_follow_from_the_source():
    """Sizes as NCCL's headers compute them: lines x threads x steps x bytes."""
    steps = 8
    assert int(KNOBS["NCCL_BUFFSIZE"].default) == 1 << 22
    assert int(KNOBS["NCCL_LL_BUFFSIZE"].default) == 8 * 512 * steps * 16
    assert int(KNOBS["NCCL_LL128_BUFFSIZE"].default) == 120 * 640 * steps * 8


# ---------------------------------------------------------------- numbers


C_STRTOLL = ctypes.CDLL(None).strtoll
C_STRTOLL.restype = ctypes.c_longlong


def c_strtoll(text: str) -> tuple[int, str]:
    """C's own strtoll(text, &rest, 0)."""
    buffer = ctypes.create_string_buffer(text.encode())
    rest = ctypes.c_void_p()
    value = C_STRTOLL(buffer, ctypes.byref(rest), 0)
    return value, text.encode()[rest.value - ctypes.addressof(buffer) :].decode()


STRTOLL_PIECES = (
    " ",
    "\t",
    "+",
    "-",
    "0",
    "0x",
    "0X",
    "7",
    "8",
    "9",
    "42",
    "1" * 19,
    "a",
    "F",
    "g",
    "K",
    "MB",
    ".",
    "e",
)


def test_numbers_are_read_as_c_reads_them():
    def check(seed):
        draw = random.Random(seed)
        text = "".join(draw.choices(STRTOLL_PIECES, k=draw.randrange(7)))
        value, rest = c_strtoll(text)
        ours, left = reading.strtoll(text)
        assert (max(min(ours, 2**63 - 1), -(2**63)), left) == (value, rest)
        return seed

    for_seeds(check)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8MB", 8), ("4M", 4), ("010", 8), ("0x800000", 2**23), (" 7", 7), ("true", 0), ("8388608", 2**23)],
)
def test_numbers_are_read_as_nccl_reads_them(text, value):
    lines = ask_nccl({"NCCL_SOCKET_RCVBUF": text})
    if lines is None:
        pytest.skip("no NCCL is installed beside torch, so it cannot be asked")
    assert f"NCCL_SOCKET_RCVBUF set by environment to {value}." in lines
    assert reading.number(text) == value


def test_a_number_that_is_too_large_leaves_nccl_at_its_default():
    lines = ask_nccl({"NCCL_SOCKET_RCVBUF": "9" * 30})
    if lines is None:
        pytest.skip("no NCCL is installed beside torch, so it cannot be asked")
    assert any(line.startswith("Invalid value 999") and "using default -1" in line for line in lines)
    assert reading.number("9" * 30) is None
    assert reading.complaint(KNOBS["NCCL_BUFFSIZE"], "9" * 5000)[0] == "too large, so NCCL takes its default"


def test_words_that_nccl_ignores_are_complained_about(library_text):
    """NCCL shows what it made of NCCL_DEBUG_SUBSYS by what it prints: with an unknown word, its default (2.30)."""
    mine = ask_nccl({"NCCL_DEBUG_SUBSYS": "^ENV,INIT,BOOTSTRAP"})
    default = ask_nccl({"NCCL_DEBUG_SUBSYS": "ENV,NOSUCH"})
    assert any("Bootstrap: Using lo" in line for line in default)
    assert not any("Bootstrap: Using lo" in line for line in mine)
    assert reading.complaint(KNOBS["NCCL_DEBUG_SUBSYS"], "^ENV,INIT,BOOTSTRAP") is None
    assert "unknown word 'NOSUCH'" in reading.complaint(KNOBS["NCCL_DEBUG_SUBSYS"], "ENV,NOSUCH")[0]


def test_ask_nccl_says_when_nccl_fails():
    if nccl_library() is None:
        pytest.skip("no NCCL is installed beside torch, so it cannot be asked")
    with pytest.raises(RuntimeError, match="failed with"):
        ask_nccl({"NCCL_SOCKET_IFNAME": "=nosuchif0"})


def test_ask_nccl_without_nccl(monkeypatch):
    monkeypatch.setattr("ddplab.nccl.ask.nccl_library", lambda: None)
    assert ask_nccl({}) is None


# ---------------------------------------------------------------- NCCL_ALGO and NCCL_PROTO

ALGORITHMS = KNOBS["NCCL_ALGO"].words


def test_lists_as_the_guide_explains_them():
    everything = set(ALGORITHMS)
    found = reading.parse_list("ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring", ALGORITHMS)
    assert found["AllReduce"] == {"Tree", "CollNetDirect"} and found["Broadcast"] == {"Ring"}
    assert found["AllGather"] == {"Ring", "CollNetDirect"}
    found = reading.parse_list("allreduce:^tree", ALGORITHMS)
    assert found["AllReduce"] == everything - {"Tree"} and found["Reduce"] == everything
    protocols = KNOBS["NCCL_PROTO"].words
    found = reading.parse_list("^LL128;allreduce:LL128", protocols)
    assert found["AllReduce"] == {"LL128"} and found["Reduce"] == {"LL", "Simple"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Rign", "unknown algorithm 'Rign'; NCCL ≤ 2.23 silently nothing, ≥ 2.24 error"),
        ("Ring, Tree", "unknown algorithm ' Tree'"),
        ("ring;tree", "names no function"),
        (";ring", "names no function"),
        ("allredcue:ring", "unknown function 'allredcue'"),
        ("allreduce:", "unknown algorithm 'allreduce'"),
        (":", "lists nothing"),
    ],
)
def test_lists_that_nccl_refuses(text, says):
    assert says in reading.complaint(KNOBS["NCCL_ALGO"], text)[0]


@pytest.mark.parametrize(
    "text", ["ring;allreduce:^tree", "RING", "^nvls", "allreduce::ring", ";allreduce:ring", "^", "ring,"]
)
def test_lists_that_nccl_takes(text):
    assert reading.complaint(KNOBS["NCCL_ALGO"], text) is None


# ---------------------------------------------------------------- every kind of value


@pytest.mark.parametrize(
    ("setting", "problem", "remedy"),
    [
        ("NCCL_NTHREADS=4", "becomes 512: 4 is not a multiple of 32", "from 64 to 512"),
        ("NCCL_NTHREADS=2", "becomes 512", "from 64 to 512"),
        ("NCCL_NTHREADS=1024", "becomes 512: 1024 is outside", "from 64 to 512"),
        ("NCCL_NTHREADS=32", "becomes 64: 32 is outside", "from 64 to 512"),
        ("NCCL_LL128_NTHREADS=64", "becomes 160", "from 160 to 640"),
        ("NCCL_BUFFSIZE=8MB", "parsed as 8", "write 8388608"),
        ("NCCL_BUFFSIZE=4M", "parsed as 4", "write 4194304"),
        ("NCCL_BUFFSIZE=1.5e6", "parsed as 1", "1 or more"),
        ("NCCL_BUFFSIZE=0", "0 is not a legal value", "1 or more"),
        ("NCCL_BUFFSIZE=-8", "-8 is not a legal value", "1 or more"),
        ("NCCL_SOCKET_NTHREADS=32", "becomes 16", "from 1 to 16"),
        ("NCCL_IB_DISABLE=true", "parsed as 0", "write 1"),
        ("NCCL_IB_TIMEOUT=0", "0 is not a legal value", "from 1 to 31"),
        ("NCCL_IB_TIMEOUT=022", "parsed as 18", "write 18"),
        ("NCCL_P2P_DISABLE=2", "2 is not a legal value", "0 or 1"),
        ("NCCL_P2P_LEVEL=nvl", "unknown level", "did you mean NVL?"),
        ("NCCL_SOCKET_FAMILY=af_inet", "unknown value, so NCCL ignores it", "did you mean AF_INET?"),
        ("NCCL_SET_THREAD_NAME=yes", "takes its default 0", "write 1 or 0"),
        ("NCCL_DEBUG=DEBUG", "unknown value", "VERSION"),
        ("NCCL_DEBUG_FILE=~/nccl.log", "nothing replaces the ~", "in full"),
        ("NCCL_CTA_POLICY=ZERO|EFFICIENCY", "exclude each other", "choose one"),
        ("NCCL_CTA_POLICY=3", "only the first digit counts", "ZERO"),
        ("NCCL_CTA_POLICY=zeroo", "unknown policy", "ZERO"),
        ("NCCL_NETDEVS_POLICY=MAX", "takes AUTO", "MAX:n"),
        ("NCCL_SOCKET_MAGIC=12ab", "not a number", "0x1234"),
        ("TORCH_NCCL_BLOCKING_WAIT=", "torch refuses it", "1 or 0"),
        ("TORCH_NCCL_BLOCKING_WAIT=on", "torch refuses it", "1 or 0"),
        ("TORCH_FR_BUFFER_SIZE=many", "torch refuses it", "0 or more"),
        ("TORCH_FR_BUFFER_SIZE=2k", "parsed as 2", "0 or more"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=4", "4 is not a legal value", "0, 1, 2 or 3"),
        ("TORCH_DISTRIBUTED_DEBUG=FULL", "torch refuses it", "OFF, INFO or DETAIL"),
    ],
)
def test_values_that_mean_something_else(setting, problem, remedy):
    name, _, value = setting.partition("=")
    said = reading.complaint(KNOBS[name], value)
    assert said is not None and problem in said[0] and remedy in said[1], said


@pytest.mark.parametrize(
    "setting",
    [
        "NCCL_DEBUG=info", "NCCL_BUFFSIZE=8388608", "NCCL_BUFFSIZE=0x800000", "NCCL_BUFFSIZE=", "NCCL_NTHREADS=512",
        "NCCL_NTHREADS=96", "NCCL_NTHREADS=-2", "NCCL_IB_DISABLE=0", "NCCL_IB_DISABLE=false", "NCCL_P2P_LEVEL=NVL",
        "NCCL_P2P_LEVEL=3", "NCCL_DEBUG_SUBSYS=^INIT, COLL", "NCCL_CTA_POLICY=zero", "NCCL_CTA_POLICY=2",
        "NCCL_NETDEVS_POLICY=max:2", "NCCL_SOCKET_MAGIC=0xff", "NCCL_SET_THREAD_NAME=True",
        "TORCH_NCCL_BLOCKING_WAIT=Yes", "TORCH_FR_BUFFER_SIZE=2000", "NCCL_BUFFSIZE= 4194304 ",
        "NCCL_IB_HCA==mlx5_0:1", "NCCL_SOCKET_NTHREADS=2", "NCCL_CROSS_NIC=1", "TORCH_DISTRIBUTED_DEBUG=detail",
    ],
)  # fmt: skip
def test_values_that_are_fine(setting):
    name, _, value = setting.partition("=")
    assert reading.complaint(KNOBS[name], value) is None


def test_versions_are_compared_as_numbers():
    assert older("2.9.8", "2.10") and not older("2.10.3", "2.9.9")
    assert older("2.21.5", "2.27") and not older("2.30.7", "2.30") and older("2.30.3", "2.30.7")


def test_nearest_keeps_the_spelling_of_what_it_knows():
    assert nearest("nccl_bufsize", KNOBS) == "NCCL_BUFFSIZE"
    assert nearest("PATH", KNOBS) == ""


def test_the_table_comes_with_the_package():
    """knobs.csv is data: an installation must carry it."""
    listed = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert "nccl/knobs.csv" in listed
    assert importlib.metadata.version("torch")
