"""The files from which NCCL takes variables that the environment lacks.

A line NAME=value sets a variable, # begins a comment, nothing is trimmed or unquoted. NCCL reads the file that
NCCL_CONF_FILE names, or else ~/.nccl.conf, and then /etc/nccl.conf; what is set already stays (param.cc, setEnvFile).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SYSTEM_FILE = Path("/etc/nccl.conf")


def conf_files(environ: Mapping[str, str]) -> list[Path]:
    """The files that NCCL would read with this environment, those that exist, first one first."""
    named, home = environ.get("NCCL_CONF_FILE", ""), environ.get("HOME", "")
    own = [Path(named)] if named else [Path(home) / ".nccl.conf"] if home else []
    return [path for path in (*own, SYSTEM_FILE) if path.is_file()]


def with_conf_files(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as NCCL completes it from its files. A file that cannot be read is left out, as NCCL does."""
    complete = dict(environ)
    for path in conf_files(environ):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.split("\n"):
            name, equals, value = line.removesuffix("\r").partition("=")
            if equals and name and not line.startswith("#"):
                complete.setdefault(name, value)
    return complete
