"""What the build would look up again for each citation.

pybtex finds its parts among the entry points of all installed packages, 21 ms a time, of 276 citations.
"""

from __future__ import annotations

from typing import Any

from pybtex.plugin import find_plugin, register_plugin

PART = "pybtex.backends", "plaintext"


def setup(app: Any) -> dict[str, Any]:
    register_plugin(*PART, find_plugin(*PART), force=True)  # what is registered is found before any entry point
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
