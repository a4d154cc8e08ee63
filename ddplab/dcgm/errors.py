"""What DCGM and the NVIDIA driver say instead of numbers, and what to do about it.

dmon answers a refused field with one line of text, on stdout up to DCGM 2.x and on stderr since. The codes and texts
are those of DCGM 4.6.0 (dcgmlib/dcgm_structs.h, dcgmlib/src/dcgm_errors.c, dcgmi/DeviceMonitor.cpp).
"""

from __future__ import annotations

import re

_PROFILER = "another profiler (Nsight Systems, Nsight Compute, anything on CUPTI) holds the counters"

# code -> (start of DCGM's text, what to do)
_KNOWN: dict[int, tuple[str, str]] = {
    -1: ("Bad parameter passed to function", "check the ids after -e and -i: `dcgmi dmon -l`, `dcgmi discovery -l`"),
    -6: ("Feature not supported", "this GPU or driver has no such field; `dcgmi profile -l -i 0` lists what it has"),
    -8: ("NVML error", "the driver failed below DCGM: see `nvidia-smi` and `dmesg | grep -i nvrm`"),
    -11: ("Timeout", "the host engine is busy or stuck: restart it, `systemctl restart nvidia-dcgm`"),
    -12: ("API version mismatch", "dcgmi and nv-hostengine come from different releases: install one of them again"),
    -13: ("Unknown field identifier", "this DCGM does not know the id: `dcgmi dmon -l` lists those it does"),
    -14: ("No data is available", "ask again after an interval: profiling fields need one before their first value"),
    -17: ("No permission", "run dcgmi as a user that may use the host engine, or as root"),
    -18: ("GPU is lost", "the GPU fell off the bus: see `dmesg | grep -i xid`, then reset it or reboot"),
    -19: ("GPU requires reset", "drain the node, then `nvidia-smi --gpu-reset -i N`"),
    -21: (
        "Host engine connection invalid/disconnected",
        "the host engine does not run: `systemctl start nvidia-dcgm`, or `nv-hostengine`",
    ),
    -22: ("This GPU is not supported by DCGM", "DCGM is for data-centre GPUs; watch this one through NVML"),
    -23: ("The GPUs of this group are incompatible", "the GPUs differ: choose those of one model, as in `-i 0,1`"),
    -25: ("DCGM library could not be found", "install datacenter-gpu-manager; dcgmi needs its libdcgm"),
    -29: ("Host engine is running as non-root", "run nv-hostengine as root: the field needs it"),
    -33: (
        "This request is serviced by a module of DCGM that is not currently loaded",
        "the profiling module is missing or refused to load: `dcgmi modules -l`; a GeForce or a GPU before Volta has "
        "none, and it comes with the datacenter-gpu-manager package only",
    ),
    -34: ("The requested operation could not be completed because the affected resource is in use", _PROFILER),
    -36: (
        "Profiling is not supported for this group of GPUs or GPU",
        "a GeForce, or GPUs of several models, or MIG without its instances: choose data-centre GPUs of one model with "
        "`-i`, or the MIG instance",
    ),
    -37: (
        "The third-party Profiling module returned an unrecoverable error",
        f"most often {_PROFILER}: end it, or take turns with `dcgmi profile --pause` and `--resume`; if there is none, "
        "it is a driver fault: update it",
    ),
    -38: (
        "The requested profiling metrics cannot be collected in a single pass",
        "ask for fewer of the fields 1001 to 1012 at once: `dcgmi profile -l -i 0` shows which go together",
    ),
    -44: ("The installed driver version is insufficient for this API", "the field needs a newer driver"),
    -54: ("The hostengine and all modules are paused", "somebody paused it: `dcgmi profile --resume`"),
    -56: ("Cannot perform the requested operation because NVML doesn't exist", "there is no driver here"),
    -67: ("Cannot perform the requested operation because the GPUs are detached", "attach them again with dcgmi set"),
}
# What dmon itself words differently.
_WORDED = {
    "connection is not valid": -21,
    "unable to establish a connection": -21,
    "unable to connect to host engine": -21,
    "running as root": -29,
    "requires a newer driver": -44,
    "No data returned from the hostengine": -14,
}
_NVIDIA = (
    (
        "Driver/library version mismatch",
        "the driver was updated under a running kernel module: reload it (`rmmod nvidia`, with no process left on the "
        "GPUs) or reboot",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "no driver is loaded: `lsmod | grep nvidia`, then `modprobe nvidia`; after a kernel update, install it again",
    ),
    ("No devices were found", "the driver runs and sees no GPU: `lspci | grep -i nvidia`, and in a container `--gpus`"),
    ("Insufficient Permissions", "the device files refuse this user: `ls -l /dev/nvidia*`"),
    ("command not found", "there is no nvidia-smi on this machine: no driver, or not in the PATH"),
)
_CODE = re.compile(r"(?:Result|Return|Error)[:.]?\s+(-\d{1,3})\s*:")


class DcgmError(RuntimeError):
    """DCGM refused, or said nothing. `code` is DCGM's number or None, `text` its own words, `hint` what to do."""

    def __init__(self, text: str, code: int | None = None, hint: str = "") -> None:
        known = "" if code is None else f" (code {code})"
        super().__init__(f"DCGM says{known}: {text}" + (f". What to do: {hint}" if hint else ""))
        self.text, self.code, self.hint = text, code, hint

    def __reduce__(self) -> tuple:
        return DcgmError, (self.text, self.code, self.hint)


class GpuUnavailable(RuntimeError):
    """nvidia-smi or NVML did not reach a GPU. The message has the tool's words and what to do."""


def explain_dcgm(said: int | str) -> str:
    """What to do about a DCGM code (-33) or about one of its error texts, in one sentence.

    KeyError for a number that is in no table of ours; an unknown text gives a sentence that sends you to the log.
    """
    if isinstance(said, int):
        if said not in _KNOWN:
            raise KeyError(f"no advice for DCGM's code {said}; known: {', '.join(map(str, sorted(_KNOWN)[::-1]))}")
        return _KNOWN[said][1]
    return error_from(said).hint


def error_from(text: str) -> DcgmError:
    """The exception for one line of DCGM's output."""
    text = " ".join(text.split())[:500]
    match = _CODE.search(text)
    code = int(match[1]) if match else None
    meant = code if code in _KNOWN else None
    lower = text.lower()
    if meant is None:
        texts = [(said.lower(), number) for number, (said, _) in _KNOWN.items()]
        # "Timeout" and the like are words of other sentences, too: the longest text that fits is meant
        texts = sorted([*texts, *((w.lower(), n) for w, n in _WORDED.items())], key=lambda pair: -len(pair[0]))
        meant = next((number for said, number in texts if said in lower), None)
    hint = _KNOWN[meant][1] if meant is not None else "look into the host engine's log, /var/log/nv-hostengine.log"
    said = text.partition("Result:")[2].strip() or text
    return DcgmError(said.removeprefix(f"{code}:").strip().rstrip("."), code, hint)


def gpu_failure(text: str) -> GpuUnavailable | None:
    """The exception where `text` is nvidia-smi's or NVML's report that it reached no GPU; None where it is not."""
    for words, hint in _NVIDIA:
        if words.lower() in text.lower():
            line = next(line for line in text.splitlines() if words.lower() in line.lower())
            return GpuUnavailable(f"{' '.join(line.split())[:300].rstrip('.')}. What to do: {hint}")
    return None
