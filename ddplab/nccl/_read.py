"""Text from wherever the caller has it: a path, several, a folder, or the text itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ddplab._files import is_folder, open_to_read, words

Source = str | os.PathLike | Iterable[str | os.PathLike]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read(source: Source, looks_like_text: str) -> list[tuple[str, str]]:
    """(name, text) of each file that `source` names; a text stands for itself, under the name "text".

    A string is text if it has a line break or `looks_like_text` finds something in it, and a path otherwise. A folder
    stands for the files in it. Bytes that are not UTF-8 become replacement characters, colour codes go.
    Raises FileNotFoundError for what is not there, OSError, in words, for what cannot be read, TypeError for something
    else than text and paths.
    """
    if isinstance(source, (bytes, bytearray)):
        source = bytes(source).decode("utf-8", "replace")
    if isinstance(source, str) and ("\n" in source or re.search(looks_like_text, source) or not source.strip()):
        return [("text", _ANSI.sub("", source))]
    if isinstance(source, (str, os.PathLike)):
        return [(str(path), _text(path)) for path in _files(source)]
    paths = [*source] if isinstance(source, Iterable) else [None]
    if not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise TypeError(f"expected text, a path or a list of paths, not {source!r}")
    return [(str(path), _text(path)) for given in paths for path in _files(given)]


def _files(path: str | os.PathLike) -> list[Path]:
    try:
        folder = is_folder(path)
        found = sorted(child for child in Path(path).iterdir() if os.path.isfile(child)) if folder else [Path(path)]
    except OSError as error:
        raise _said(error, path) from error
    if not found:
        raise FileNotFoundError(f"there is no file in {path}")
    return found


def _text(path: Path) -> str:
    try:
        with open_to_read(path) as file:
            return _ANSI.sub("", file.read().decode("utf-8", "replace"))
    except OSError as error:
        raise _said(error, path) from error


def _said(error: OSError, path: str | os.PathLike) -> OSError:
    if isinstance(error, FileNotFoundError) and os.fspath(path):
        return FileNotFoundError(f"there is no file {path}")
    return type(error)(f"cannot read '{path}': {words(error)}")
