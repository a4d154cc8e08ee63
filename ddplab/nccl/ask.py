"""What NCCL itself makes of an environment.

Most of NCCL needs a GPU, but not its beginning: `ncclGetUniqueId` reads variables and opens a listening socket, and
with NCCL_DEBUG=INFO it says what it understood. So the installed library can be asked on any Linux machine, about the
variables that it reads by then: those of the log and of the setup sockets.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_SCRIPT = """
import ctypes, sys
nccl = ctypes.CDLL(sys.argv[1])
sys.exit(nccl.ncclGetUniqueId(ctypes.create_string_buffer(128)))  # NCCL_UNIQUE_ID_BYTES
"""


def nccl_library() -> Path | None:
    """The NCCL that was installed with torch, or None."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else []:
        for path in sorted(Path(folder).glob("nccl/lib/libnccl.so*")):
            return path
    return None


def ask_nccl(settings: Mapping[str, str], timeout_s: float = 30) -> list[str] | None:
    """NCCL's own lines (without host and process) after it started with these variables; None where no NCCL is found.

    A process of its own is asked, on loopback only, with no variable of NCCL but these. Raises RuntimeError when NCCL
    fails or does not answer in time.
    """
    library = nccl_library()
    if library is None:
        return None
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    chatty = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo", "NCCL_CONF_FILE": os.devnull}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(library)],
            env=quiet | chatty | dict(settings),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{library.name} did not answer within {timeout_s} s") from error
    if done.returncode:
        raise RuntimeError(
            f"{library.name} failed with {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
        )
    return [re.sub(r"^.*?NCCL (INFO|WARN) ", "", line) for line in done.stdout.splitlines() if " NCCL " in line]
