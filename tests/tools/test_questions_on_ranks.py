"""Needle, RULER and gate probes on ranks that share sequences, layers or samples: the results of one device."""

import json
import os
import socket
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.config.mesh import MeshSizes
from moba_train.evals.evaluation import EvaluationContext, with_full
from moba_train.mechanisms.probes.gate_probe import GateProbe
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.world import World, joined_world
from moba_train.tools.longppl import LongPPL
from moba_train.tools.needle.answers import predicted_answers
from moba_train.tools.needle.needle import Needle
from moba_train.tools.needle.needle_signal import NeedleSignalEvaluation
from moba_train.tools.tasks.ruler import Ruler
from moba_train.tools.text_tokenizer import load_tokenizer
from tests.evals.setting import built
from tests.forked import forked
from tests.resolved import shard_of, sharded_of, stages_of
from tests.tools.questions import recipe, recipe_texts

LENGTH = 403
"""Odd, so that samples are padded for the ranks."""
LAYOUTS: dict[str, tuple[MeshSizes, dict[str, Any]]] = {
    "dp": (MeshSizes(dp_shard=2), {}),
    "cp, allgather": (MeshSizes(cp=2), {"cp": 2, "cp_transport": "allgather", "cp_layout": "zigzag"}),
    "cp, ring": (MeshSizes(cp=2), {"cp": 2, "cp_transport": "ring", "cp_layout": "zigzag"}),
    "cp, ulysses": (MeshSizes(cp=2), {"cp": 2, "cp_transport": "ulysses"}),
    "tp": (MeshSizes(tp=2), {"tp": 2}),
}


def evaluated(world: World, folder: Path, sizes: MeshSizes, parallel: dict[str, Any]) -> dict[str, Any]:
    """Predicted tokens, selected blocks and scores in one layout, for an odd number of samples."""
    generate = parallel.get("cp_transport", "allgather") == "allgather" and "tp" not in parallel
    needle = {"lengths": [LENGTH], "depths": [0, 50, 100], "samples": 1, "generate": generate, "answer": "full"}
    ruler = {"tasks": ["niah_single", "vt"], "lengths": [1024], "samples": 1, "answer": "full"}
    signal = {"lengths": [LENGTH], "depths": [0, 50, 80], "samples": 1, "gates": [{"block_size": 16, "topk": 3}]}
    by_head = "tp" not in parallel
    longppl = {"window": 16, "step": 6, "alpha": 0.2, "beta": -7.0, "sequences": 3}
    probe = {"queries": 77, "sequences": 3, "by_head": by_head}
    sections = {"needle": needle, "ruler": ruler, "gate_probe": probe, "needle_signal": signal}
    config = recipe(folder, 1024, sections, parallel=parallel)
    (stage,) = stages_of(config)
    dims = ParallelDims(sizes, world)
    model = sharded_of(config, dims)
    model.set_rope(stage.rope)
    shard = shard_of(config, stage, dims)
    if shard.engine is not None:
        model.set_engines([shard.engine] * config.model.layers)
    context = EvaluationContext(model, stage, shard, world.device, with_full(stage.attention))
    asked = recipe_texts(config).questions(LENGTH)
    found: dict[str, Any] = {"tokens": {}}
    for name in context.each_attention():
        found["tokens"][name] = predicted_answers(context, asked, LENGTH, "test", None)
    found["needle"] = built(Needle, config).run(context).data
    found["ruler"] = built(Ruler, config).run(context).data
    found["probe"] = built(GateProbe, config).run(context).data | {"seconds": 0}
    # Three sequences, so that one data-parallel rank repeats one.
    found["longppl"] = built(LongPPL, recipe(folder, 96, {"longppl": longppl})).run(context).data
    found["signal"] = built(NeedleSignalEvaluation, config).run(context).data["rows"] if by_head else {}
    return found


def work(rank: int, port: int, folder: str, output: str) -> None:
    """All layouts on two ranks."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    with joined_world() as world:
        results = {name: evaluated(world, Path(folder), *layout) for name, layout in LAYOUTS.items()}
    Path(f"{output}.{rank}").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def on_two_ranks(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all layouts, which are the same on both ranks."""
    output = tmp_path_factory.mktemp("ranks") / "found.json"
    with socket.create_server(("localhost", 0)) as probe:
        port = int(probe.getsockname()[1])
    processes = [
        forked().Process(target=work, args=(rank, port, str(texts), str(output)), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    wait([process.sentinel for process in processes], 240)
    for process in processes:  # one that fails leaves the other waiting
        process.join(10)
        process.kill()
    first, second = (json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(2))
    assert first == second
    return first


@pytest.fixture(scope="module")
def one_device(texts: Path) -> dict[str, Any]:
    """The results of one rank."""
    with joined_world() as world:
        return json.loads(json.dumps(evaluated(world, texts, MeshSizes(), {})))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_and_selected_blocks_are_exactly_those_of_one_device(
    layout: str, on_two_ranks: dict[str, Any], one_device: dict[str, Any], texts: Path
) -> None:
    found = on_two_ranks[layout]
    assert found["tokens"] == one_device["tokens"]
    predicted = [token for row in found["tokens"]["moba"] for token in row]
    assert len(set(predicted)) > 3, "predictions differ, so that equal ones mean something"
    assert found["tokens"]["moba"] != found["tokens"]["full"]
    assert max(predicted) < load_tokenizer(texts / "tok.model").vocab_size
    for name, wanted in one_device["needle"]["maps"].items():
        for key in ("passed", "outcomes", "answers", "selected"):
            assert found["needle"]["maps"][name][key] == wanted[key], (name, key)
        if layout in ("dp", "cp, allgather"):  # new tokens are each rank's own, whatever shares the sequences
            assert found["needle"]["maps"][name]["generated"] == wanted["generated"]
    selected = one_device["needle"]["maps"]["moba"]["selected"]
    assert all(0 < share < 1 for column in selected for share in column[:2])
    assert found["ruler"] == one_device["ruler"]
    assert len(one_device["probe"]["layers"]) == 2
    for layer, wanted in zip(found["probe"]["layers"], one_device["probe"]["layers"], strict=True):
        assert layer.pop("distance_share") == pytest.approx(wanted["distance_share"])
        heads = layer.pop("head_distance_share", [])
        assert len(heads) == (0 if layout == "tp" else 4)
        assert all(
            one == pytest.approx(other) for one, other in zip(heads, wanted["head_distance_share"], strict=False)
        )
        assert layer == pytest.approx({name: wanted[name] for name in layer}, rel=1e-4)
    longppl, wanted = found["longppl"], one_device["longppl"]
    assert sum(wanted["key_tokens"]) > 10
    # A token whose gain is alpha up to rounding may count on one side alone.
    assert longppl["key_tokens"] == pytest.approx(wanted["key_tokens"], abs=1)
    for name, losses in wanted["attentions"].items():
        assert longppl["attentions"][name]["loss"] == pytest.approx(losses["loss"], rel=1e-5)
        assert longppl["attentions"][name]["key_loss"] == pytest.approx(losses["key_loss"], rel=2e-2)
    for name, by_length in found["signal"].items():
        for row, wanted in zip(by_length[str(LENGTH)], one_device["signal"][name][str(LENGTH)], strict=True):
            assert row == pytest.approx(wanted, rel=1e-3, abs=1e-5)
