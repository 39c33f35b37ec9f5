"""torch's GPU memory grows in segments, unless a user sets its allocator. Each case is a new process: settings are
those of the process."""

import os
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest
import torch

from moba_train.parallel.world import grow_segments
from tests.forked import forked

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _grown(environment: dict[str, str], answer: Connection) -> None:
    """Answers with torch's settings before and after."""
    for name in SETTINGS:
        os.environ.pop(name, None)
    os.environ |= environment
    before = torch._C._accelerator_getAllocatorSettings()
    grow_segments()
    answer.send((before, torch._C._accelerator_getAllocatorSettings()))


def _settings(**environment: str) -> tuple[str, str]:
    """In a process that has imported torch, which has not read its settings yet."""
    ours, theirs = forked().Pipe()
    forked().Process(target=_grown, args=(environment, theirs)).start()
    assert ours.poll(60)
    before, after = ours.recv()
    return before, after


def test_segments_grow_by_default_also_where_torch_has_read_its_settings() -> None:
    assert _settings() == ("", "expandable_segments:True")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_users_settings_stay(name: str) -> None:
    assert _settings(**{name: "max_split_size_mb:512"}) == ("max_split_size_mb:512",) * 2


@pytest.mark.gpu
def test_a_rank_that_trains_has_them() -> None:
    program = (
        "import torch; from moba_train.parallel.world import joined_world\n"
        "with joined_world() as world:\n"
        "    x = torch.zeros(2**25, device=world.device)\n"
        "large = [segment for segment in torch.cuda.memory_snapshot() if segment['total_size'] > 2**25]\n"
        "settings = torch.cuda.memory._snapshot()['allocator_settings']\n"
        "print(settings['expandable_segments'], {segment['is_expandable'] for segment in large})\n"
    )
    others = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    found = subprocess.run([sys.executable, "-c", program], env=others, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True {True}"
