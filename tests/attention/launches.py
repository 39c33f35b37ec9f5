"""Counts what attention would launch on a GPU, without one: Triton kernels, and torch operators that compute."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from moba_train.attention.kernels import table

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_thread = threading.local()


class counted_launches(TorchDispatchMode):
    """Inside, on this thread: counts by name what a GPU would run. Tensors are on the device `meta`."""

    def __enter__(self) -> Counter[str]:
        super().__enter__()
        self.counts: Counter[str] = Counter()
        _thread.counts = self.counts
        return self.counts

    def __exit__(self, *error: Any) -> None:
        del _thread.counts
        super().__exit__(*error)

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        name = operator.overloadpacket.__name__
        if not operator.is_view and name not in _ALLOCATIONS:
            self.counts[name] += 1
        return operator(*arguments, **(named or {}))


def assert_arguments(kernel: Any, named: dict[str, Any]) -> None:
    """A launch by name has every parameter of the kernel, and otherwise the compiler's options alone, as on a GPU."""
    options = {"grid", "warmup", "num_warps", "num_stages", "maxnreg"}
    assert {*kernel.arg_names} == named.keys() - options, kernel.__name__


@contextmanager
def kernels_not_run() -> Iterator[None]:
    """Inside, Triton kernels are launched for tensors of any device, but only counted."""

    def launch(kernel: JITFunction, *arguments: Any, **named: Any) -> None:
        assert_arguments(kernel, named)
        if (counts := getattr(_thread, "counts", None)) is not None:
            counts[kernel.__name__] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", launch)
        patch.setattr(table, "interpreted", lambda: True)
        yield
