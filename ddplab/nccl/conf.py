"""The files from which NCCL takes variables that the environment lacks.

A line NAME=value sets a variable, # begins a comment, nothing is trimmed or unquoted. NCCL reads the file that
NCCL_CONF_FILE names, or else ~/.nccl.conf, and then /etc/nccl.conf; what is set already stays (param.cc, setEnvFile).
So of two lines with one name the first counts; on a command line, and in a shell, it is the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ddplab.nccl.finding import Finding

SYSTEM_FILE = Path("/etc/nccl.conf")


class Setting(NamedTuple):
    """One NAME=value, and where it stands: "line 3 of /etc/nccl.conf"."""

    name: str
    value: str
    where: str


def conf_files(environ: Mapping[str, str]) -> list[Path]:
    """The files that NCCL would read with this environment, those that exist, first one first."""
    named, home = environ.get("NCCL_CONF_FILE", ""), environ.get("HOME", "")
    own = [Path(named)] if named else [Path(home) / ".nccl.conf"] if home else []
    return [path for path in (*own, SYSTEM_FILE) if os.path.isfile(path)]


def conf_settings(path: Path) -> list[Setting]:
    """What a file sets, line by line. Nothing where it cannot be read: NCCL goes on without it, too."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        name, equals, value = line.removesuffix("\r").partition("=")
        if equals and name and not line.startswith("#"):
            found.append(Setting(name, value, f"line {number} of {path}"))
    return found


def with_conf_files(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as NCCL completes it from its files. A file that cannot be read is left out, as NCCL does."""
    complete = dict(environ)
    for path in conf_files(environ):
        for name, value, _ in conf_settings(path):
            complete.setdefault(name, value)
    return complete


def conf_repeats(environ: Mapping[str, str]) -> list[Finding]:
    """Names that a file of NCCL's sets more than once."""
    found = []
    for path in conf_files(environ):
        reason = "NCCL keeps what is set already"
        found += repeats(conf_settings(path), counts=0, because=reason, above=environ)
    return found


def repeats(
    settings: Iterable[Setting], counts: int, because: str, above: Mapping[str, str] | None = None
) -> list[Finding]:
    """A finding for each name that is set more than once, with all its values and the one that counts.

    counts: the first (0) or the last (-1).  above: an environment that stands above all of these.
    """
    by_name: dict[str, list[Setting]] = {}
    for setting in settings:
        by_name.setdefault(setting.name, []).append(setting)
    found = []
    for name, mine in by_name.items():
        if len(mine) < 2:
            continue
        kept, often = mine[counts], "twice" if len(mine) == 2 else f"{len(mine)} times"
        said = ", then ".join(f"to {value or 'nothing'} ({where})" for _, value, where in mine)
        counted = f"the {'last' if counts else 'first'} counts ({because}): {kept.value or 'nothing'}"
        value = (above or {}).get(name, kept.value)
        if name in (above or {}):
            counted = f"none of them counts, the environment sets it to {value or 'nothing'}"
        others = " and ".join(where for _, _, where in mine if where != kept.where)
        found.append(Finding(name, value, f"set {often}: {said}; {counted}", f"drop {others}", "no effect"))
    return found
