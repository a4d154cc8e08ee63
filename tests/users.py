"""Somebody for whom files can be closed: to root, who runs many of these tests, all of them are open."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def ordinary_user() -> Iterator[Path]:
    """A folder that this process may enter and read, but not write in, as a user without privileges.

    In it: "closed.txt", which may not be read, "fixed.txt", which may not be written, and "shut/", not to be entered.
    """
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    for name in ("closed.txt", "fixed.txt"):
        (folder / name).write_text("text\n")
    (folder / "shut").mkdir()
    for name, mode in (("closed.txt", 0), ("fixed.txt", 0o444), ("shut", 0), (".", 0o555)):
        (folder / name).chmod(mode)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, folder / "shut"):
            path.chmod(0o755)
        shutil.rmtree(folder)
