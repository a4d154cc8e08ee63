"""How a function and its arguments get to the ranks, and a result back: by value, with cloudpickle."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

_registry = threading.Lock()


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call `fn(*args)` as bytes. TypeError, one sentence, that names what cannot be sent."""
    with _module_by_value(fn):
        try:
            return _dump(_Pickler, (fn, args))
        except Exception as error:
            reason = str(error)
        name = getattr(fn, "__qualname__", repr(fn))
        for part, value in _parts(fn, args):
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                reason = f"{part} does not travel ({error})"
                break
    raise TypeError(f"{name} cannot be sent to the ranks: {reason}")


def _parts(fn: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """What travels with a call: its arguments, the globals and the captured variables that the function uses."""
    yield from ((f"argument {i}", arg) for i, arg in enumerate(args))
    function = getattr(fn, "__func__", fn)
    if code := getattr(function, "__code__", None):
        variables = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        variables |= {name: cell.cell_contents for name, cell in cells}
        yield from ((f"the variable {name!r} that it uses", value) for name, value in variables.items())


@contextlib.contextmanager
def _module_by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Let cloudpickle send the function's module by value too, where a rank could not import it."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    with _registry:
        try:
            importable = module is None or importlib.util.find_spec(module.__name__) is not None
        except (ImportError, ValueError):  # __main__ (by value anyway), or a module made by hand
            importable = module.__name__ == "__main__"
        if not importable:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if not importable:
                cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but code keeps the name of its file: tracebacks from the ranks then show the cell or script."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            make, args = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if arg == "<dynamic-code>" else arg for arg in args)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """A result as bytes. CUDA tensors become CPU tensors, so that the reader needs no GPU. Runs in a rank."""
    import torch

    class Pickler(_Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.is_cuda:
                return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(2)
            return super().reducer_override(obj)

    return _dump(Pickler, value)


def _dump(pickler: type[cloudpickle.Pickler], value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return buffer.getvalue()
