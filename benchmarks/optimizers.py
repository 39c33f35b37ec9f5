"""Step time and memory of every optimizer and implementation on one model, each checked against torch's AdamW.

    python -m benchmarks.optimizers --output benchmarks/results/optimizers-h200.json
    torchrun --nproc-per-node 2 -m benchmarks.optimizers --arms adamw muon --output benchmarks/results/...
    python -m benchmarks.optimizers --train --model llama3-8b --arms deepspeed_cpu --output benchmarks/results/...
    python -m benchmarks.optimizers --model tiny --output ...     on a CPU, in seconds

Without --train only the optimizer's step runs, on random gradients, with float32 weights sharded over the ranks. Its
memory is that of the state and of the step's temporaries, beyond weights and gradients. With --train the real trainer
runs, one process for each GPU. An arm whose package is absent is listed with the reason.
"""

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.options import length, need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.trainer_run import WARM_UP_STEPS, launch, model_shape, recipe, write_corpus
from moba_train.config.mesh import mesh_sizes
from moba_train.config.optim import OptimConfig
from moba_train.config.schema import RunConfig
from moba_train.memory.devices import local_device
from moba_train.model.transformer import Transformer
from moba_train.optim.adamw import implementation_problem
from moba_train.optim.gradients import local_part
from moba_train.optim.registry import build_optimizer, set_learning_rate
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.world import World, joined_world
from moba_train.resolve.run import resolve_unchecked, setup_on
from moba_train.telemetry.jsonl import read_records

ARMS: dict[str, dict[str, str]] = {
    "adamw": {},
    "apex": {"implementation": "apex"},
    "transformer_engine": {"implementation": "transformer_engine"},
    "deepspeed_cpu": {"implementation": "deepspeed_cpu"},
    "muon": {"kind": "muon"},
}
_OF_A_STEP = ("step_ms", "state_gib", "temporary_gib", "host_state_gib", "distance_from_torch")
_OF_TRAINING = ("step_s", "tokens_per_s_per_device", "memory_gib")
_CHECKED_STEPS = 2
_TOLERANCE = 1e-3
"""Largest distance from torch's update, relative to that update, for the other implementations of AdamW."""


class WrongUpdateError(ValueError):
    """An implementation of AdamW that computes something else than torch's."""


def step_arm(arm: str, config: RunConfig, world: World, steps: int, updates: list[Tensor] | None) -> dict[str, Any]:
    """Seconds of steps, and memory of this rank. `updates`: those of torch's AdamW after the first steps, in host
    memory, to compare with; where the list is empty, this arm is torch's AdamW and fills it."""
    run = resolve_unchecked(config)
    dims = ParallelDims(mesh_sizes(run.stages[0].parallel, world.size), world)
    model = sharded_model(setup_on(run.setup, local_device()), run.parallel, dims, run.seed)
    _draw_gradients(model)
    start = [_on_host(parameter) for parameter in model.parameters()] if updates is not None else []
    before = _allocated(world)
    optimizer = build_optimizer(model, OptimConfig.model_validate(ARMS[arm]), world.device, dims.layers_group)
    set_learning_rate(optimizer, 1e-3)
    for _ in range(_CHECKED_STEPS):
        _seconds(optimizer, world)
    found: dict[str, Any] = {}
    if updates is not None and ARMS[arm].get("kind") != "muon":  # which is another rule
        found["distance_from_torch"] = _compare(model, start, updates, arm)
    kept = _allocated(world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found["step_ms"] = spread([1000 * _seconds(optimizer, world) for _ in range(steps)])
    if world.device.type == "cuda":
        found["state_gib"] = (kept - before) / 2**30
        found["temporary_gib"] = (torch.cuda.max_memory_allocated() - kept) / 2**30
    found["host_state_gib"] = _host_bytes(optimizer) / 2**30
    return found


def _on_host(tensor: Tensor) -> Tensor:
    return local_part(tensor).to("cpu", copy=True)


def _allocated(world: World) -> int:
    return torch.cuda.memory_allocated() if world.device.type == "cuda" else 0


def _draw_gradients(model: Transformer) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        local_part(parameter.grad).normal_(generator=generator)


def _seconds(optimizer: Optimizer, world: World) -> float:
    """Wall time of one step, from all ranks ready to the GPU done: a part of the work may be the host's."""
    wait = torch.cuda.synchronize if world.device.type == "cuda" else (lambda: None)
    dist.barrier()
    wait()
    began = time.perf_counter()
    optimizer.step()
    wait()
    return time.perf_counter() - began


def _host_bytes(optimizer: Optimizer) -> int:
    values = [local_part(value) for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in values if value.device.type == "cpu")


def _compare(model: Transformer, start: list[Tensor], updates: list[Tensor], arm: str) -> float:
    """Relative distance of the first steps' update from torch's. Raises WrongUpdateError where it is too large."""
    own = [_on_host(parameter) - begun for parameter, begun in zip(model.parameters(), start, strict=True)]
    updates += [] if updates else own
    squares = [((a - b).square().sum(), b.square().sum()) for a, b in zip(own, updates, strict=True)]
    error = float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)
    if not error < _TOLERANCE:
        raise WrongUpdateError(f"{arm}: its update differs from torch's AdamW by {error:.1e}, allowed {_TOLERANCE:g}")
    return error


