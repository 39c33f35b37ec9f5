"""torch's GPU memory grows in segments, unless a user sets its allocator. Each case is a new process: settings are
those of the process."""

import os
import subprocess
import sys

import pytest

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _printed(program: str, **environment: str) -> str:
    others = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=others | environment, capture_output=True, text=True, check=True)
    return found.stdout.strip()


_GROWN = (
    "import torch; from moba_train.parallel.world import grow_segments\n"
    "before = torch._C._accelerator_getAllocatorSettings(); grow_segments()\n"
    "print(repr((before, torch._C._accelerator_getAllocatorSettings())))\n"
)


def test_segments_grow_by_default_also_where_torch_has_read_its_settings() -> None:
    assert _printed(_GROWN) == repr(("", "expandable_segments:True"))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_users_settings_stay(name: str) -> None:
    assert _printed(_GROWN, **{name: "max_split_size_mb:512"}) == repr(("max_split_size_mb:512",) * 2)


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
    assert _printed(program) == "True {True}"
