"""Records of launches, with kernels that run on the CPU: they are given addresses in place of tensors, as on a GPU."""

import ctypes
import gc
import runpy
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from moba_train.attention.kernels.common import launch as launches
from moba_train.attention.kernels.common.launch import launch, replayed
from moba_train.attention.layout import Layout, packed_layout


class Parameter:
    def __init__(self, name: str, is_constexpr: bool) -> None:
        self.name = name
        self.is_constexpr = is_constexpr


class AddKernel:
    """out = SCALE * a + b, of float32 [N]; it counts how often Triton would have had to look at its arguments."""

    params = [Parameter(name, name.isupper()) for name in ("a", "b", "out", "SCALE", "N")]
    asked = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(a: Any, b: Any, out: Any, SCALE: int, N: int) -> "Compiled":
            self.asked += 1
            compiled = Compiled()
            knobs.runtime.launch_enter_hook({})
            compiled[(*grid, 1, 1)[:3]](a, b, out, SCALE, N)
            return compiled

        return run


class Compiled:
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 3

        def run(a: Any, b: Any, out: Any, scale: int, count: int) -> None:
            a, b, out = (numbers(x, count) for x in (a, b, out))
            out[:] = scale * a + b

        return run


def numbers(x: Any, count: int) -> np.ndarray:
    """The float32 numbers at an address, or of a tensor."""
    x = x.base if isinstance(x, TensorDescriptor) else x
    address = x.data_ptr() if isinstance(x, Tensor) else x
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


@pytest.fixture
def add() -> AddKernel:
    return AddKernel()


def make(add: AddKernel) -> Any:
    """(scale * a + b + c, the same and a table of the layout), through a temporary buffer and a descriptor."""

    @replayed
    def function(a: Tensor, pair: tuple[Tensor, Tensor], layout: Layout, *, scale: int) -> tuple[Tensor, Tensor]:
        table = layout.cached("table", lambda: torch.arange(64, dtype=torch.float32))
        b, c = pair
        count = len(a)
        both = torch.empty(2, count)
        launch(add, (1,), a=a, b=b, out=both[1], SCALE=scale, N=count)
        launch(add, (1,), a=both[1], b=c, out=both[0], SCALE=1, N=count)
        out, other = torch.empty_like(a), a.new_empty(count)
        launch(add, (1, 1), a=both[1], b=c, out=out, SCALE=1, N=count)
        descriptor = TensorDescriptor(both, [2, count], [count, 1], [1, 16])
        launch(add, (1,), a=descriptor, b=table, out=other, SCALE=1, N=count)
        return out, other

    return function


def test_later_calls_repeat_the_launches_for_other_tensors(add: AddKernel) -> None:
    function, layout = make(add), packed_layout([64])
    for turn in range(5):
        a, b, c = torch.randn(3, 64).unbind()
        out, other = function(a, (b, c), layout, scale=2)
        torch.testing.assert_close(out, 2 * a + b + c, rtol=0, atol=1e-6)
        torch.testing.assert_close(other, out + torch.arange(64))
        assert add.asked == 4 * min(turn + 1, 2)
    function(a, (b, c), packed_layout([64]), scale=2)
    assert add.asked == 12, "another layout has records of its own"


