"""Triton's interpreter without three detours of its own, so that interpreted kernels take half the time.

The results stay the same bits. What another version of Triton does not have is left alone: it runs at its own speed.
"""

import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _patch_once(function: Any) -> None:
    """A launch replaces the language's functions, and Triton does so again at every call of a device function: 1 ms.
    Once for each module is enough: what a launch replaces stays replaced until it ends."""
    original = interpreter._patch_lang
    patched: set[int] = set()

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            original(self.fn)
            patched.add(module)
        return self.rewrite()(*arguments, **named)

    function.__call__ = call


def _remember_dtypes() -> None:
    """Triton builds a table of all dtypes at each look-up."""
    original = interpreter._get_np_dtype
    of_scalar = functools.cache(original)
    pointer = np.dtype(np.uint64)

    def get(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        return pointer if scalar.is_ptr() else of_scalar(scalar)

    interpreter._get_np_dtype = get


def _reduce_xor_at_once(reduction: Any) -> None:
    """Sorting takes its partners by xor, which Triton computes element by element."""
    original = reduction.apply_impl

    def apply(self: Any, input: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return original(self, input)
        (values,) = input
        result = np.bitwise_xor.reduce(values.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(result, values.dtype)]

    reduction.apply_impl = apply


def quicken() -> None:
    """Apply all three to this process."""
    if "_patch_lang(self.fn)" in inspect.getsource(interpreter.InterpretedFunction.__call__):
        _patch_once(interpreter.InterpretedFunction)
    if "np_types" in inspect.getsource(interpreter._get_np_dtype):
        _remember_dtypes()
    if hasattr(tl.standard, "_xor_combine"):
        _reduce_xor_at_once(interpreter.ReduceOps)
