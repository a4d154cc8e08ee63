"""Reading and writing files: what is wrong is said in words, nothing hangs, nothing is half written."""

from __future__ import annotations

import errno
import os
import stat
import threading

import pytest
from users import ordinary_user

from ddplab import _files
from ddplab._files import Draft, Unwritable, is_folder, made_folder, named_files, open_to_read, words


def read(path) -> bytes:
    with open_to_read(path) as file:
        return file.read()


def test_a_file_is_read_from_its_start(tmp_path):
    (tmp_path / "a").write_bytes(b"\0\xff\n")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read(tmp_path / "a") == read(str(tmp_path / "link")) == b"\0\xff\n"
    assert is_folder(tmp_path) and not is_folder(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("gone", FileNotFoundError, "there is no such file or folder"),
        ("file/x", NotADirectoryError, "a part of the path is a file, not a folder"),
        (".", IsADirectoryError, "it is a folder"),
        ("x" * 300, OSError, "the name is too long for a file"),
        ("round", OSError, "its symbolic links lead round in a circle"),
        ("pipe", OSError, "it is a pipe, and nobody writes into it"),
        ("/dev/null", OSError, "it is a device or a socket, not a file"),
        ("/dev/zero", OSError, "it is a device or a socket, not a file"),
        ("nul\0l", OSError, "no name of a file holds a null character"),
    ],
)
def test_what_cannot_be_read_is_said_in_words_and_at_once(tmp_path, monkeypatch, name, kind, said):
    monkeypatch.setattr(_files, "_PATIENCE_S", 0.02)
    (tmp_path / "file").write_text("")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(kind) as caught:
        open_to_read(tmp_path / name)
    assert caught.value.strerror == said and caught.value.filename == str(tmp_path / name)


def test_an_empty_path_is_not_the_working_folder():
    for look in (open_to_read, is_folder):
        with pytest.raises(FileNotFoundError, match="the path is empty"):
            look("")
    for write in (Draft, made_folder):
        with pytest.raises(Unwritable, match="cannot write '': the path is empty"), write(""):
            pass


def test_files_that_are_named_and_files_in_folders(tmp_path):
    def named(paths):
        found = named_files(paths, lambda path: path.suffix == ".log", "log", LookupError)
        return [str(path.relative_to(tmp_path)) for path in found]

    (tmp_path / "in/deep").mkdir(parents=True)
    for name in ("in/b.log", "in/a.log", "in/deep/c.log", "in/x.txt", "y.txt"):
        (tmp_path / name).write_text("")
    assert named(tmp_path / "y.txt") == named(str(tmp_path / "y.txt")) == ["y.txt"], "who names a file knows what it is"
    assert named(tmp_path / "in") == ["in/a.log", "in/b.log", "in/deep/c.log"]
    assert named([tmp_path / "y.txt", tmp_path / "in/deep"]) == ["y.txt", "in/deep/c.log"]
    for paths, kind, said in (
        (tmp_path / "gone", FileNotFoundError, f"{tmp_path}/gone does not exist"),
        (["", tmp_path], FileNotFoundError, "the path is empty"),
        (tmp_path / ("x" * 300), LookupError, "cannot be read: the name is too long for a file"),
        ([], LookupError, "no log in []"),
    ):
        with pytest.raises(kind) as caught:
            named(paths)
        assert str(caught.value).endswith(said)
    (tmp_path / "none").mkdir()
    with pytest.raises(LookupError, match=f"no log in {tmp_path}/none"):
        named(tmp_path / "none")


def test_permissions():
    with ordinary_user() as folder:
        for path in (folder / "closed.txt", folder / "shut" / "x"):
            with pytest.raises(PermissionError) as caught:
                open_to_read(path)
            assert caught.value.strerror == "permission denied"
        for path in (folder / "new.txt", folder / "fixed.txt", folder / "shut" / "x"):
            with pytest.raises(Unwritable, match=f"cannot write '{path}': permission denied; name another place"):
                Draft(path)
        with pytest.raises(Unwritable, match="permission denied"), made_folder(folder / "new"):
            pass


def test_a_pipe_is_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "_PATIENCE_S", 60)
    os.mkfifo(tmp_path / "pipe")
    data = os.urandom(300_000)  # more than a pipe holds
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(data,))
    writer.start()
    assert read(tmp_path / "pipe") == data
    writer.join()


def test_no_error_of_the_system_shows_its_number():
    for number in errno.errorcode:
        said = words(OSError(number, os.strerror(number), "x"))
        assert said and "Errno" not in said and str(number) not in said
    assert words(OSError("in words already")) == "in words already"


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_draft_appears_whole_or_not_at_all(tmp_path):
    place = tmp_path / "page.html"
    with pytest.raises(ZeroDivisionError), Draft(place) as draft:
        draft.write("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with Draft(place) as draft:
        draft.write("whole \udcff\n")  # a file's name that is no Unicode, say
        assert not place.exists()
    assert place.read_text() == "whole \\udcff\n" and list(tmp_path.iterdir()) == [place]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(place.stat().st_mode) == 0o666 & ~umask
    (tmp_path / "link").symlink_to("page.html")
    with Draft(tmp_path / "link") as draft:
        draft.write("new")
    assert (tmp_path / "link").is_symlink() and place.read_text() == "new"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none/x", "there is no folder '{}/none'; make it first, or name another place"),
        ("none/", "there is no folder '{}/none'; make it first, or name another place"),
        ("file/x", "'{}/file' is a file, not a folder"),
        ("file/y/x", "'{}/file' is a file, not a folder"),
        (".", "it is a folder; name a file"),
        ("x" * 256, "the name is too long for a file"),
        ("round", "its symbolic links lead round in a circle"),
        ("pipe", "it is a pipe that nobody reads"),
        ("nul\0l", "no name of a file holds a null character"),
        ("/proc/x", "no file can be made in '/proc', or name another place"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, name, said):
    (tmp_path / "file").write_text("as it was")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    path = f"{tmp_path}/{name}" if not name.startswith("/") else name
    with pytest.raises(Unwritable) as caught:
        Draft(path)
    assert str(caught.value) == f"cannot write '{path}': {said.format(tmp_path)}"
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "as it was"


def test_devices_and_pipes_are_written_directly(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "_PATIENCE_S", 60)
    with Draft("/dev/null") as draft:
        draft.write("gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(Unwritable, match="cannot write '/dev/full': the disk is full"), Draft("/dev/full") as draft:
        draft.write("x")
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append(read(tmp_path / "pipe")))
    reader.start()
    while reader.is_alive():  # it opens the pipe at some time
        try:
            with Draft(tmp_path / "pipe") as draft:
                draft.write("x" * 200_000)
        except Unwritable as error:
            assert "nobody reads" in str(error)
        else:
            reader.join()
    assert found == [b"x" * 200_000]


def test_a_folder_is_made_and_goes_again(tmp_path):
    with pytest.raises(ZeroDivisionError), made_folder(tmp_path / "a/b"):
        assert (tmp_path / "a/b").is_dir()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with made_folder(tmp_path / "a/b"):
        pass
    assert (tmp_path / "a/b").is_dir()
    with pytest.raises(ZeroDivisionError), made_folder(tmp_path / "a"):
        raise ZeroDivisionError
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file/x/y"):
        said = f"cannot write '{path}': '{tmp_path / 'file'}' is a file, not a folder"
        with pytest.raises(Unwritable, match=said), made_folder(path):
            pass