def test_the_switch_turns_repetition_off_and_changes_no_bit(add: AddKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    function = make(add)
    tensors = [torch.randn(3, 64).unbind() for _ in range(4)]

    def run() -> list[Tensor]:
        layout = packed_layout([64])
        return [x for a, b, c in tensors for x in function(a, (b, c), layout, scale=2)]

    repeated, asked = run(), add.asked
    monkeypatch.setattr(launches, "REPLAY", False)
    assert all(torch.equal(x, y) for x, y in zip(repeated, run(), strict=True))
    assert (asked, add.asked - asked) == (8, 16)


@pytest.mark.parametrize(("value", "read"), [("0", False), ("1", True)])
def test_the_switch_is_an_environment_variable(value: str, read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOBA_TRAIN_REPLAY", value)
    assert runpy.run_path(launches.__file__)["REPLAY"] is read


def test_shapes_options_alignment_and_equal_tensors_have_records_of_their_own(add: AddKernel) -> None:
    function, layout = make(add), packed_layout([64])
    flat = torch.randn(4, 65)
    aligned, off = torch.randn(4, 64), flat.flatten()[1:257].view(4, 64)
    for a, b, c, scale in (
        (aligned[0], aligned[1], aligned[2], 2),
        (aligned[0], aligned[1], aligned[2], 3),
        (aligned[0], aligned[0], aligned[2], 3),
        (aligned[0], aligned[1], aligned[1], 3),
        (off[0], aligned[1], aligned[2], 3),
        (aligned[0, :32], aligned[1, :32], aligned[2, :32], 3),
    ):
        before = add.asked
        for _ in range(3):
            out, _ = function(a, (b, c), layout, scale=scale)
            torch.testing.assert_close(out, scale * a + b + c, rtol=0, atol=1e-6)
        assert add.asked == before + 8


def test_what_copies_is_never_recorded(add: AddKernel) -> None:
    @replayed
    def function(a: Tensor, layout: Layout) -> Tensor:
        out = torch.empty(32)
        other = out.zero_() if copies == "fill" else a.contiguous()
        launch(add, (1,), a=a.contiguous(), b=other, out=out, SCALE=1, N=32)
        return out

    for copies in ("nothing", "fill", "slice"):
        layout, before = packed_layout([32]), add.asked
        for _ in range(4):
            a = torch.randn(32, 2)[:, 0] if copies == "slice" else torch.randn(32)
            assert torch.equal(function(a, layout), a if copies == "fill" else 2 * a)
        assert add.asked - before == (2 if copies == "nothing" else 4)


def test_a_launch_that_goes_past_the_recorder_forbids_a_record(add: AddKernel) -> None:
    @replayed
    def function(a: Tensor, layout: Layout) -> Tensor:
        out = torch.empty(32)
        launch(add, (1,), a=a, b=a, out=out, SCALE=1, N=32)
        add[(1,)](out, a, out, SCALE=1, N=32)
        return out

    layout = packed_layout([32])
    for _ in range(4):
        a = torch.randn(32)
        torch.testing.assert_close(function(a, layout), 3 * a)
    assert add.asked == 8
    assert not knobs.runtime.launch_enter_hook.calls


def test_zeros_are_zero_again(add: AddKernel) -> None:
    @replayed
    def function(a: Tensor, layout: Layout) -> Tensor:
        total = torch.zeros_like(a)
        launch(add, (1,), a=a, b=total, out=total, SCALE=1, N=32)
        launch(add, (1,), a=a, b=total, out=total, SCALE=1, N=32)
        return total

    layout = packed_layout([32])
    for _ in range(4):
        a = torch.randn(32)
        assert torch.equal(function(a, layout), 2 * a)
    assert add.asked == 4


def test_a_part_of_a_given_tensor_is_found_again_or_refused(add: AddKernel) -> None:
    @replayed
    def function(a: Tensor, layout: Layout) -> Tensor:
        out = torch.empty(16)
        launch(add, (1,), a=a[16:], b=a[:16], out=out, SCALE=1, N=16)
        return out

    layout = packed_layout([32])
    for _ in range(4):
        a = torch.randn(32)
        assert torch.equal(function(a, layout), a[16:] + a[:16])


def test_records_keep_no_tensor_alive(add: AddKernel) -> None:
    function, layout = make(add), packed_layout([64])
    alive = []
    for _ in range(4):
        tensors = torch.randn(64), torch.randn(64), torch.randn(64)
        results = function(tensors[0], tensors[1:], layout, scale=2)
        alive += [weakref.ref(x) for x in (*tensors, *results)]
    del tensors, results
    gc.collect()
    assert not any(x() is not None for x in alive)


@pytest.mark.parametrize(("version", "scratch", "direct"), [("3.6.0", 0, 3), ("3.6.0", 8, 0), ("3.7.0", 0, 0)])
def test_known_launchers_are_called_directly_on_the_current_stream(
    add: AddKernel, version: str, scratch: int, direct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    seen: list[Any] = []

    def launcher(*given: Any) -> None:
        grid, where, function, options, arguments = given[:3], given[3], given[4], given[5:13], given[13:]
        assert (grid, function) == ((1, 1, 1), "function")
        assert options == (False, True, None, None, "metadata", None, None, None)
        seen.append(where)
        Compiled()[grid](*arguments)

    sizes = {"global_scratch_size": scratch, "profile_scratch_size": 0}
    run = SimpleNamespace(launch=launcher, launch_cooperative_grid=False, launch_pdl=True, **sizes)
    for name, value in {"run": run, "function": "function", "packed_metadata": "metadata"}.items():
        monkeypatch.setattr(Compiled, name, value, raising=False)
    active = SimpleNamespace(get_current_device=lambda: 5, get_current_stream=lambda device: (device, used[-1]))
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr("triton.__version__", version)

    @replayed
    def function(a: Tensor, layout: Layout) -> Tensor:
        out = torch.empty(32)
        launch(add, (1,), a=a, b=a, out=out, SCALE=1, N=32)
        return out

    layout = packed_layout([32])
    for stream in range(5):
        used.append(stream)
        a = torch.randn(32)
        assert torch.equal(function(a, layout), 2 * a)
    assert add.asked == 2
    assert seen == [(5, 2), (5, 3), (5, 4)][:direct]
