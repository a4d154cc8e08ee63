"""Mistakes in the environment variables that NCCL, gloo and torch read.

None of the three complains about a variable that it does not know, and NCCL takes nearly any text for a number. So a
mistake shows as nothing at all: the setting simply has no effect, or another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from ddplab.nccl import interfaces, reading
from ddplab.nccl.finding import Finding
from ddplab.nccl.interplay import interplay, transports
from ddplab.nccl.knobs import FOREIGN, Knob, knobs, nearest, older

_OURS = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_", "GLOO_")  # prefixes whose names somebody should read


def check_env(
    environ: Mapping[str, str] | None = None,
    *,
    transport: str | None = None,
    log: Any = None,
    version: str | None = None,
) -> list[Finding]:
    """Findings about the variables in `environ` (default: this process's); empty where all is well.

    transport: what carries the data: "nvlink", "pcie", "shm", "socket", "ib", "net" (a plugin's network), or several,
    as "nvlink+ib". Then variables that are not in force there are found too.   log: an NcclLog, or what
    `ddplab.parse_log` takes; transport and version come from it where they are not given.   version: of NCCL, as
    "2.21.5", to find variables that came later.

    Raises ValueError for an unknown transport, or a version that is none; TypeError for anything but text.
    """
    environ = os.environ if environ is None else environ
    for name, value in [*environ.items(), ("transport", transport or ""), ("version", version or "")]:
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"names and values are text, but {name!r} is {value!r}")
    carriers = transports(transport) if transport is not None else None
    if log is not None:
        seen, release = _from_log(log)
        carriers = seen if carriers is None else carriers
        version = version or release
    if version is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)+", version):
        raise ValueError(f"{version!r} is not a version of NCCL; write it as 2.21.5")
    found = []
    for name, value in environ.items():
        found += _check_name(name, value, version)
        knob = knobs().get(name)
        if knob is not None and (complaint := reading.complaint(knob, value)):
            found.append(Finding(name, value, *complaint))
    names = [name for _, name in socket.if_nameindex()]
    found += interfaces.check_gloo(environ.get("GLOO_SOCKET_IFNAME", ""), names)
    found += interfaces.check_nccl(environ.get("NCCL_SOCKET_IFNAME", ""), names)
    found += interplay(environ, carriers)
    return found


@contextlib.contextmanager
def nccl_env(settings: Mapping[str, object] | None = None, /, **more: object) -> Iterator[dict[str, str]]:
    """Set environment variables for a while: `with nccl_env({"NCCL_DEBUG": "INFO"}, NCCL_PROTO=None): ...`.

    None unsets a variable, True and False set 1 and 0, anything else is set as its text. At the end, also after an
    exception, every one of them is again as it was, set or unset. NCCL reads most variables once, when its first
    communicator starts.
    Raises ValueError for a name or a value that an environment cannot hold; then nothing was changed.
    """
    wanted = {**(settings or {}), **more}
    as_text = {None: None, True: "1", False: "0"}  # NCCL reads the word "True" as 0
    texts = {name: as_text[v] if v is None or isinstance(v, bool) else str(v) for name, v in wanted.items()}
    for name, text in texts.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name or "\0" in (text or ""):
            raise ValueError(f"{name!r}={text!r} cannot be an environment variable")
    before = {name: os.environ.get(name) for name in texts}
    try:
        _set(texts)
        yield {name: text for name, text in texts.items() if text is not None}
    finally:
        _set(before)


def _set(texts: Mapping[str, str | None]) -> None:
    for name, text in texts.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def _check_name(name: str, value: str, version: str | None) -> Iterator[Finding]:
    knob = knobs().get(name)
    if knob is None:
        if not FOREIGN.fullmatch(name) and (finding := _stranger(name, value)):
            yield finding
    elif knob.touch == "gone":
        yield _gone(knob, value)
    elif version and knob.library == "NCCL" and knob.since and older(version, knob.since):
        problem = f"NCCL {version} does not know it: it came with {knob.since}"
        yield Finding(name, value, problem, "unset it, or update NCCL", "unknown")


def _gone(knob: Knob, value: str) -> Finding:
    event, _, rest = knob.what.partition(": ")
    if not knob.successor:
        return Finding(knob.name, value, event, f"unset it: {rest}", "renamed")
    if knob.library == "torch":
        problem = f"renamed {knob.successor}; torch still reads the old name, with a warning"
    else:
        problem = f"renamed {knob.successor} ({event.removeprefix('renamed ')})"
    new = knobs()[knob.successor]
    fits = new.kind == knob.kind and not reading.complaint(new, value)
    return Finding(knob.name, value, problem, f"write {new.name}={value}" if fits else f"use {new.name}", "renamed")


def _stranger(name: str, value: str) -> Finding | None:
    """A variable that is in no list: is it a misspelt one of ours?"""
    known = knobs()
    if name.startswith("NCCL_") and f"TORCH_{name}" in known:
        problem = f"renamed TORCH_{name}, and the old name is not read"
        return Finding(name, value, problem, f"write TORCH_{name}={value}", "renamed")
    meant = name.upper() if name.upper() in known else ""
    if not meant and name.upper().startswith((*_OURS, "TORCH_N")):
        meant = nearest(name, known)
    head, _, rest = name.upper().partition("_")
    # A slip in the prefix itself. CCL_, RCCL_, HCCL_ and so on are libraries of their own, with other variables.
    if not meant and (head == "CCL" or (head[:1] == "N" and nearest(head, ["NCCL"], 0.7))):
        meant = f"NCCL_{rest}" if f"NCCL_{rest}" in known else ""
    if meant:
        return Finding(name, value, f"unknown, did you mean {meant}", f"write {meant}={value}", "unknown")
    if name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_")):
        reader = "NCCL" if name.startswith("NCCL_") else "torch"
        remedy = "unset it, unless a plugin of yours reads it"
        return Finding(name, value, f"unknown: {reader} reads no such variable", remedy, "unknown")
    return None


def _from_log(log: Any) -> tuple[set[str] | None, str | None]:
    """Transports and version that a log tells of."""
    from ddplab.nccl.log import NcclLog, parse_log

    log = log if isinstance(log, NcclLog) else parse_log(log)
    seen = set()
    for text in map(str, log.edges["transport"].dropna()):
        head = text.upper()
        if "NET/SOCKET" in head:
            seen.add("socket")
        elif "NET/IB" in head:
            seen.add("ib")
        elif "NET" in head or "COLLNET" in head:
            seen.add("net")
        elif "SHM" in head or "SHARED MEMORY" in head:
            seen.add("shm")
        elif "P2P" in head:
            seen.add("p2p")
    return seen or None, ".".join(map(str, log.version)) if log.version else None
