"""How long an arm takes: before any was measured by a model of one H100, then by the arms that are finished.

A training token takes its real FLOPs (those of `moba-train plan`), a time for each channel of each layer (norms,
rotary, copies, optimizer), and, where attention is sparse, a time for each query head and block that it selects. These
constants are those of the kernels of 10M models at 8K tokens, full attention and MoBA 512/3 (benchmarks/LOG.md,
"Host time of small models").

A step takes the host a time for each layer, however few its tokens. Arms that share a GPU wait for each other only
where the GPU is full: an arm takes the longer of its host's time and the GPU's time for all of them. With CUDA's
Multi-Process Service their kernels run at the same time, and the GPU does more for all of them.

What the model says is multiplied by what arms took that ran under the same conditions: kind of attention, length,
device, and how they shared it. benchmarks/LOG.md ("Time of small models") compares both.
"""

import functools
import json
import statistics
import threading
from collections.abc import Iterable
from typing import Any

import torch

from experiments.figure import Arm, Result
from experiments.multi_process import service_runs
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.memory.flops import real_flops
from moba_train.resolve.run import resolve_unchecked

START_S = 45.0
"""Start, compilation and evaluation at the end."""
TUNING_S = {"kda": 250.0}
"""By kind: how long fla-core times variants of its kernels, once on each machine."""
EVALUATION_S = 30.0
"""Each call of `moba-train eval`."""
FLOPS = 400e12
"""Per second, of matrix products and attention."""
CHANNEL_S = 0.1e-9
"""Per token, layer and hidden channel."""
SELECTED_S = 0.7e-9
"""Per token, query head and selected block: the difference of MoBA 128/12 and 512/3 in F10."""
OVERLAP = 1.4
"""How much more a GPU does for arms that share it by the Multi-Process Service: full attention in F10, six on a GPU."""
LAYER_STEP_S = 0.008
"""The host's time for each layer of a step: 39 to 57 ms a step of models of 6 layers on an H100's host, alone."""
UNCOMPILED_LAYER_STEP_S = 0.017
"""The host's time for each layer of a step of a model that is not compiled; fitted to the 22 arms of F6, which shared
GPUs."""
SELECTED = 8
"""Blocks of a sparse kind that has no `topk`."""
CPU_FLOPS = 2e10
VOCAB_SIZE = 16_384
"""Assumed where no corpus is open."""
_EFFICIENCY = 0.92
"""What several GPUs of one arm reach of their sum."""


@functools.cache
def _config(recipe: str, vocab_size: int) -> RunConfig:
    content: dict[str, Any] = json.loads(recipe)
    content["model"] = {"vocab_size": vocab_size} | content["model"]
    content |= {"name": "estimate", "run_dir": "unused", "data": {"train": [{"path": "unused"}]}}
    for stage in content["stages"]:
        stage.pop("train", None)
    content.pop("evaluation", None)
    content.pop("init_from", None)
    return RunConfig.model_validate(content)


def config_of(arm: Arm, vocab_size: int = VOCAB_SIZE) -> RunConfig:
    """The arm's recipe without data."""
    return _config(json.dumps(arm.recipe), vocab_size)


def size_of(arm: Arm) -> tuple[int, int]:
    """Parameters outside embeddings, and training tokens."""
    run = resolve_unchecked(config_of(arm))
    return run.setup.spec.counts.without_embeddings, run.stages[-1].end_token


def modelled_seconds(arm: Arm, gpus: int = 1, sharing: int = 1, service: bool = False) -> float:
    """Seconds of an arm by the model, on `gpus` H100, each with `sharing` arms; on this machine's CPU where `gpus` is
    0. `service`: whether arms that share a GPU do so by the Multi-Process Service."""
    config = config_of(arm)
    stages = resolve_unchecked(config).stages
    device = sum(_token_seconds(config, stage, gpus) * (stage.end_token - stage.first_token) for stage in stages)
    if gpus > 1:
        device /= gpus * _EFFICIENCY
    layer_step = LAYER_STEP_S if arm.recipe.get("compile", True) else UNCOMPILED_LAYER_STEP_S
    host = layer_step * config.model.layers * stages[-1].end_step if gpus else 0.0
    tuning = TUNING_S.get(str(arm.recipe["attention"].get("default")), 0.0) if gpus else 0.0
    waiting = max(1.0, sharing / OVERLAP) if service else sharing
    return max(host, device * waiting) + START_S + tuning + EVALUATION_S * len(arm.evaluations)


