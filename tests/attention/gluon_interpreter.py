"""Runs kernels in Gluon whose warps have roles, on a CPU, from their own source: Gluon has no interpreter.

Roles take turns in a random order. What is asynchronous ends late, at any time or when it is waited for: until then
what it writes is NaN, and what it reads must stay as it is. Roles that wait for each other for ever are an error.

A role is one thread here, so what its threads do to each other is not seen; nor are layouts, memory's order and what
wgmma does to registers.
"""

import itertools
import math
import random
import threading
from collections import deque
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from tests.attention.launches import assert_arguments


class Interpreter:
    """In place of a kernel: `Interpreter(kernel, seed)[grid](...)` runs its programs one after the other."""

    def __init__(self, kernel: Any, seed: int) -> None:
        self.kernel, self.random = kernel, random.Random(seed)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: self._run(grid, arguments)

    def _run(self, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        assert_arguments(self.kernel, given)
        arguments = {name: _argument(x) for name, x in given.items() if name in self.kernel.arg_names}
        for program in itertools.product(*map(range, grid)):
            machine = Machine(program, grid, self.random)
            translate(self.kernel, machine.names(), {})(**arguments)


def translate(function: Any, names: dict[str, Any], done: dict[int, Any]) -> Any:
    """A function of a kernel as one of Python, which finds these `names` in place of Gluon's."""
    if id(function) not in done:
        raw = function.fn
        scope: dict[str, Any] = {}
        done[id(function)] = FunctionType(raw.__code__, scope)
        for name in {*raw.__code__.co_names} & {*raw.__globals__}:
            value = names.get(name, raw.__globals__[name])
            value = translate(value, names, done) if isinstance(value, JITFunction) else value
            scope[name] = getattr(value, "value", value)  # of a constexpr
    return done[id(function)]


class Number(int):
    """A number of a kernel."""

    def __floordiv__(self, other: int) -> "Number":
        return Number(int(self) // other)

    def to(self, _dtype: torch.dtype) -> int:
        return int(self)


class Values(Tensor):
    """A tensor of a kernel."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(shape=list(self.shape), layout=None)


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.at + more)

    def __sub__(self, less: int) -> "Pointer":
        return self + -less

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.memory, self.at[index])

    def load(self, mask: Any = None, other: Any = None) -> Any:
        if not isinstance(self.at, Tensor):
            return other if mask is not None and not mask else self.memory[self._inside(self.at)].item()
        ok = torch.ones_like(self.at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(self.at.shape)
        unknown = torch.nan if self.memory.is_floating_point() else 10**9
        found = torch.full(self.at.shape, unknown if other is None else other, dtype=self.memory.dtype)
        found[ok] = self.memory[self._inside(self.at[ok])]
        return found.as_subclass(Values)

    def store(self, value: Tensor, mask: Any) -> None:
        ok = torch.as_tensor(mask).expand(self.at.shape)
        assert value.shape == self.at.shape
        self.memory[self._inside(self.at[ok])] = value[ok].to(self.memory.dtype).as_subclass(Tensor)

    def _inside(self, at: Any) -> Any:
        assert (torch.as_tensor(at) >= 0).all()
        return at.as_subclass(Tensor) if isinstance(at, Tensor) else at


def _argument(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        block = SimpleNamespace(shape=x.block_shape, nbytes=math.prod(x.block_shape) * x.base.element_size())
        memory = x.base.as_strided(x.shape, x.strides)
        return SimpleNamespace(memory=memory, block_type=block, dtype=x.base.dtype, layout=None)
    if isinstance(x, Tensor):
        size = x.untyped_storage().nbytes() // x.element_size()
        return Pointer(x.as_strided((size - x.storage_offset(),), (1,)))
    return x


class SharedMemory:
    """A tensor in shared memory, or a part of one."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.dtype = memory, memory.dtype
        self.type = SimpleNamespace(shape=list(memory.shape))

    def index(self, at: int) -> "SharedMemory":
        return SharedMemory(self.memory[at])

    def slice(self, start: int, length: int) -> "SharedMemory":
        return SharedMemory(self.memory[start : start + length])

    def permute(self, order: list[int]) -> "SharedMemory":
        return SharedMemory(self.memory.permute(order))

    def load(self, _layout: Any = None) -> Tensor:
        return self.memory.clone().as_subclass(Values)

    def store(self, value: Tensor) -> None:
        self.memory.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that are expected."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phases = 0

    def advance(self, arrivals: int, more_bytes: int) -> None:
        self.missing -= arrivals
        self.bytes += more_bytes
        assert self.missing >= 0, "more arrivals than the barrier was made for"
        if self.missing == self.bytes == 0:
            self.missing, self.phases = self.count, self.phases + 1

    def passed(self, parity: int) -> bool:
        return (self.phases - 1) % 2 == parity


class Barriers:
    """Barriers of several stages."""

    def __init__(self, stages: int) -> None:
        self.stages = [Barrier() for _ in range(stages)]

    def index(self, at: int) -> Barrier:
        return self.stages[at]


class Role:
    """One role: its thread, and what it waits for."""

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.ready: Callable[[], bool] = lambda: True
        self.go, self.ended = threading.Semaphore(0), False
        self.products: deque[Callable[[], None]] = deque()
        self.copies: list[Callable[[], None]] = []
        self.call = lambda: function(*arguments)
        self.result: Any = None


class Stopped(Exception):
    """Another role failed."""


class Machine:
    """A program's roles, its copies that are under way, and whose turn it is."""

    def __init__(self, program: tuple[int, ...], programs: tuple[int, ...], order: random.Random) -> None:
        self.program, self.programs, self.random = program, programs, order
        self.roles: list[Role] = []
        self.under_way: list[Callable[[], None]] = []
        self.turn, self.thread = threading.Semaphore(0), threading.local()
        self.error: BaseException | None = None
        self.polled: set[int] = set()

    def run(self, roles: list[tuple[Any, ...]], _warps: list[int], _registers: list[int]) -> Any:
        """All roles, to their ends: the result of the first; raises the first error of one."""
        self.roles = [Role(*role) for role in roles]
        threads = [threading.Thread(target=self._live, args=(role,)) for role in self.roles]
        for thread in threads:
            thread.start()
        try:
            self._take_turns([self.random.choice([1, 1, 5, 30]) for _ in (*self.roles, None)])
        except Exception as error:
            self.error = self.error or error
        for role, thread in zip(self.roles, threads, strict=True):
            role.go.release()
            thread.join()
        if self.error:
            raise self.error
        return self.roles[0].result

    def _take_turns(self, haste: list[int]) -> None:
        """Until all roles have ended, let one that can go on take a step, or end one of the copies under way."""
        while not self.error and not all(role.ended for role in self.roles):
            ready = [index for index, role in enumerate(self.roles) if not role.ended and role.ready()]
            ready += [len(self.roles)] if self.under_way else []
            assert ready, "roles wait for each other"
            (index,) = self.random.choices(ready, [haste[index] for index in ready])
            if index == len(self.roles):
                self.under_way.pop(self.random.randrange(len(self.under_way)))()
            else:
                self.roles[index].go.release()
                self.turn.acquire()
        assert self.error or not self.under_way, "copies that nobody waits for"

    def _live(self, role: Role) -> None:
        self.thread.role = role
        try:
            self._pause(role)
            role.result = role.call()
            assert not role.products
            assert not role.copies
        except Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        role.ended = True
        self.turn.release()

    def wait(self, ready: Callable[[], bool] = lambda: True) -> Role:
        """Let others have their turn until `ready`."""
        role: Role = self.thread.role
        role.ready = ready
        self.turn.release()
        self._pause(role)
        return role

    def _pause(self, role: Role) -> None:
        role.go.acquire()
        if self.error:
            raise Stopped

    def load_tile(self, desc: Any, corner: list[int], bar: Barrier, smem: SharedMemory) -> None:
        """A bulk copy; what lies past the end is zero."""
        smem.memory.fill_(torch.nan)

        def land() -> None:
            found = desc.memory[
                tuple(slice(first, first + size) for first, size in zip(corner, smem.memory.shape, strict=True))
            ]
            smem.memory.zero_()[: len(found)] = found
            bar.advance(0, -desc.block_type.nbytes)

        self.under_way.append(land)

    def gather(self, smem: SharedMemory, pointer: Pointer, mask: Tensor) -> None:
        """An asynchronous copy; what is masked is zero."""
        smem.memory.fill_(torch.nan)
        found = pointer.load(mask, 0)
        self.thread.role.copies.append(lambda: smem.memory.copy_(found))

    def end_copies(self, _left: int) -> None:
        role = self.wait()
        for copy in role.copies:
            copy()
        role.copies.clear()

    def multiply(self, a: Any, b: SharedMemory, total: Tensor, *, use_acc: bool = True, is_async: bool) -> list[Tensor]:
        assert is_async
        result: list[Tensor] = []
        given = [x.memory if isinstance(x, SharedMemory) else x for x in (a, b)]
        before = [x.clone() for x in given]

        def end() -> None:
            for x, then in zip(given, before, strict=True):
                assert torch.equal(x.nan_to_num(7), then.nan_to_num(7)), "an operand of a product was overwritten"
            product = given[0].float() @ given[1].float()
            result.append((product + total if use_acc else product).as_subclass(Values))

        self.thread.role.products.append(end)
        return result

    def end_products(self, left: int, deps: list[list[Tensor]]) -> Any:
        role = self.wait()
        while len(role.products) > left:
            role.products.popleft()()
        values = [value for (value,) in deps]
        return values[0] if len(values) == 1 else values

    def expect(self, bar: Barrier, size: int) -> None:
        bar.advance(1, size)

    def wait_for(self, bar: Barrier, parity: int, pred: bool = True) -> None:
        self.wait(lambda: not pred or bar.passed(parity))

    def arrive(self, bar: Barrier, pred: bool = True) -> None:
        bar.advance(int(pred), 0)

    def assembly(self, code: str, _constraints: str, given: list[Any], **_options: Any) -> int:
        """Turns between programs, which run here one after the other: none waits for a later one."""
        self.wait()
        pointer, *values = given
        if code.startswith("ld.acquire.gpu.global.b32"):
            assert pointer.at not in self.polled, "a turn that does not come"
            self.polled.add(pointer.at)
        else:
            assert "st.relaxed.gpu.global.b32" in code
            assert values == [pointer.load() + 1], "a turn out of order"
            pointer.memory[pointer.at] = values[0]
        return int(pointer.load())

    def names(self) -> dict[str, Any]:
        """What Gluon's names mean in a kernel."""

        def init(bar: Barrier, count: int) -> None:
            bar.count = bar.missing = count

        nothing = lambda *_, **__: None  # noqa: E731
        layouts = dict.fromkeys(("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout"), nothing)
        numbers = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
        gl = SimpleNamespace(
            **layouts,
            **numbers,
            NVMMASharedLayout=type("", (), {"__new__": nothing, "get_default_for": nothing}),
            allocate_shared_memory=_allocate,
            warp_specialize=self.run,
            program_id=lambda axis: Number(self.program[axis]),
            num_programs=lambda axis: self.programs[axis],
            inline_asm_elementwise=self.assembly,
            static_range=range,
            cdiv=lambda a, b: -(-a // b),
            arange=lambda first, stop, _layout: torch.arange(first, stop).as_subclass(Values),
            zeros=lambda shape, dtype, _layout: torch.zeros(shape, dtype=dtype).as_subclass(Values),
            full=lambda shape, value, dtype, _layout: torch.full(shape, value, dtype=dtype).as_subclass(Values),
            convert_layout=lambda x, _layout: x,
            where=lambda ok, a, b: torch.where(ok, a, b) if isinstance(ok, Tensor) else (a if ok else b),
            minimum=lambda a, b: a.clamp(max=b) if isinstance(a, Tensor) else min(a, b),
            maximum=lambda a, b: a.clamp(min=b) if isinstance(a, Tensor) else max(a, b),
            max=lambda x, axis: x.amax(axis) if x.dim() > 1 else x.amax(axis).item(),
            sum=lambda x, axis: x.sum(axis),
            exp2=torch.exp2,
            log2=torch.log2,
            load=lambda at, mask=None, other=None, cache_modifier="": at.load(mask, other),
            store=lambda at, value, mask: at.store(value, mask),
        )
        return {
            "gl": gl,
            "mbarrier": SimpleNamespace(
                init=init, wait=self.wait_for, arrive=self.arrive, expect=self.expect, MBarrierLayout=lambda: Barriers
            ),
            "copy_to_shared": self.load_tile,
            "gather_to_shared": self.gather,
            "thread_barrier": nothing,
            "async_copy": SimpleNamespace(commit_group=nothing, wait_group=self.end_copies),
            "fence_async_shared": nothing,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.end_products,
        }


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if layout is Barriers:
        return Barriers(shape[0]) if len(shape) > 1 else Barrier()
    return SharedMemory(torch.full(shape, torch.nan if dtype.is_floating_point else 10**9, dtype=dtype))
