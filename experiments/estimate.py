"""How long an arm takes: before any was measured by a model of one H200, then by the arms that are finished.

The model has two terms for a training token: its real FLOPs (those of `moba-train plan`), and a time for each channel
of each layer, which norms, launches and the optimizer take. Its constants are a fit to the measured rates of the 25M
model at 2K to 32K tokens in benchmarks/results/miniatures-h200.json. Other kinds than full attention reach a lower
rate, by the MoBA stages of that file.
"""

import functools
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from experiments.figure import Arm, Result
from moba_train.config.schema import RunConfig
from moba_train.config.stages import resolve_stages
from moba_train.planning.flops import layer_flops, matmul_flops
from moba_train.planning.parameters import count_recipe_parameters

START_S = 45.0
"""Start, compilation and evaluation at the end."""
EVALUATION_S = 30.0
"""Each call of `moba-train eval`."""
DENSE_FLOPS = 560e12
"""Per second, of matrix products and full attention."""
SPARSE_FLOPS = 80e12
"""Per second, of other attention kinds, forward and backward."""
CHANNEL_S = 0.26e-9
"""Per token, layer and hidden channel."""
CPU_FLOPS = 2e10
VOCAB_SIZE = 16_384
"""Assumed where no corpus is open."""
_EFFICIENCY = 0.92
"""Of several GPUs of one arm."""


@functools.cache
def _config(recipe: str, vocab_size: int) -> RunConfig:
    content: dict[str, Any] = json.loads(recipe)
    content["model"] |= {"vocab_size": vocab_size}
    content |= {"name": "estimate", "run_dir": "unused", "data": {"train": [{"path": "unused"}]}}
    for stage in content["stages"]:
        stage.pop("train", None)
    content.pop("evaluation", None)
    return RunConfig.model_validate(content)


def config_of(arm: Arm, vocab_size: int = VOCAB_SIZE) -> RunConfig:
    """The arm's recipe without data."""
    return _config(json.dumps(arm.recipe), vocab_size)


def size_of(arm: Arm) -> tuple[int, int]:
    """Parameters outside embeddings, and training tokens."""
    config = config_of(arm)
    return count_recipe_parameters(config).without_embeddings, resolve_stages(config)[-1].end_token


def modelled_seconds(arm: Arm, gpus: int = 1) -> float:
    """Seconds of an arm by the model, on `gpus` H200; on this machine's CPU where `gpus` is 0."""
    config = config_of(arm)
    total = 0.0
    for stage in resolve_stages(config):
        by_kind = {"full": 0.0, "other": 0.0}
        for layer in stage.attention:
            flops = layer_flops(config.model, layer, [stage.seq_len]) / stage.seq_len
            by_kind["full" if layer.kind == "full" else "other"] += flops
        dense = matmul_flops(config.model) + by_kind["full"]
        token = (
            dense / DENSE_FLOPS
            + by_kind["other"] / SPARSE_FLOPS
            + CHANNEL_S * config.model.layers * config.model.hidden_size
            if gpus
            else (dense + by_kind["other"]) / CPU_FLOPS
        )
        total += token * (stage.end_token - stage.first_token)
    if gpus > 1:
        total /= gpus * _EFFICIENCY
    return total + START_S + EVALUATION_S * len(arm.evaluations)


def correction(results: Sequence[Result], arms: Sequence[Arm]) -> float:
    """How much longer the finished arms took on this kind of device than by the model; 1 where none is finished."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    by_name = {(arm.name, arm.seed): arm for arm in arms}
    ratios = [
        result["seconds"] / modelled_seconds(by_name[result["name"], result["seed"]], result["gpus"])
        for result in results
        if (result["name"], result["seed"]) in by_name and (result["device"] == device) == bool(result["gpus"])
    ]
    return statistics.median(ratios) if ratios else 1.0