def _token_seconds(config: RunConfig, stage: Stage, gpus: int) -> float:
    """Seconds of a training token on one device."""
    model = config.model
    flops = real_flops(model, stage.attention, [stage.seq_len]) / stage.seq_len
    if not gpus:
        return flops / CPU_FLOPS
    sparse = (layer for layer in stage.attention if layer.kind != "full")
    selected = sum(getattr(layer.options, "topk", SELECTED) for layer in sparse)
    return flops / FLOPS + CHANNEL_S * model.layers * model.hidden_size + SELECTED_S * model.heads * selected


class Estimates:
    """How long arms take on this machine: the model, corrected by arms that have ended. Of any thread."""

    def __init__(self, finished: Iterable[Result]) -> None:
        """finished: results of any figures."""
        self._finished: dict[tuple[Any, ...], list[Result]] = {}
        self._ratios: dict[tuple[Any, ...], dict[tuple[str, int], list[float]]] = {}
        self._lock = threading.Lock()
        for result in finished:
            self.add(result)

    def add(self, result: Result) -> None:
        """Take a finished arm into account."""
        conditions = _conditions(result["device"], *_how(result))
        with self._lock:
            self._finished.setdefault(conditions, []).append(result)

    def seconds(self, arm: Arm, gpus: int, sharing: int) -> float:
        """Seconds of an arm on `gpus` GPUs, each with `sharing` arms; on the CPU where `gpus` is 0.

        The median ratio of arms of its kind and length that ran under the same conditions corrects it, else that of all
        of its kind, else that of all.
        """
        service = service_runs() and sharing > 1
        device = torch.cuda.get_device_name() if gpus and torch.cuda.is_available() else None
        kind, length = _kind_and_length(arm)
        with self._lock:
            ratios = self._ratios_under(_conditions(device, gpus, sharing, service))
            own_kind = {own: found for own, found in ratios.items() if own[0] == kind}
            nearest = {(kind, length): ratios[kind, length]} if (kind, length) in ratios else own_kind or ratios
            found = [ratio for one in nearest.values() for ratio in one]
        return modelled_seconds(arm, gpus, sharing, service) * (statistics.median(found) if found else 1.0)

    def _ratios_under(self, conditions: tuple[Any, ...]) -> dict[tuple[str, int], list[float]]:
        """Share of the model's seconds that arms under these conditions took, by kind and length. The model takes
        3 ms for an arm, so only arms that are asked about are judged by it."""
        ratios = self._ratios.setdefault(conditions, {})
        for result in self._finished.pop(conditions, ()):
            evaluations = dict.fromkeys(result["evaluations"], ())
            arm = Arm(result["name"], result["seed"], result["recipe"], evaluations)
            ratio = result["seconds"] / modelled_seconds(arm, *_how(result))
            ratios.setdefault(_kind_and_length(arm), []).append(ratio)
        return ratios


def _how(result: Result) -> tuple[int, int, bool]:
    """GPUs of a finished arm, arms on each of them, and whether these shared it by the Multi-Process Service."""
    return result["gpus"], result["arms_per_gpu"], bool(result.get("multi_process_service", False))


def _conditions(device: str | None, gpus: int, sharing: int, service: bool) -> tuple[Any, ...]:
    """What arms have in common whose times say something of each other's."""
    return (device, sharing > 1, service) if gpus else ("CPU",)


def _kind_and_length(arm: Arm) -> tuple[str, int]:
    """Kind of attention and tokens of a sequence, of the last stage."""
    return str(arm.recipe["attention"].get("default")), int(arm.recipe["stages"][-1]["seq_len"])
