"""Clipping is torch's, bit by bit."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moba_train.optim.gradients import Gradients


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def layers() -> nn.Module:
    """Two layers with gradients, one of them partly frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model(torch.randn(5, 4)).square().sum().backward()
    model[1].weight.grad = None
    return model


def test_the_norm_is_torchs_in_a_process_group_and_without_one() -> None:
    model = layers()
    want = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    assert Gradients(model).norm().item() == pytest.approx(want)
    dist.destroy_process_group()
    assert Gradients(model).norm().item() == pytest.approx(want)


@pytest.mark.parametrize("share", [0.25, 1.0, 2.0, None])
def test_gradients_are_scaled_to_the_largest_norm_that_is_allowed(share: float | None) -> None:
    ours, torchs = layers(), layers()
    gradients = Gradients(ours)
    norm = gradients.norm().item()
    most = share and share * norm
    gradients.clip(most, norm)
    written = [p.grad._version for p in ours.parameters() if p.grad is not None]
    assert any(written) == (share in (0.25, 1.0)), "gradients that need no scaling are not touched"
    if most is not None:
        torch.nn.utils.clip_grad_norm_(torchs.parameters(), most)
        assert Gradients(ours).norm().item() == pytest.approx(min(most, norm), rel=1e-4)
    for got, want in zip(ours.parameters(), torchs.parameters(), strict=True):
        if got.grad is None or want.grad is None:
            assert got.grad is want.grad
        else:
            assert torch.equal(got.grad, want.grad)


def test_nothing_is_clipped_where_all_is_frozen() -> None:
    model = nn.Linear(2, 2)
    gradients = Gradients(model)
    gradients.clip(1.0, gradients.norm().item())
