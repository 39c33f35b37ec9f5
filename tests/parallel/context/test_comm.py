"""Which of torch's calls the communicator makes; what they do is tested with real ranks (test_context_gloo.py)."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moba_train.parallel.context.comm import Communicator


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    """A communicator of rank 0 of 2, over torch's fake process group: its calls return at once, and nothing travels."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield Communicator(dist.group.WORLD, torch.device("cpu"))
    dist.destroy_process_group()


def test_an_exchange_sends_no_messages(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory torch holds back on a GPU: 38 GiB in training at 128K tokens (docs/performance-log.md)."""
    calls: list[str] = []
    for name in ("batch_isend_irecv", "isend", "irecv", "all_to_all_single"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
    received = communicator.all_to_all(torch.zeros(4, 3), torch.ones(2, 5)).wait()
    assert [tuple(x.shape) for x in received] == [(4, 3), (2, 5)]
    assert calls == ["all_to_all_single"] * 2
