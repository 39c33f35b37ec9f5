"""Whether an error may come from another rank is told by where it was raised."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from moba_train.parallel.failures import was_waiting


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Broken(nn.Module):
    """A model whose loss ends in an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self._error = error

    def loss(self) -> Tensor:
        raise self._error


@pytest.mark.parametrize("error", [RuntimeError("shapes"), torch.OutOfMemoryError("no memory")])
def test_an_error_of_the_model_inside_fsdp_is_its_own(error: Exception) -> None:
    model = Broken(error)
    fully_shard(model)
    register_fsdp_forward_method(model, "loss")
    with pytest.raises(type(error)) as raised:
        model.loss()
    assert not was_waiting(raised.value)


def test_an_error_of_a_collective_may_come_from_another_rank() -> None:
    with pytest.raises(TypeError) as raised:
        dist.all_reduce("no tensor")
    assert was_waiting(raised.value)
