"""Trains a model shape by torchtitan, as a peer of `benchmarks.training`, which starts it by torchrun on every rank:

    torchrun --nproc-per-node 2 -m benchmarks.torchtitan_peer SETTINGS.json

Same shape, tokens, batch, optimizer and dtypes as the recipe beside it. Records of the steps go to the file that the
settings name, under the names of our metrics. Tried with torchtitan 0.2.2.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moba_train.data.indexed import IndexedDataset
from moba_train.parallel.world import grow_segments


class Sequences:
    """Batches of this data-parallel rank, from a corpus of one document: ({"input": int64 [B, T]}, labels [B, T])."""

    def __init__(self, corpus: str, seq_len: int, batch: int, rank: int, ranks: int) -> None:
        self._dataset = IndexedDataset(corpus)
        self._seq_len = seq_len
        self._batch = batch
        self._rank = rank
        self._ranks = ranks

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for number in count(self._rank, self._ranks):
            starts = [(number * self._batch + own) * self._seq_len for own in range(self._batch)]
            rows = [self._dataset.document(0, start, start + self._seq_len + 1) for start in starts]
            tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def model_arguments(shape: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Family of torchtitan and its arguments for the section `model` of a recipe. Raises ValueError where it has no
    such model."""
    common = {
        "dim": shape["hidden_size"],
        "n_layers": shape["layers"],
        "n_heads": shape["heads"],
        "n_kv_heads": shape["kv_heads"],
        "vocab_size": shape["vocab_size"],
        "norm_eps": shape.get("norm_eps", 1e-5),
        "rope_theta": shape.get("rope", {}).get("theta", 10000.0),
    }
    moe = shape.get("moe")
    width = shape["hidden_size"] // shape["heads"]
    if shape.get("qk_norm"):
        return "qwen3", {
            **common,
            "head_dim": shape.get("head_dim", width),
            "hidden_dim": shape["intermediate_size"],
            "enable_weight_tying": shape.get("tie_embeddings", False),
            **({} if moe is None else _expert_arguments(moe)),
        }
    if shape.get("head_dim", width) != width or shape.get("tie_embeddings") or moe is not None:
        raise ValueError("torchtitan's Llama has head_dim hidden_size / heads, untied embeddings and no experts")
    multiple = shape["intermediate_size"]
    # torchtitan rounds the small product up to a multiple
    return "llama3", {**common, "ffn_dim_multiplier": 0.01, "multiple_of": multiple}


def _expert_arguments(moe: dict[str, Any]) -> dict[str, Any]:
    """Those of experts, as the 30B-A3B of torchtitan has them; `moe_args` are those of its `MoEArgs`."""
    if further := moe.keys() - {"experts", "active", "intermediate_size", "shared"}:
        raise ValueError(f"model.moe: given {', '.join(sorted(further))}, which torchtitan's Qwen3 does not have")
    experts = {
        "num_experts": moe["experts"],
        "top_k": moe["active"],
        "num_shared_experts": moe.get("shared", 0),
        "score_func": "softmax",
        "route_norm": True,
        "score_before_experts": False,
    }
    return {"moe_enabled": True, "moe_inter_dim": moe["intermediate_size"], "moe_args": experts}


def job(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of torchtitan's JobConfig."""
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(Path(settings["metrics"]).parent)},
        "metrics": {"log_freq": 1, "disable_color_printing": True},
        "model": {"name": "moba_train_peer", "flavor": "shape"},
        "optimizer": {"lr": 3e-4},
        "lr_scheduler": {"warmup_steps": 1},
        "training": {
            "local_batch_size": settings["micro_batch_size"],
            "global_batch_size": settings["sequences"],
            "seq_len": settings["seq_len"],
            "steps": settings["steps"],
        },
        "parallelism": {
            "tensor_parallel_degree": settings["tp"],
            "context_parallel_degree": settings["cp"],
            "expert_parallel_degree": settings["ep"],
        },
        "activation_checkpoint": {"mode": settings["policy"], "selective_ac_option": "op"},
        "compile": {"enable": settings["compiled"]},
        "debug": {"moe_force_load_balance": settings["even"]},
    }
    if settings["fp8"] != "off":
        sections["model"]["converters"] = ["quantize.linear.float8"]
        tensorwise = settings["fp8"] == "tensorwise"
        sections["float8"] = {
            "enable_fsdp_float8_all_gather": tensorwise,
            "precompute_float8_dynamic_scale_for_fsdp": tensorwise,
            "recipe_name": None if tensorwise else "rowwise",
            "filter_fqns": ["output"],
        }
    return sections


def train(settings: dict[str, Any]) -> None:
    """Train as `settings` say, on every rank, with the memory settings of torchtitan's launcher."""
    grow_segments()
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import JobConfig
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.moe import MoEArgs
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    class Recorder(MetricsProcessor):
        """Writes a record of every step, beside torchtitan's own log."""

        def log(self, step: int, *losses: Any, **further: Any) -> None:
            seconds = time.perf_counter() - self.time_last_log
            tokens = self.ntokens_since_last_log / self.parallel_dims.non_data_parallel_size
            memory = torch.cuda.max_memory_allocated() / 2**30
            super().log(step, *losses, **further)
            if torch.distributed.get_rank() == 0:
                record = {"step": step, "type": "metrics", "time": time.time(), "loss": losses[0], "step_s": seconds}
                record |= {"memory_gib": memory, "tokens_per_s_per_device": tokens / seconds}
                with Path(settings["metrics"]).open("a") as file:
                    file.write(json.dumps(record) + "\n")

    init_logger()
    family, arguments = model_arguments(settings["model"])
    if family == "qwen3":
        spec = qwen3.get_train_spec()
        arguments |= {"moe_args": MoEArgs(**arguments.get("moe_args", {}))}
        spec.model_args = {"shape": qwen3.Qwen3ModelArgs(**arguments)}
    else:
        spec = llama3.get_train_spec()
        spec.model_args = {"shape": llama3.TransformerModelArgs(**arguments)}
    spec.build_tokenizer_fn = None
    spec.build_validator_fn = None
    spec.state_dict_adapter = None
    spec.build_metrics_processor_fn = lambda job_config, dims, _arguments: Recorder(job_config, dims)
    spec.build_dataloader_fn = lambda dp_world_size, dp_rank, tokenizer, job_config: Sequences(
        settings["corpus"], settings["seq_len"], settings["micro_batch_size"], dp_rank, dp_world_size
    )
    register_train_spec("moba_train_peer", spec)
    config = JobConfig()
    for name, values in job(settings).items():
        section = config.quantize.linear.float8 if name == "float8" else getattr(config, name)
        for key, value in values.items():
            if not hasattr(section, key):
                raise AttributeError(f"this torchtitan has no option {name}.{key}; 0.2.2 has")
            setattr(section, key, value)
    Trainer(config).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=Path, help="JSON file, written by benchmarks.training")
    train(json.loads(parser.parse_args().settings.read_text()))


if __name__ == "__main__":
    main()
