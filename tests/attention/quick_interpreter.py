"""Triton's interpreter without six detours of its own, so that interpreted kernels take less than a third of the time.

The results stay the same bits, and what it checks stays checked. What another version of Triton does not have is left
alone: it runs at its own speed.
"""

import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from moba_train.attention.kernels.table import interpreted


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


def _make_types_once(block_type: Any, tensor: Any) -> None:
    """Every result makes its type anew, and from it a shape, each number of which is an object of three."""
    make_type = block_type.__init__
    types: dict[tuple[Any, ...], Any] = {}

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = id(element_ty), *(getattr(size, "value", size) for size in shape)
        if key not in types:
            types[key] = object.__new__(cls)
            make_type(types[key], element_ty, shape)
        return types[key]

    @functools.cache
    def sizes(*shape: int) -> tuple[Any, Any]:
        return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(int(np.prod(shape, dtype=int)))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(*type.shape) if type.is_block() else sizes()

    block_type.__new__ = new
    block_type.__init__ = lambda self, element_ty, shape: None
    tensor.__init__ = make_tensor


def _broadcast_by_numpy(semantic: Any) -> None:
    """Triton compares shapes as tuples of its own, each of which makes a type, and adds axes one by one. Its rules are
    NumPy's: a block's data have its shape, a scalar's are an array of one element."""

    def widened(self: Any, x: Any, shape: tuple[int, ...]) -> Any:
        if x.type.is_block() and x.handle.data.shape == shape:
            return x
        handle = interpreter.TensorHandle(np.broadcast_to(x.handle.data, shape), x.handle.dtype.scalar)
        return self.tensor(handle, tl.block_type(x.type.scalar, [*shape]))

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        shapes = [x.handle.data.shape if x.type.is_block() else () for x in (lhs, rhs)]
        if shapes[0] == shapes[1]:
            return lhs, rhs
        shape = np.broadcast_shapes(*shapes)
        return widened(self, lhs, shape), widened(self, rhs, shape)

    semantic.broadcast_impl_value = broadcast


def _check_overflow_at_once(semantic: Any) -> None:
    """That integers fit is checked by seven more operations of the language for each sum and product."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        dtype = lhs.type.scalar
        if dtype.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        result = operations[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        fits = dtype.get_int_min_value() <= result.min() and result.max() <= dtype.get_int_max_value()
        assert fits, f"{dtype} overflow detected for operation {binary_op.__name__}"

    semantic.binary_op_sanitize_overflow_impl = check


@functools.cache
def quicken() -> None:
    """Apply all six to this process, which must have been started with TRITON_INTERPRET=1."""
    assert interpreted(), "start this with TRITON_INTERPRET=1, as .ci/run interpreted does"
    if "_patch_lang(self.fn)" in inspect.getsource(interpreter.InterpretedFunction.__call__):
        _patch_once(interpreter.InterpretedFunction)
    if "np_types" in inspect.getsource(interpreter._get_np_dtype):
        _remember_dtypes()
    if hasattr(tl.standard, "_xor_combine"):
        _reduce_xor_at_once(interpreter.ReduceOps)
    if [*inspect.signature(tl.block_type).parameters] == ["element_ty", "shape"]:
        _make_types_once(tl.block_type, tl.tensor)
    if hasattr(TritonSemantic, "broadcast_impl_value"):
        _broadcast_by_numpy(TritonSemantic)
    if hasattr(TritonSemantic, "binary_op_sanitize_overflow_impl"):
        _check_overflow_at_once(TritonSemantic)
