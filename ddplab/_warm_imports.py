"""Imports what the notebooks of the book do; importing this module is all there is to it. See `_warm.py`.

It happens with one thread, because OpenBLAS and OpenMP would start a pool of them, and a fork has none of its
parent's. matplotlib takes its backend from the environment when it is imported: the one that a kernel would set.
"""

import importlib
import os

from ddplab._forkserver import kept
from ddplab._hugepages import collapse

_given = dict(os.environ)
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
_others = ["ipykernel.kernelapp", "matplotlib.pyplot", "numpy.random", "seaborn"]
_others += ["torch._dynamo", "torchvision", "myst_nb.core.read"]
with kept():
    for _name in _others:
        importlib.import_module(_name)
    for _name in ["_rank", "_supervisor", "_warm", "notebooks"]:
        importlib.import_module(f"ddplab.{_name}")
    os.environ.clear()
    os.environ.update(_given)
    # What each notebook would find out again: whether hosts come up, and what is installed.
    importlib.import_module("ddplab.hosts").hosts_problem()
    importlib.import_module("ddplab.stage").installed()
collapse()
