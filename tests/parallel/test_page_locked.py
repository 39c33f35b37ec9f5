"""Page-locked memory has the size that is asked for, serves copies in both directions, and is given back."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moba_train.parallel import offload as page_locked
from moba_train.parallel.offload import PageLockedMemory

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux with huge pages")
def test_memory_asks_for_huge_pages_and_is_not_copied_by_a_fork() -> None:
    """Shared memory gets small pages, which take longer to lock; a fork would copy locked private pages at once."""
    buffer = PageLockedMemory().empty(1 << 22, CPU)
    (flags,) = (flags for addresses, flags in _mappings() if buffer.data_ptr() in addresses)
    assert {"hg", "dc"} <= flags
    assert "sh" not in flags


def _mappings() -> Iterator[tuple[range, set[str]]]:
    """The addresses of each part of this process's memory, and the kernel's flags of it."""
    addresses = range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:":
            yield addresses, set(rest)
        elif not first.endswith(":"):
            addresses = range(*(int(bound, 16) for bound in first.split("-")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_memory_for_a_copy_has_just_its_bytes_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A larger storage would take memory that the plan of a run does not count."""
    tensor = torch.zeros(shape, dtype=dtype)
    copy = PageLockedMemory().empty_like(tensor.mT if tensor.ndim == 2 else tensor)
    assert (copy.dtype, copy.is_contiguous()) == (dtype, True)
    assert copy.shape == (shape[::-1] if len(shape) == 2 else shape)
    assert copy.untyped_storage().nbytes() == tensor.nbytes


def test_a_copy_outlives_what_allocated_it() -> None:
    """A save that takes longer than the end of training waits for reads its copies still."""
    copy = PageLockedMemory().empty_like(torch.zeros(1 << 20)).fill_(3.0)
    assert torch.all(copy == 3.0)


def test_a_gpu_that_never_becomes_idle_keeps_its_memory_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank whose others have gone must be able to end: what its GPU waits for never comes."""
    idle, unlocked = threading.Event(), threading.Event()
    calls: list[int] = []

    def unlock(address: int) -> None:
        calls.append(address)
        unlocked.set()

    driver = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=unlock)
    monkeypatch.setattr(page_locked, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: idle.wait(60))
    memory = PageLockedMemory()
    address = memory.empty(1 << 20, torch.device("cuda", 3)).data_ptr()
    del memory
    gc.collect()
    assert calls == [3]
    assert any(address in addresses for addresses, _ in _mappings()), "the driver may write there still"
    idle.set()
    assert unlocked.wait(60)
    assert calls == [3, address]


def test_memory_of_an_idle_gpu_is_unlocked_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of it before anyone goes on: the next stage locks its own."""
    unlocked: list[int] = []

    def unlock(address: int) -> None:
        time.sleep(0.05)
        unlocked.append(address)

    driver = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=unlock)
    monkeypatch.setattr(page_locked, "LONGEST_WAIT_S", 0.1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    for name in ("check_error", "current_device", "set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    memory = PageLockedMemory()
    locked = [memory.empty(1 << 12, torch.device("cuda")).data_ptr() for _ in range(8)]
    del memory
    gc.collect()
    assert sorted(unlocked) == sorted(locked)


@pytest.mark.gpu
def test_a_gpu_copies_to_it_while_the_host_goes_on_and_it_is_unlocked_in_the_end() -> None:
    values = torch.arange(1 << 26, device="cuda")
    for _ in range(3):  # the same addresses again: locked ones would be refused
        memory = PageLockedMemory()
        copy = memory.empty_like(values)
        assert copy.is_pinned()
        torch.cuda._sleep(2_000_000_000)  # about a second
        copy.copy_(values, non_blocking=True)
        assert not torch.cuda.current_stream().query(), "the host waited for the copy"
        del memory
        assert not copy.is_pinned()
        assert torch.equal(copy, values.cpu())
