"""From what a user names to trace files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
        path = Path(given)
        try:
            folder = path.is_dir()
            if not folder and not path.is_file():
                raise TraceError(path, "is no file" if path.exists() else "there is no such file or folder")
        except OSError as error:  # a name that is too long, a folder above it that may not be entered
            raise TraceError(path, f"cannot be read: {error.strerror}") from error
        if not folder:
            files[path] = True
            continue
        try:
            there = sorted(entry for entry in path.iterdir() if entry.is_file() and entry.name.endswith(_ENDINGS))
        except OSError as error:
            raise TraceError(path, f"cannot be read: {error.strerror}") from error
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
