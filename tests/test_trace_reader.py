"""Trace files that are torn, odd or no traces: what is whole is read and what was lost is said, or one clear error."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from damage import for_seeds

import ddplab as dl
from ddplab.trace import blocks, read_trace
from ddplab.trace.breakdown import busy

SAMPLES = Path(__file__).parent / "data" / "trace"
KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10.0, "dur": 5.0}
COMM = {**KERNEL, "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "tid": 9, "ts": 12.5}
INFO = {"backend": "nccl", "rank": 3, "world_size": 4}


def write(folder: Path, content: str | bytes | dict | list, name: str = "t.json") -> Path:
    path = folder / name
    content = content if isinstance(content, str | bytes) else json.dumps(content, indent=1)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def trace(*events: dict, **more) -> dict:
    return {"distributedInfo": INFO, **more, "traceEvents": list(events)}


# ---------------------------------------------------------------- damaged


@pytest.mark.parametrize(
    "sample, line, reason, whole",
    [
        ("trace_truncated.json", 37, "ends early, was the job killed?", 2),
        ("trace_latin1.json", 45, "byte 0xe9 is not UTF-8", 3),
    ],
)
def test_damaged_text_is_an_error_with_its_place_and_what_is_whole_can_be_read(sample, line, reason, whole):
    with pytest.raises(dl.TraceError) as caught:
        dl.analyze_trace(SAMPLES / sample)
    error = caught.value
    assert str(SAMPLES / sample) in str(error) and reason in str(error) and "--partial" in str(error)
    assert (error.line, error.path) == (line, str(SAMPLES / sample))
    text = (SAMPLES / sample).read_bytes().split(b"\n")[line - 1]
    assert 1 <= error.column <= len(text) + 1
    report = dl.analyze_trace(SAMPLES / sample, partial=True)
    assert len(report.traces[0].gpu) == whole
    [note] = [note for note in report.notes if "damaged" in note]
    assert f"line {line}, column {error.column}" in note and reason in note


def test_an_infinite_duration_is_skipped_and_counted():
    report = dl.analyze_trace(SAMPLES / "trace_inf.json")
    assert any("skipped 1 event" in note for note in report.notes)
    assert report.breakdown["span_ns"].tolist() == [140_000]
    assert report.overlap["overlap_pct"].tolist() == [50.0]


@pytest.mark.parametrize(
    "bad", ["inf", "-inf", "Infinity", "NaN", "nan", "-1", "1e400", "1e30", "null", '"soon"', "[1]", "true"]
)
@pytest.mark.parametrize("field", ["ts", "dur"])
def test_a_time_that_is_no_time_costs_its_event_only(tmp_path, bad, field):
    text = json.dumps(trace(KERNEL, {**KERNEL, field: 77777.5}, COMM))
    path = write(tmp_path, text.replace("77777.5", bad))
    if (field, bad) == ("ts", "-1"):
        return  # before the clock's zero is no error
    got = read_trace(path)
    assert got.gpu.start_ns.tolist() == [10_000, 12_500]
    assert any("skipped 1 event" in note for note in got.notes)


def test_infinity_beside_the_times_is_no_damage(tmp_path):
    event = json.dumps({**KERNEL, "args": {"GB/s": 77777.5, "stack": 'inf "nan" inf'}})
    got = read_trace(
        write(tmp_path, json.dumps(trace(COMM)).replace("]}", "," + event.replace("77777.5", "inf") + "]}"))
    )
    assert len(got.gpu) == 2 and got.notes == []


def test_an_unescaped_quote_costs_its_event_only(tmp_path):
    """torch writes the file names of stack frames as they are (pytorch issue 146900)."""
    text = json.dumps(trace(KERNEL, {**KERNEL, "name": "my QUOTE file.py"}, COMM), indent=1).replace("QUOTE", '"odd"')
    path = write(tmp_path, text)
    with pytest.raises(dl.TraceError, match=r"line \d+, column \d+: no valid JSON"):
        read_trace(path)
    got = read_trace(path, partial=True)
    assert [got.names[i] for i in got.gpu.name] == ["gemm", COMM["name"]]
    assert "left out 1 damaged place" in got.notes[0]
    assert got.rank == 3


def test_a_gzip_that_was_cut_or_spoilt(tmp_path):
    whole = gzip.compress(json.dumps(trace(*[{**KERNEL, "ts": i} for i in range(50_000)]), indent=1).encode())
    path = write(tmp_path, whole[: len(whole) // 2], "t.json.gz")
    with pytest.raises(dl.TraceError, match="gzip: the file ends early"):
        read_trace(path)
    assert 20_000 < len(read_trace(path, partial=True).gpu) < 30_000
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2] ^= 0xFF
    path = write(tmp_path, bytes(spoilt), "t.json.gz")
    with pytest.raises(dl.TraceError):  # the text is wrong before the checksum is
        read_trace(path)
    got = read_trace(path, partial=True)
    assert 10_000 < len(got.gpu) and got.notes


@pytest.mark.parametrize(
    "content, reason",
    [
        ("", "the file is empty"),
        ("  \n ", "the file is empty"),
        ("hello", "no JSON"),
        ("{}", "no list"),
        ('{"a": 1}', "no list"),
        ('{"traceEvents": null}', "no list"),
        ('{"traceEvents": {}}', "no list"),
        ("[]", "no events"),
        ('{"traceEvents": []}', "no events"),
        ('{"traceEvents": [1, null, "x", []]}', "no events"),
        ('{"traceEvents": ', "ends early"),
        ('{"schemaVersion": 1, "dev', "ends early"),
        ('{"traceEvents": [', "ends early"),
        ('{"traceEvents": [] garbage', "no valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"traceEvents": [' + '{"a":' * 100_000, "nested too deeply"),
        ("\ufeff", "the file is empty"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b", "gzip"),
        (b"\x1f\x8b\x08\x00junk and more junk", "gzip"),
        (b"\x00" * 1000, "no JSON"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path, content, reason):
    path = write(tmp_path, content)
    with pytest.raises(dl.TraceError, match=re.escape(reason)) as caught:
        dl.analyze_trace(path)
    assert str(path) in str(caught.value)
    with pytest.raises(dl.TraceError):
        dl.analyze_trace(path, partial=True)


def test_a_file_whose_events_are_whole_and_whose_end_is_missing(tmp_path):
    text = json.dumps({"traceEvents": [KERNEL, COMM], "distributedInfo": INFO}, indent=1)
    path = write(tmp_path, text[:-25])
    with pytest.raises(dl.TraceError, match="ends early"):
        read_trace(path)
    assert len(read_trace(path, partial=True).gpu) == 2


# ---------------------------------------------------------------- odd, and right


def test_blocks_are_cut_anywhere(tmp_path, monkeypatch):
    """Small blocks: every cut, growth and end of a file is met, in each layout."""
    rng = random.Random(5)
    names = ["gemm", "},{", '}, {"ph": "X"', "]}", "\n  },\n  {", 'a"b\\', "é" * 50, COMM["name"]]
    events = [
        {
            **KERNEL,
            "ts": i,
            "name": rng.choice(names),
            "args": {"x": [{"a": {}}, {"b": rng.choice(names)}] * rng.randrange(4)},
        }
        for i in range(200)
    ]
    document = {
        "deviceProperties": [{"id": 0}, {"id": 1}],
        "traceEvents": events,
        "more": [{"a": 1}, {"b": 2}],
        "distributedInfo": INFO,
    }
    for size in (64, 300, 1 << 12):
        monkeypatch.setattr(blocks, "BLOCK", size)
        for indent in (None, 0, 1, 2, "\t"):
            got = read_trace(write(tmp_path, json.dumps(document, indent=indent)))
            assert got.gpu.start_ns.tolist() == [1000 * i for i in range(200)]
            assert [got.names[i] for i in got.gpu.name] == [event["name"] for event in events]
            assert got.rank == 3 and got.notes == []


def test_events_that_lack_what_others_have(tmp_path):
    events = [
        {"ph": "M", "name": "process_name", "pid": 1},
        {"name": "no category", "ph": "X", "ts": 1, "dur": 1},
        {"cat": "kernel"},
        {},
        {**KERNEL, "args": None},
        {**KERNEL, "args": [1]},
        {**KERNEL, "args": {"correlation": "12", "In msg nelems": "8", "dtype": 5}},
        {**KERNEL, "pid": [1], "tid": {"a": 1}},
        {**KERNEL, "ts": "11.5"},
        {**COMM, "args": {"In msg nelems": -5, "Group size": 1e99, "External id": 10**30}},
    ]
    got = read_trace(write(tmp_path, trace(*events)))
    assert len(got.gpu) == 6 and 11_500 in got.gpu.start_ns
    assert any("skipped 1 event" in note for note in got.notes)  # the kernel without a time


@pytest.mark.parametrize(
    "info",
    [None, 5, [], "x", {"rank": "0"}, {"rank": -1}, {"rank": 1e99}, {"rank": True}, {"world_size": 0}, {"backend": 7}],
)
def test_an_odd_distributed_info_leaves_the_rank_open(tmp_path, info):
    report = dl.analyze_trace(write(tmp_path, {"distributedInfo": info, "traceEvents": [KERNEL, COMM]}))
    assert report.ranks == [None]
    assert report.overlap["overlap_pct"].tolist() == [50.0]


def test_synchronisation_is_no_compute(tmp_path):
    events = [
        COMM,
        {**KERNEL, "cat": "cuda_sync", "name": "Stream Wait Event", "ts": 12.5},
        {**KERNEL, "name": "Context Sync", "ts": 12.5},
    ]
    report = dl.analyze_trace(write(tmp_path, trace(*events)))
    assert report.overlap["overlap_pct"].tolist() == [0.0]


def test_copies_of_the_copy_engines_are_one_collective(tmp_path):
    """NCCL 2.28 on leaves some all-gathers to the copy engines: plain copies inside the annotation of their stream."""
    copy = {**KERNEL, "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "tid": 9}
    note = {"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:_all_gather_base", "pid": 0, "tid": 9}
    events = [
        {**copy, "ts": 100, "dur": 10},
        {**copy, "ts": 112, "dur": 8},
        {**note, "ts": 99.999, "dur": 20.003},
        {**copy, "ts": 200, "dur": 5},  # packs for the kernel that follows
        {**COMM, "ts": 205, "dur": 20},
        {**note, "name": "nccl:all_reduce", "ts": 199.999, "dur": 25.003},
        {**copy, "ts": 300, "dur": 7},  # a copy of the user's
        {**KERNEL, "ts": 105, "dur": 5},
    ]
    report = dl.analyze_trace(write(tmp_path, trace(*events)))
    [row] = report.breakdown.to_dict("records")
    assert row["overlapped_ns"] + row["exposed_comm_ns"] == 38_000
    assert (row["overlapped_ns"], row["memory_only_ns"]) == (5_000, 12_000)
    table = report.collectives.set_index("collective")
    assert table["count"].to_dict() == {"all_gather": 1, "all_reduce": 1}
    assert table["total_us"].to_dict() == {"all_gather": 20.0, "all_reduce": 20.0}


# ---------------------------------------------------------------- many files


def test_which_files_count(tmp_path):
    for rank in (1, 0):
        write(
            tmp_path, {"distributedInfo": {**INFO, "rank": rank}, "traceEvents": [KERNEL, COMM]}, f"worker{rank}.json"
        )
    write(tmp_path, {"learning_rate": 0.1}, "config.json")
    report = dl.analyze_trace(tmp_path)
    assert report.ranks == [0, 1]
    assert any("left out" in note and "config.json" in note for note in report.notes)
    assert any("2 of 4 ranks" in note for note in report.notes)
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper", trace(KERNEL, COMM))
    (tmp_path / "empty").mkdir()
    with pytest.raises(dl.TraceError, match="no .json"):
        dl.analyze_trace(tmp_path / "empty")
    with pytest.raises(dl.TraceError, match="no such file"):
        dl.analyze_trace(tmp_path / "gone.json")
    with pytest.raises(dl.TraceError, match="name a trace"):
        dl.analyze_trace([])


def test_two_files_of_one_rank(tmp_path):
    write(tmp_path, trace(KERNEL, COMM), "a.json")
    write(tmp_path, trace(KERNEL, {**COMM, "dur": 50}), "b.json")
    report = dl.analyze_trace(tmp_path)
    assert report.ranks == [3]
    assert report.breakdown["span_ns"].tolist() == [52_500]
    assert any("rank 3 is in two files" in note and "a.json is left out" in note for note in report.notes)


def test_ranks_that_the_traces_do_not_tell(tmp_path):
    for rank in (2, 5):
        write(tmp_path, [KERNEL, COMM], f"rank{rank}.123.pt.trace.json")
    report = dl.analyze_trace(tmp_path)
    assert report.ranks == [2, 5] and any("files' names" in note for note in report.notes)
    other = tmp_path / "x"
    other.mkdir()
    for name in "ab":
        write(other, [KERNEL, COMM], f"{name}.json")
    report = dl.analyze_trace(other)
    assert report.ranks == [0, 1] and any("numbered" in note for note in report.notes)


# ---------------------------------------------------------------- mangled


def _mangled(rng: random.Random, text: bytes) -> bytes:
    """One to four edits of the kind that disks, writers and editors make."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        end = min(at + rng.choice((1, 1, 3, 20, 200)), len(text))
        edit = rng.randrange(7)
        if edit == 0:
            text = text[:at]
        elif edit == 1:
            text = text[:at] + text[end:]
        elif edit == 2:
            text = text[:at] + text[at:end] * rng.choice((2, 3, 30)) + text[end:]
        elif edit == 3:
            text = text[:at] + bytes(rng.randrange(256) for _ in range(rng.choice((1, 4)))) + text[end:]
        elif edit == 4:
            word = rng.choice(
                (b"NaN", b"inf", b"-1e999", b"null", b"{}", b"[", b"]", b"}", b'"', b"\\", b"1e308", b"\xff", b",")
            )
            text = text[:at] + word + text[at:]
        elif edit == 5:  # a value for a value
            numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?", text))
            if numbers:
                one = rng.choice(numbers)
                value = rng.choice((b"-3", b"9" * 30, b"1e300", b"inf", b"null", b'"7"', b"[]", b"{}", b"true", b"0"))
                text = text[: one.start()] + value + text[one.end() :]
        else:
            other = rng.randrange(len(text) + 1)
            text = text[:at] + text[other : other + 300] + text[at:]
        text = text or b" "
    return text


