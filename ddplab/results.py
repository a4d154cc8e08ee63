"""Recorded measurements: a table with the machine, the versions and the date that it was made with, as JSON.

The full edition of the book writes them to `labs/results`. Where a page cannot measure (emulated hosts are not allowed,
or the quick edition leaves most of the grid out), it shows the recorded table and says so.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

_VERSIONS = ("torch", "numpy", "ddplab")


def save_results(path: str | Path, frame: pd.DataFrame, **about: Any) -> None:
    """Write `frame` to `path` with this machine, these versions, the present time (UTC) and whatever `about` adds.

    Columns keep their names (with the unit in them); times, bytes and names must be plain numbers and text. The file is
    replaced in one piece.
    """
    path = Path(path)
    rows = [json.dumps(row, ensure_ascii=False) for row in json.loads(frame.to_json(orient="records"))]
    head = json.dumps({**provenance(), **about}, indent=1, ensure_ascii=False)
    text = f'{{"about": {head},\n"rows": [\n' + ",\n".join(rows) + "\n]}\n"  # one row a line: readable differences
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf8")
    os.replace(part, path)


def load_results(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(table, about) as `save_results` wrote them. FileNotFoundError, or ValueError for another kind of file."""
    import pandas as pd

    path = Path(path)
    try:
        record = json.loads(path.read_text("utf8"))
        return pd.DataFrame.from_records(record["rows"]), dict(record["about"])
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not there: run the page that measures it with QUICK=False") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no recorded result of ddplab: {type(error).__name__}: {error}") from None


def provenance() -> dict[str, str]:
    """What a number depends on: date, machine and versions."""
    versions = {}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{processor()}, {os.cpu_count()} logical CPUs, {system}",
        "versions": f"Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in versions.items()),
    }


def processor() -> str:
    """The processor's own name where Linux tells it, else what Python knows."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
