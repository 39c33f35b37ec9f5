"""How fast a step was: tokens per second, memory, and model FLOPs utilisation (MFU)."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.parallel.world import World
from moba_train.planning.devices import peak_tflops
from moba_train.planning.flops import dense_flops, real_flops


def batch_flops(model: ModelConfig, stage: Stage, batches: Sequence[Batch]) -> float:
    """FLOPs of the micro-batches of one data-parallel rank, forward and backward, by the lengths of their documents.

    Padding counts as documents of its own: that is how it is computed, and `padding_fraction` says how much there is.
    """
    lengths = [stop - start for batch in batches for start, stop in pairwise(batch.layout.edges)]
    return real_flops(model, stage.attention, lengths)


def throughput(model: ModelConfig, stage: Stage, world: World, step_s: float, step_flops: float) -> dict[str, float]:
    """Metrics of a step of `stage` that took `step_s` seconds and `step_flops` operations over all ranks.

    `mfu` counts the keys that each layer's queries really attend to, document by document; `mfu_dense` what full
    attention over whole sequences would cost, the formula behind published numbers. `memory_gib` is this rank's peak
    so far, `reserved_gib` what torch has taken of the GPU for it at most, free pieces included. `allocator_retries`
    counts how often so far torch found no memory for a tensor, waited for the GPU and gave back what was free in
    pieces: it costs time, and memory is nearly used up. A CPU has none of these.
    """
    rate = stage.batch_tokens / step_s
    metrics = {"tokens_per_s": rate, "tokens_per_s_per_device": rate / world.size}
    if world.device.type != "cuda":
        return metrics
    metrics["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    metrics["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    metrics["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    peak = peak_tflops(torch.cuda.get_device_name())
    if peak is not None:
        metrics["mfu"] = step_flops / (step_s * world.size * peak * 1e12)
        metrics["mfu_dense"] = rate / world.size * dense_flops(model, stage.seq_len) / (peak * 1e12)
    return metrics