def train_arm(arm: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps with the real trainer: spreads of the steady steps' metrics, or the error and the log."""
    run_dir = folder / "run"
    own = {"optim": ARMS[arm], "compile": True, "activation_checkpointing": "full", "attention": {"default": "full"}}
    own["checkpoint"] = {"every": None}  # of 8B parameters it has 90 GiB
    steps = WARM_UP_STEPS + arguments.steps
    content = recipe(arguments.model, folder / "corpus", run_dir, arguments.seq_len, arguments.gpus, steps, **own)
    done = launch(content, folder / "recipe.yaml", arguments.gpus, capture_output=True)
    records = read_records(run_dir / "metrics.jsonl") if done.returncode == 0 else []
    shutil.rmtree(run_dir, ignore_errors=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "rror" in line), "")
        return {"error": first, "log": done.stderr[-4000:]}
    steady = [record for record in records if "loss" in record][WARM_UP_STEPS:]
    keys = ("step_s", "tokens_per_s_per_device", "memory_gib")
    found: dict[str, Any] = {key: spread([record[key] for record in steady]) for key in keys if key in steady[0]}
    return found | {"losses": [record["loss"] for record in records if "loss" in record]}


def table(results: dict[str, Any]) -> str:
    """The arms beside each other; medians."""
    keys = [key for key in (*_OF_A_STEP, *_OF_TRAINING) if any(key in found for found in results.values())]
    rows = [["optimizer", *(key.replace("_", " ") for key in keys)]]
    for arm, found in results.items():
        if "error" in found:
            rows.append([arm, found["error"], *[""] * (len(keys) - 1)])
            continue
        values = (found.get(key) for key in keys)
        rows.append([arm, *(_shown(value["median"] if isinstance(value, dict) else value) for value in values)])
    return markdown(rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--train", action="store_true", help="whole training steps by the real trainer")
    parser.add_argument("--gpus", type=int, default=1, help="with --train; otherwise torchrun says it")
    parser.add_argument("--seq-len", type=length, default=8192, help="with --train: tokens per GPU and step")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.train:
        need_gpus(parser, arguments.gpus)
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    results = _train(arguments) if arguments.train else time_steps(arguments)
    if int(os.environ.get("RANK", 0)) == 0:
        save(arguments.output, settings, results)
        print(table(results))


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = (WARM_UP_STEPS + arguments.steps) * arguments.gpus * arguments.seq_len
        write_corpus(folder / "corpus", 2 * tokens, model_shape(arguments.model)["vocab_size"])
        for arm in arguments.arms:
            results[arm] = train_arm(arm, folder, arguments)
    return results


def time_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """The optimizer's step of every arm in `arguments.arms`. Ends the program where one computes something else."""
    try:
        with joined_world() as world:
            return _time_arms(arguments, world)
    except WrongUpdateError as error:
        sys.exit(str(error))  # only after the world, which would be left behind


def _time_arms(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    content = recipe(arguments.model, Path("unused"), Path("unused"), 64, 1, 1)
    del content["extends"]
    config = RunConfig.model_validate(content | {"model": model_shape(arguments.model)})
    updates: list[Tensor] | None = [] if arguments.arms[0] == "adamw" else None
    for arm in arguments.arms:
        if problem := implementation_problem(OptimConfig.model_validate(ARMS[arm]), world.device.type):
            results[arm] = {"error": problem}
            continue
        results[arm] = step_arm(arm, config, world, arguments.steps, updates)
        gc.collect()  # FSDP's modules and hooks refer to each other
        torch.cuda.empty_cache()
    return results


if __name__ == "__main__":
    main()
