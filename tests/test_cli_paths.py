"""Paths on the command line: of every command, empty, unreadable and unwritable ones, each answered in one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
from pathlib import Path

import pytest
from users import ordinary_user

from ddplab import _files
from ddplab.cli import COMMANDS, Parser, main

DATA = Path(__file__).parent / "data"
TRACE = DATA / "trace/trace_overlap.json"
LOG, TESTS = DATA / "nccl/nccl_log_2.30.txt", DATA / "nccl/nccl_tests_4gpu.txt"
READ = [["trace"], ["why"], ["nccl", "log"], ["nccl", "tests"], ["nccl", "check", "--log"], ["links", "--replay"]]
WRITE = [
    ["trace", str(TRACE), "--html"],
    ["trace", str(TRACE), "--json", "--html"],
    ["trace", str(TRACE), "--csv"],
    ["nccl", "log", str(LOG), "--table", "edges", "--csv"],
    ["nccl", "tests", str(TESTS), "--csv"],
    ["nccl", "sweep", "NCCL_PROTO", "LL", "Simple", "--csv"],
    ["bench", "--csv"],
    ["predict", "--model", "resnet18", "--html"],
]


def sentence(capsys, *argv: object) -> str:
    """The one line with which a command refuses; it fails, and says nothing else."""
    code, said = main([*map(str, argv)]), capsys.readouterr()
    assert code in (1, 2) and said.out == "" and said.err.count("\n") == 1, said
    assert said.err.startswith("ddplab ") and "Errno" not in said.err and "Traceback" not in said.err
    return said.err


def line_id(argv: list[str]) -> str:
    return "_".join(word for word in argv if "/" not in word)


def parsers():
    """(words of a command line, its parser) of every command and action."""
    for name in COMMANDS:
        command = importlib.import_module(f"ddplab.cli.{name}")
        for action in getattr(command, "ACTIONS", [""]):
            module = importlib.import_module(f"ddplab.cli.{name}_{action}") if action else command
            parser = Parser(prog=name)
            module.arguments(parser)
            yield [name, *[action] * bool(action)], parser


def test_every_argument_that_is_a_path_knows_it():
    found, names = [], ("path", "paths", "folder", "csv", "html", "log", "replay")
    for words, parser in parsers():
        for action in parser._actions:
            if action.metavar in ("PATH", "FILE", "FOLDER") or action.dest in names:
                found.append((*words, action.dest))
                with pytest.raises(argparse.ArgumentTypeError, match="the path is empty; name "):
                    action.type("")
    assert len(found) == 14, found


@pytest.mark.parametrize("argv", [*READ, *WRITE, ["labs", "copy"]], ids=line_id)
def test_an_empty_path_is_no_folder(capsys, argv):
    assert "the path is empty; name " in sentence(capsys, *argv, "")


@pytest.mark.parametrize("argv", READ, ids=line_id)
def test_what_cannot_be_read_is_said_in_words(capsys, tmp_path, monkeypatch, argv):
    monkeypatch.setattr(_files, "_PATIENCE_S", 0.02)
    (tmp_path / "file").write_text("")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    os.mkfifo(tmp_path / "pipe")
    for name, said in {
        "gone": ("there is no", "does not exist"),
        "file/x": ("a part of the path is a file",),
        "x" * 300: ("the name is too long",),
        "round": ("its symbolic links lead round in a circle",),
        "pipe": ("is a pipe", "is no file but a pipe", "give the folder"),
        "/dev/zero": ("is a device", "is no file but a pipe or a device", "give the folder"),
    }.items():
        answer = sentence(capsys, *argv, tmp_path / name)
        assert any(words in answer for words in said) and str(tmp_path / name) in answer, answer
    with ordinary_user() as folder:
        assert "permission denied" in sentence(capsys, *argv, folder / ("shut/x" if argv == ["why"] else "closed.txt"))
        if argv != ["links", "--replay"]:  # which takes no folders
            answer = main([*argv, str(folder / "shut")]), *capsys.readouterr()
            assert answer[0] and "permission denied" in "".join(answer[1:]) and "Errno" not in "".join(answer[1:])


@pytest.mark.parametrize("argv", WRITE, ids=line_id)
def test_what_cannot_be_written_is_said_before_the_work(capsys, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    folder = argv[0] == "trace" and argv[-1] == "--csv"
    (tmp_path / "file").write_text("as it was")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    places = {"file/x": "'file' is a file, not a folder", "x" * 300: "the name is too long", "round": ""}
    places |= {"file": "'file' is a file, not a folder"} if folder else {".": "it is a folder"}
    places |= {} if folder else {"none/x": "there is no folder 'none'; make it first", "none/": "there is no folder"}
    for place, said in places.items():
        answer = sentence(capsys, *argv, place)
        assert f"cannot write '{place}': {said}" in answer and ".part" not in answer and ".ddplab" not in answer
    with ordinary_user() as closed:
        answer = sentence(capsys, *argv, closed / "new")
        assert f"cannot write '{closed / 'new'}': permission denied; name another place" in answer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "round"]
    assert (tmp_path / "file").read_text() == "as it was"


def test_tables_and_page_of_a_trace_are_written_all_or_none(capsys, tmp_path):
    (tmp_path / "tables/waits.csv").mkdir(parents=True)
    answer = sentence(capsys, "trace", TRACE, "--csv", tmp_path / "tables", "--html", tmp_path / "page.html")
    assert f"cannot write '{tmp_path}/tables/waits.csv': it is a folder" in answer
    sentence(capsys, "trace", TRACE, "--csv", tmp_path / "new", "--html", tmp_path / "none/page.html")
    sentence(capsys, "trace", tmp_path / "gone.json", "--csv", tmp_path / "new", "--html", tmp_path / "page.html")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["tables", "waits.csv"]


def test_a_result_is_not_written_over_what_it_is_made_from(capsys, tmp_path):
    for source, argv in {
        TRACE: ["trace", "t", "--html"],
        LOG: ["nccl", "log", "t", "--table", "edges", "--csv"],
        TESTS: ["nccl", "tests", "t", "--csv"],
    }.items():
        shutil.copy(source, tmp_path / "t")
        (tmp_path / "other").unlink(missing_ok=True)
        (tmp_path / "other").symlink_to("t")
        answer = sentence(capsys, *(str(tmp_path / "t") if word == "t" else word for word in argv), tmp_path / "other")
        assert "is read here, and would be lost" in answer and (tmp_path / "t").read_bytes() == source.read_bytes()


def test_a_file_whose_name_is_no_unicode(capsys, tmp_path):
    place = os.fsencode(tmp_path) + b"/\xff.json"
    shutil.copy(TRACE, place)
    name = os.fsdecode(place)
    assert main(["trace", name, "--csv", str(tmp_path / "tables"), "--html", str(tmp_path / "page.html")]) == 0
    assert "\\udcff.json" in (tmp_path / "tables/breakdown.csv").read_text("utf-8")
    assert (tmp_path / "page.html").read_text("utf-8")
    capsys.readouterr()


def test_a_file_that_no_command_looked_after_is_no_traceback(capsys, monkeypatch):
    def run(args):
        open("/nowhere/at/all")

    monkeypatch.setattr("ddplab.cli.doctor.run", run)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "ddplab: '/nowhere/at/all': there is no such file or folder\n"
