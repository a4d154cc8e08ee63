"""Files to read and to write, such that what is wrong is said in words, nothing hangs and nothing is half written."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

_WORDS = {
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder",
    errno.EACCES: "permission denied",
    errno.EPERM: "the system does not permit it",
    errno.ENAMETOOLONG: "the name is too long for a file",
    errno.ELOOP: "its symbolic links lead round in a circle",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your share of the disk is used up",
    errno.EIO: "the disk, or what stands for it, reports an error",
    errno.ENXIO: "nobody is at its other end",
    errno.EPIPE: "who read it has left",
}
_PATIENCE_S = 1.0  # for somebody to open a pipe's other end


def words(error: OSError) -> str:
    """What the system says, in words and without a number."""
    said = error.strerror or str(error)
    return _WORDS.get(error.errno, said) if said in ("", os.strerror(error.errno or 0)) else said


def is_folder(path: str | Path) -> bool:
    """Is there a folder? False for a file. OSError, in words, where there is nothing, or nobody may look."""
    return stat.S_ISDIR(_mode(path))


def named_files(
    paths: str | Path | Iterable[str | Path], takes: Callable[[Path], bool], what: str, unreadable: type[Exception]
) -> list[Path]:
    """The files that are named, in order; of a folder those in it and below it that `takes` wants, by name.

    FileNotFoundError for a path where nothing is; `unreadable`, in words, where nobody may look, and where there is no
    file in the end: "no `what` in `paths`".
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        try:
            folder = is_folder(path)
        except FileNotFoundError as problem:
            raise FileNotFoundError(f"{path} does not exist" if os.fspath(path) else words(problem)) from None
        except OSError as problem:
            raise unreadable(f"{path}: cannot be read: {words(problem)}") from None
        path = Path(path)
        found += sorted(p for p in path.rglob("*") if os.path.isfile(p) and takes(p)) if folder else [path]
    if not found:
        raise unreadable(f"no {what} in {paths}")
    return found


def open_to_read(path: str | Path) -> BinaryIO:
    """The file's bytes from the start. OSError, with words as its strerror, for all that cannot be read as a file.

    A pipe is read to its end, if somebody writes into it. A device is refused: it has no end, or waits for a key.
    """
    mode = _mode(path)
    try:
        if stat.S_ISREG(mode):
            return open(path, "rb")
        if stat.S_ISFIFO(mode):
            return io.BytesIO(_from_pipe(path))
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "it is a device or a socket, not a file")
    except OSError as error:
        raise _said(error, path) from None


def _mode(path: str | Path) -> int:
    try:
        return os.stat(_named(path)).st_mode
    except OSError as error:
        raise _said(error, path) from None


def _named(path: str | Path) -> str:
    """The path as text, if it can be one."""
    path = os.fspath(path)
    if not path:
        raise OSError(errno.ENOENT, "the path is empty")
    if "\0" in path:
        raise OSError(errno.EINVAL, "no name of a file holds a null character")
    return path


def _said(error: OSError, path: str | Path) -> OSError:
    return OSError(error.errno, words(error), str(path))  # Python makes it a FileNotFoundError, and so on


def _from_pipe(path: str | Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # waits for nobody
    with open(handle, "rb", buffering=0) as pipe:
        deadline = time.monotonic() + _PATIENCE_S
        while (first := pipe.read(1 << 16)) == b"" and time.monotonic() < deadline:  # None: a writer who has not begun
            time.sleep(0.01)
        if first == b"":
            raise OSError(errno.EINVAL, "it is a pipe, and nobody writes into it")
        os.set_blocking(handle, True)
        return (first or b"") + pipe.read()


class Unwritable(OSError):
    """Nothing can be written there, or was: `filename` is the path as the caller named it, `strerror` is words."""

    def __str__(self) -> str:
        return f"cannot write '{self.filename}': {self.strerror}"


class Draft:
    """A text file that appears at `path` whole or not at all: a context that keeps it, or drops it on an exception.

        with Draft("report.html") as page:  # the place is tried here, before the work whose result it is to hold
            page.write(text)

    A symbolic link stays one. A device or a pipe has no drafts: it is opened here and written directly. All that goes
    wrong with the file is an `Unwritable`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self._draft, self._direct = os.fspath(path), "", None
        with self._told():
            mode = self._mode()
            if mode is None or stat.S_ISREG(mode):
                self._place = os.path.realpath(self.path)
                if mode is not None:
                    open(self._place, "ab").close()  # a file that is read-only refuses here
                handle, self._draft = tempfile.mkstemp(prefix=".ddplab-", dir=os.path.dirname(self._place))
                os.close(handle)
            else:
                handle = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)  # a pipe without a reader refuses
                os.set_blocking(handle, True)
                self._direct = self._text(handle)

    def write(self, text: str) -> None:
        """All of the text, once."""
        with self._told(), self._direct or self._text(self._draft) as out:
            out.write(text)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._draft:
                with self._told():
                    umask = os.umask(0)
                    os.umask(umask)
                    os.chmod(self._draft, 0o666 & ~umask)  # a draft is private; a result is an ordinary file
                    os.replace(self._draft, self._place)
        finally:
            if self._direct:
                self._direct.close()
            elif self._draft:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._draft)

    def _mode(self) -> int | None:
        """What is at the place, None for nothing; OSError where no file can be."""
        try:
            mode = os.stat(_named(self.path)).st_mode
        except FileNotFoundError:
            if self.path and not self.path.endswith(os.sep):
                return None
            raise
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return mode

    @staticmethod
    def _text(place: int | str) -> TextIO:
        # A file's name, which may stand in the text, need not be Unicode.
        return open(place, "w", encoding="utf-8", errors="backslashreplace", newline="")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unwritable(error.errno, _why(error, self.path), self.path) from None


@contextlib.contextmanager
def made_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write files in. It is made if need be, and goes again on an exception; Unwritable if it cannot be."""
    made: list[Path] = []
    try:
        try:
            folder = Path(_named(path))
            made += [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise Unwritable(error.errno, _why_no_folder(error, os.fspath(path)), os.fspath(path)) from None
        yield folder
    except BaseException:
        for place in made:
            with contextlib.suppress(OSError):  # it was never made, or somebody has put a file in it
                place.rmdir()
        raise


def _why_no_folder(error: OSError, path: str) -> str:
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{_blocker(path)} is a file, not a folder"
    if error.errno == errno.ENOENT and path:
        return "no folder can be made there; name another place"
    return _why(error, path)


def _why(error: OSError, path: str) -> str:
    """Why a file cannot be written, and what to do."""
    folder = os.path.dirname(path) or "."
    if error.errno == errno.ENOENT and path:
        known = os.path.isdir(folder)
        missing = f"no file can be made in '{folder}'" if known else f"there is no folder '{folder}'; make it first"
        return f"{missing}, or name another place"
    if error.errno == errno.ENOTDIR:
        return f"{_blocker(path)} is a file, not a folder"
    if error.errno == errno.EISDIR:
        return "it is a folder; name a file"
    if error.errno == errno.ENXIO:
        return "it is a pipe that nobody reads"
    elsewhere = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
    return words(error) + ("; name another place" if elsewhere else "")


def _blocker(path: str) -> str:
    """The first part of a path that is there and is no folder."""
    for place in (*reversed(Path(path).parents), path):
        if os.path.lexists(place) and not os.path.isdir(place):
            return f"'{place}'"
    return "a part of it"