def test_no_mangled_trace_shows_our_insides(tmp_path, monkeypatch):
    """2,000 mangled files, read strictly, and partially where that is refused: parts that add up, or a TraceError."""
    monkeypatch.setattr(blocks, "BLOCK", 512)
    sources = [path.read_bytes() for path in sorted(SAMPLES.glob("*.json"))]
    sources += [
        json.dumps(json.loads(text)).encode()
        for text in sources
        if text[:1] == b"{" and text[-1:] == b"}" and b"inf" not in text and b"\xe9" not in text
    ]
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "pid": 1, "tid": 1, "ts": 9 * i, "dur": 9}
        for i in range(3)
    ]
    message = {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float", "Group size": 4, "correlation": 5}
    launch = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1,
        "tid": 1,
        "ts": 8,
        "dur": 1,
        "args": {"correlation": 5},
    }
    sources.append(
        json.dumps(
            trace(*steps, launch, KERNEL, {**COMM, "args": message}, baseTimeNanoseconds=10**18), indent=1
        ).encode()
    )
    read = 0

    def check(seed):
        nonlocal read
        rng = random.Random(seed)
        text = _mangled(rng, rng.choice(sources))
        if rng.randrange(10) == 0:
            text = gzip.compress(text, 1)
            text = _mangled(rng, text) if rng.randrange(2) else text
        path = write(tmp_path, text)
        for partial in (False, True):
            try:
                got = read_trace(path, partial=partial)
            except dl.TraceError as error:
                assert str(path) in str(error) and "\n" not in str(error)
                continue
            read += 1
            span, *parts = busy(got).parts().values()
            assert sum(parts) == span and min(parts) >= 0
            if rng.randrange(60) == 0:  # the tables take longer than the reading
                report = dl.analyze_trace(path, partial=partial)
                json.loads(report.to_json())
                str(report)
            break  # what can be read strictly is not partial
        return text

    for_seeds(check)
    assert 900 < read < 2290  # both outcomes are well met


@pytest.mark.parametrize(
    "odd",
    [
        "9" * 300_000,
        " " * 300_000 + "x",
        '"' + "\\" * 200_000 + '"',
        "-" * 200_000,
        "[" * 900 + "]" * 900,
        "}" * 200_000,
    ],
    ids=["digits", "spaces", "backslashes", "signs", "brackets", "braces"],
)
def test_long_runs_of_one_character_take_no_longer_than_others(tmp_path, odd):
    """Patterns that try every split of a run would sit here for hours."""
    text = json.dumps(trace(KERNEL, {**KERNEL, "args": 77777.5}, COMM, {**COMM, "ts": 77777.5})).replace("77777.5", odd)
    path = write(tmp_path, text)
    for partial in (False, True):
        try:
            read_trace(path, partial=partial)
        except dl.TraceError as error:
            assert len(str(error)) < 400


def test_names_that_no_encoding_holds(tmp_path):
    path = write(
        tmp_path, json.dumps(trace({**COMM, "name": COMM["name"] + "SURROGATE"})).replace("SURROGATE", "\\ud800")
    )
    try:
        report = dl.analyze_trace(path)
    except dl.TraceError:
        return
    report.to_csv(tmp_path / "tables")
    report.to_json().encode()
