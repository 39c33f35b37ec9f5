"""What a rank finds in its environment while it trains."""

import os
import subprocess
import sys

import pytest

from moba_train.parallel.world import joined_world

OURS, OLD_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (OURS, OLD_NAME):
        monkeypatch.delenv(name, raising=False)


def test_segments_of_gpu_memory_can_grow_while_a_rank_trains() -> None:
    with joined_world():
        assert os.environ[OURS] == "expandable_segments:True"
    assert OURS not in os.environ


@pytest.mark.parametrize("name", [OURS, OLD_NAME])
def test_a_users_settings_of_gpu_memory_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    with joined_world():
        found = {key: os.environ.get(key) for key in (OURS, OLD_NAME)}
    assert found == {OURS: None, OLD_NAME: None} | {name: "max_split_size_mb:512"}


@pytest.mark.gpu
def test_torch_reads_them_before_its_first_allocation() -> None:
    """In a new process: torch reads its settings once."""
    program = (
        "import torch; from moba_train.parallel.world import joined_world\n"
        "with joined_world() as world:\n"
        "    x = torch.zeros(1, device=world.device)\n"
        "    print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"], found.stderr
