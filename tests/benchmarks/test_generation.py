"""The benchmark of generation, on a small model and a CPU."""

import pytest
import torch

from benchmarks import generation
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.world import joined_world
from moba_train.tools.inference.across_ranks import prompt_ranks

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2}


def test_a_prompt_is_read_and_its_tokens_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "WARM", 3)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    options = MobaAttention.Options(block_size=16, topk=2, select="group")
    model = generation.random_model(SHAPE, options, torch.device("cpu"))
    full, own = (generation.run(model, [*range(50)], 5, decode, graph=False) for decode in generation.DECODES)
    assert len(own["text"]) == 3 + 5 + 1
    assert own["token_ms"]["count"] == 5
    assert own["peak_gib"] == 1
    rows = [{"context": 2**17, "decode": "own", "graph": True, **own}, {**full, "context": 2**20, "graph": False}]
    rows[1] |= {"decode": "full", "gpus": 4, "error": "out of memory"}
    with joined_world() as world:
        ranks = prompt_ranks(CPStrategy(1, "allgather", "zigzag", 1), world)
        assert generation.run(model, [*range(50)], 5, "own", False, ranks)["text"] == own["text"]
    lines = generation.table(rows).splitlines()
    assert lines[2].startswith("| 128K | own | CUDA graph | ")
    assert lines[3] == "| 1M | full | by the host, 4 GPUs | out of memory |  |  |  |"
