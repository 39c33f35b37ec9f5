"""Which kernels a GPU gets depends on the release of Triton; a user is told once where it costs speed."""

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")

from moba_train.attention.kernels.common import call  # noqa: E402
from moba_train.attention.kernels.common.call import BlockCall  # noqa: E402
from moba_train.attention.layout import packed_layout  # noqa: E402


class Paths(NamedTuple):
    """Which kernels in Gluon a call takes."""

    warp_specialised: bool
    one_pass: bool
    gathered: bool


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Paths]]:
    """The paths of a call with tensors that seem to be on a GPU."""

    def paths(block_size: int, head_dim: int = 128) -> Paths:
        q, k, v = (torch.empty(4096, heads, head_dim, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        selected = torch.empty(4, 4096, 2, dtype=torch.int32, device="cuda")
        one = BlockCall.from_tensors(q, k, v, packed_layout([4096], "cpu"), selected, block_size, 1.0)
        return Paths(one.warp_specialised, one.one_pass, one.gathered)

    monkeypatch.setattr(call, "block_tables", lambda *_: None)
    monkeypatch.setattr(call, "heads_side_by_side", lambda x: x)  # which asks for an address
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    call._suits_release.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield paths
    call._suits_release.cache_clear()


def test_another_release_of_triton_takes_slower_kernels_on_hopper_and_is_named_once(
    paths: Callable[..., Paths], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert not any([*paths(512), *paths(128), *paths(4096)])
    (warning,) = found
    for part in (
        "Triton 3.7.1 is",
        "need 3.6",
        "gradients with blocks of 128, 256, 512, 1024, 2048, 4096 keys",
        "slower",
    ):
        assert part in str(warning.message), part


def test_nothing_is_said_where_the_release_costs_nothing(
    paths: Callable[..., Paths], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(triton, "__version__", "3.6.0")
        assert paths(512) == Paths(warp_specialised=True, one_pass=True, gathered=False)
        assert paths(128) == Paths(warp_specialised=False, one_pass=False, gathered=True)
        monkeypatch.setattr(triton, "__version__", "3.7.1")
        assert not any([*paths(64), *paths(512, head_dim=64)])  # Triton's in any case
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
        assert not any(paths(512))
