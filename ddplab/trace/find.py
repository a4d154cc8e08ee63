"""From what a user names to trace files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddplab._files import is_folder, words
from ddplab.trace.errors import TraceError

_ENDINGS = (".json", ".json.gz")


def find_traces(paths: Sequence[str | Path]) -> tuple[dict[Path, bool], list[str]]:
    """(files in the order of their names, each with whether it was named or only found; notes).

    A folder stands for the traces in it, not below it.
    In a folder that has files named *.trace.json or *.trace.json.gz, as the profiler names them, other JSON files are
    not taken for traces. TraceError where there is nothing.
    """
    files: dict[Path, bool] = {}
    notes = []
    for given in paths:
        try:
            folder = is_folder(given)
        except FileNotFoundError as error:
            raise TraceError(given or "(nothing)", words(error)) from error
        except OSError as error:  # a name that is too long, a folder above it that may not be entered
            raise TraceError(given, f"cannot be read: {words(error)}") from error
        path = Path(given)
        if not folder and not path.is_file():
            raise TraceError(path, "is no file but a pipe or a device; save it first, a trace may be read twice")
        if not folder:
            files[path] = True
            continue
        try:
            there = sorted(entry for entry in path.iterdir() if entry.is_file() and entry.name.endswith(_ENDINGS))
        except OSError as error:
            raise TraceError(path, f"cannot be read: {words(error)}") from error
        own = [file for file in there if ".trace.json" in file.name]
        if own and len(own) < len(there):
            other = ", ".join(file.name for file in there if file not in own)
            notes.append(f"{path}: not taken for traces: {other}")
        if not there:
            below = sorted({str(file.parent) for file in path.glob("*/*.json*")})
            hint = f"; there are some in {', '.join(below[:4])}" if below else ""
            raise TraceError(path, f"the folder holds no .json or .json.gz file{hint}")
        files |= {file: bool(own) for file in own or there if file not in files}
    if not files:
        raise TraceError("(nothing)", "name a trace file or a folder of traces")
    return files, notes
