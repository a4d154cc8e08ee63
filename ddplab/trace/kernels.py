"""Which kernels communicate, and what their names and arguments say of the collective.

Names by version, as NCCL's sources define them: `ncclAllReduceRingLLKernel_sum_f32` (to 2.7),
`ncclKernel_AllReduce_RING_LL_Sum_float` (2.8 to 2.18), `ncclDevKernel_AllReduce_Sum_f32_RING_LL` (2.19 on),
`ncclSymDevKernel_…` (2.27) and `ncclSymkDevKernel_…` (2.28 on) for symmetric memory, `ncclDevKernel_Generic` (RCCL, and
NCCL where no specialised kernel was built). A name does not tell the protocol that ran (nccl issue 1595), and not
always the collective: arguments come first.
"""

from __future__ import annotations

import re

# Kineto's categories (ActivityType.h), and what it wrote in 2021.
KERNEL_CATEGORIES = ("kernel", "Kernel")
MEMORY_CATEGORIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
CPU_CATEGORIES = ("cpu_op", "Operator")
MARK_CATEGORIES = ("user_annotation",)
GPU_MARK_CATEGORIES = ("gpu_user_annotation",)
RUNTIME_CATEGORIES = ("cuda_runtime", "cuda_driver", "Runtime", "xpu_runtime", "xpu_driver", "privateuse1_runtime")

COMMUNICATION = re.compile(r"(void )?(nccl|rccl)", re.IGNORECASE)  # at the start of a kernel's name
SYNCHRONISATION = frozenset(("Event Sync", "Stream Sync", "Context Sync", "Stream Wait Event"))  # waiting, no kernel
LAUNCH = re.compile(r"launch|memcpy|memset", re.IGNORECASE)  # runtime calls that start something on the device
# Annotations that torch's process groups make (`opTypeToString` after the backend's name).
DISTRIBUTED_MARK = re.compile(r"(nccl|gloo|mpi|ucc|xccl):")
MARK = re.compile(DISTRIBUTED_MARK.pattern + r"|ProfilerStep#")  # wherever they stand, these are annotations

_WORDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}

_DTYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "half": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "int": ("int32", 4),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "complexfloat": ("complex64", 8),
    "complex<float>": ("complex64", 8),
    "complexdouble": ("complex128", 16),
    "complex<double>": ("complex128", 16),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
}
_BYTES = dict(_DTYPES.values())


def collective(name: str) -> str | None:
    """The collective that a kernel, an annotation or the argument `Collective name` speaks of; None if it does not say.

    >>> collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"), collective("_allgather_base")
    ('all_reduce', 'all_gather')
    """
    plain = re.sub(r"[^a-z0-9]", "", re.split(r"[(<]", name, maxsplit=1)[0].lower())
    for word, collective in _WORDS.items():
        if word in plain:
            return collective
    return None


def dtype(name: str | None) -> str | None:
    """torch's name of a dtype that a trace writes as Float, float, c10::BFloat16 or long int."""
    if not name:
        return None
    plain = name.lower().removeprefix("c10::")
    return _DTYPES.get(plain, (plain, None))[0]


def element_bytes(dtype: str | None) -> int | None:
    """Bytes of an element of a torch dtype; None if it is not known."""
    return _BYTES.get(dtype)
