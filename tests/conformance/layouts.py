"""Random small models and parallel layouts, each compared with one device: loss, every gradient, their norms, and the
weights after one step of the optimizer.

The ranks run what training runs: `resolve`, `Learner`, `DataShard`, `StepCounts`. One device is written down
independently: each document alone, in float64, its logits, the mean loss over the step, clipping and the optimizer's
rule. A wrong mask, position, factor or sum anywhere is then a difference far above rounding.
"""

import dataclasses
import functools
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.attention.layout import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.mesh import WorldSize
from moba_train.config.schema import RunConfig
from moba_train.data.samples import Sample, StageData
from moba_train.errors import ConfigError
from moba_train.memory.devices import Device
from moba_train.model.build import build_attention, build_model, initialize_weights
from moba_train.optim.spec import block_matrices, is_trainable, set_trainable
from moba_train.parallel.world import World, gather
from moba_train.registry import FEED_FORWARDS, OPTIMIZERS, TRANSPORTS
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import ResolvedRun
from moba_train.run.learner import Learner
from moba_train.run.step import StepCounts
from moba_train.torch_private import local_shape_and_offset

VOCAB = 36
LR = 0.05
DECAY = 0.1
EPS = 0.1
"""With an `eps` of this size, AdamW's first update tells how large a gradient is, not only its sign."""
Documents = Literal["one", "few", "many", "single tokens"]
Mask = Literal["all", "sparse", "one token", "one sequence"]
Found = dict[str, Tensor]

ATTENTION: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("moba", {"block_size": 8, "topk": 2}),
    ("moba", {"block_size": 4, "topk": 3, "select": "group", "always": ["current", "first"]}),
    ("moba", {"block_size": 4, "topk": 4, "key_conv": 3}),
    ("window", {"window": 9, "sinks": 2}),
    ("moa", {"alpha": [4, -20, 6, 9], "beta": [0.0, 0.6, 0.3, 1.0], "sink_tokens": 3, "block_size": 4}),
    ("infllm_v2", {"block_size": 8, "topk": 4, "local_blocks": 2, "window": 4, "stride": 2, "dense_len": 1}),
    ("moba_v05", {"block_size": 4, "topk": 3}),
    ("moba_window", {"block_size": 4, "topk": 2, "window": 8}),
    ("seer", {"block_size": 4, "topk": 3, "train_gate": True, "kl_weight": 0.5}),
    ("seer", {"block_size": 4, "topk": 3, "mode": "warmup"}),
    ("msa", {"block_size": 4, "topk": 3, "index_dim": 6, "train_gate": True, "kl_weight": 0.5}),
    ("msa", {"block_size": 4, "topk": 3, "index_keys": "group"}),
    ("qsa", {"block_size": 4, "topk": 4}),
    (
        "by_group",
        {"parts": [{"groups": [0], "kind": "qsa", "options": {"block_size": 4, "topk": 3}}], "mode": "warmup"},
    ),
    ("indexer", {"block_size": 1, "topk": 9, "index_dim": 6, "index_heads": 2, "mode": "warmup"}),
    (
        "indexer",
        {"block_size": 2, "topk": 6, "local_blocks": 2, "top_p": 0.8, "coarse": {"block_size": 8, "blocks": 4}},
    ),
    ("nsa", {"compressed_block": 4, "stride": 2, "block_size": 8, "topk": 4, "window": 6}),
    ("lightning", {}),
    ("kda", {}),
    ("capped", {"cap": 1.5}),
    ("capped", {"cap": 0.7, "window": 9}),
    ("gdn", {}),
    ("gdn", {"heads": {"keys": 2, "values": 6, "width": 4}}),
    ("moba_v1", {"block_size": 4, "topk": 3, "merge": "gate"}),
    ("oracle", {"block_size": 4, "topk": 3, "select": "group"}),
]
"""Kinds that a layer may have, with options for a few dozen tokens; those that are not registered are left out."""
MODELS: list[dict[str, Any]] = [
    {"sink_layers": "all", "qkv_bias": True, "o_bias": True, "activation": "clamped"},
    {"sink_layers": "last:1", "gate_layers": "first:1", "output_gate": "head"},
    {"gate_layers": "all", "qk_norm": True, "centered_norms": True, "rope": {"fraction": 0.5}},
    {"norms": "both", "centered_norms": True, "activation": "gelu_tanh", "embedding_scale": 4.9, "logits_cap": 2.0},
    {"norms": "post", "qk_norm": "all_heads", "rope": {"overrides": {"last:1": {"theta": 50.0}}}},
    {"embedding_scale": 3.0, "attention_scale": 0.5, "residual_scale": 0.4, "logits_divisor": 2.0},
    {"rope": {"overrides": {"every:2": {"kind": "nope"}}}},
]
"""Keys of `model` that published families have together: gpt-oss, Qwen3-Next, Gemma, OLMo, Granite, SmolLM3."""
EXPERTS: list[dict[str, Any]] = [
    {"experts": 4, "active": 2, "intermediate_size": 20, "router": {"balance": "none", "z_loss": 0.1}},
    {
        "experts": 8,
        "active": 3,
        "intermediate_size": 12,
        "shared": 1,
        "layers": "last:1",
        "router": {"score": "sigmoid", "scale": 1.5, "balance": "bias"},
    },
    {"experts": 8, "active": 3, "intermediate_size": 12, "bias": True, "clamp": 0.5, "router": {"balance": "bias"}},
    {
        "experts": 8,
        "active": 2,
        "intermediate_size": 16,
        "shared": 2,
        "shared_gate": True,
        "router": {"score": "sigmoid", "groups": 4, "active_groups": 2, "balance": "bias"},
    },
]
"""Mixtures of experts whose losses are those of each token."""
PATTERNS = [["blocks.0.*"], ["blocks.*.attention.*", "norm.weight"], ["embedding.weight", "*.down_proj.weight"]]


@dataclass(frozen=True)
class Case:
    """A model, its data and its layout. Its fields are plain values: a case is one line of JSON."""

    seed: int
    """Seed of the weights, tokens, documents and loss masks."""
    parallel: dict[str, Any]
    """The recipe's section; all sizes of the mesh are given."""
    attention: list[tuple[str, dict[str, Any]]]
    """Kind and options of each layer."""
    model: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe's section that differ from `MODEL`."""
    nodes: int = 1
    """Nodes that the ranks are on, or are taken to be."""
    seq_len: int = 32
    micro_batch_size: int = 1
    sequences: int = 4
    """Sequences of a step, over all ranks."""
    documents: Documents = "one"
    mask: Mask = "all"
    trainable: list[str] | None = None
    """Patterns; None: all."""
    optimizer: str = "adamw"
    clip_norm: float | None = None
    checkpointing: str = "none"

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return prod(self.parallel[size] for size in SIZES)

    @staticmethod
    def from_line(line: str) -> "Case":
        """The case that `line` wrote."""
        return Case(**json.loads(line))

    def line(self) -> str:
        """The case as JSON without what it has by default."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = dataclasses.asdict(Case(0, {}, []))
        return json.dumps({name: value for name, value in given.items() if name == "seed" or value != defaults[name]})


SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MODEL = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 28, "heads": 4, "kv_heads": 2, "head_dim": 8}


def recipe(case: Case) -> RunConfig:
    """The case's recipe."""
    layers = {i: {"kind": kind, **options} for i, (kind, options) in enumerate(case.attention)}
    return RunConfig.model_validate(
        {
            "name": "conformance",
            "run_dir": "unused",
            "seed": case.seed,
            "model": {**MODEL, "layers": len(layers), "init_std": 0.2, **case.model},
            "attention": {"default": case.attention[0][0], "overrides": layers},
            "data": {"train": [{"path": "unused"}]},
            "batch_tokens": case.sequences * case.seq_len,
            "micro_batch_size": case.micro_batch_size,
            "activation_checkpointing": case.checkpointing,
            "optim": {
                "kind": case.optimizer,
                "lr": LR,
                "eps": EPS,
                "weight_decay": DECAY,
                "clip_norm": case.clip_norm,
            },
            "stages": [
                {"name": "only", "seq_len": case.seq_len, "tokens": 10_000, "trainable": case.trainable or "all"}
            ],
            "parallel": case.parallel,
        }
    )


def resolved(case: Case) -> ResolvedRun:
    """The case's run, computed in float64. Raises ConfigError if training would refuse it."""
    run = resolve(recipe(case), WorldSize(case.ranks, case.ranks // case.nodes), Device(None, None))
    computation = dataclasses.replace(run.setup.computation, dtype=torch.float64)
    return dataclasses.replace(run, setup=dataclasses.replace(run.setup, computation=computation))


@functools.cache
def draw(seed: int, most_ranks: int = 4) -> Case:
    """A case that training does not refuse; the seed alone determines it."""
    rng = random.Random(seed)
    sizes = dict.fromkeys(SIZES, 1)
    for _ in range(rng.choice([1, *[most_ranks.bit_length() - 1] * 2])):
        sizes[rng.choices(SIZES, [3, 2, 2, 4, 3])[0]] *= 2
    while True:
        case = _draw(rng, seed, sizes)
        try:
            resolved(case)
        except ConfigError:
            continue
        return case


def _draw(rng: random.Random, seed: int, sizes: dict[str, int]) -> Case:
    shape = rng.choice(MODELS) if rng.random() < 0.4 else {}
    kinds = [entry for entry in ATTENTION if entry[0] in KINDS]
    if "sink_layers" in shape:
        kinds = [entry for entry in kinds if KINDS[entry[0]].facts.takes_sink]
    attention = [rng.choice(kinds) for _ in range(rng.choice([1, 2, 2, 3]) if sizes["pp"] == 1 else rng.choice([2, 4]))]
    parallel: dict[str, Any] = dict(sizes)
    nodes = rng.choice([1, 2]) if prod(sizes.values()) > 2 else 1
    if sizes["cp"] > 1:
        transports = ["allgather", "ring", "ulysses", "auto"] * 2 + [*{"dispatch"} & {*TRANSPORTS}]
        parallel["cp_transport"] = rng.choice(transports + ["hierarchical"] * 8 * (nodes > 1))
        parallel["cp_layout"] = rng.choice(["auto", "contiguous", "zigzag"])
    if sizes["pp"] > 1:
        parallel["pp_schedule"] = rng.choice(["1f1b", "interleaved_1f1b", "zero_bubble"])
    if rng.random() < 0.2:
        parallel["reshard_after_forward"] = False
    model: dict[str, Any] = {
        key: value
        for key, value, share in (
            ("tie_embeddings", True, 0.4),
            ("qkv_bias", True, 0.2),
            ("qk_norm", True, 0.3),
            ("kv_heads", 4, 0.2),
            ("rope", {"kind": "yarn", "factor": 4, "original_seq_len": 16}, 0.2),
        )
        if rng.random() < share
    }
    model |= shape
    if bare := [layer for layer, (_, options) in enumerate(attention) if "heads" in options]:
        model["bare_layers"] = bare
    if "moe" in FEED_FORWARDS and rng.random() < 0.3:
        model["moe"] = rng.choice(EXPERTS)
        shards = sizes["dp_shard"] * sizes["cp"]
        parallel["ep"] = rng.choice([1, shards] if shards < 4 else [1, 2, shards])
    micro_batch_size = rng.choice([1, 1, 2])
    accumulated = rng.choice([1, 2, 3] if sizes["pp"] == 1 else [1, 1, 2]) * sizes["pp"]
    return Case(
        seed=seed,
        parallel=parallel,
        attention=attention,
        model=model,
        nodes=nodes,
        seq_len=rng.choice([32, 40, 48, 61, 64]),
        micro_batch_size=micro_batch_size,
        sequences=accumulated * micro_batch_size * sizes["dp_replicate"] * sizes["dp_shard"],
        documents=rng.choice(get_args(Documents)),
        mask=rng.choice(get_args(Mask)),
        trainable=rng.choice([None, None, None, *PATTERNS]),
        optimizer=rng.choice([*["adamw"] * 3, *{"muon"} & {*OPTIMIZERS}]),
        clip_norm=rng.choice([None, 0.05]),
        checkpointing=rng.choice(["none", "none", "full", "selective"]),
    )


def samples(case: Case) -> list[Sample]:
    """The sequences of the step."""
    rng = np.random.default_rng(case.seed)
    sizes = {"one": (0, 1), "few": (2, case.seq_len // 2), "many": (5, 6), "single tokens": (3, 1)}
    number, longest = sizes[case.documents]  # of short documents; a further one has the other tokens
    chosen = int(rng.integers(case.sequences))
    made = []
    for index in range(case.sequences):
        lengths = rng.integers(1, longest + 1, size=number).tolist()
        lengths.insert(int(rng.integers(len(lengths) + 1)), case.seq_len - sum(lengths))
        lengths = [length for length in lengths if length]
        weight = np.ones(case.seq_len)
        if case.mask == "sparse":  # none of a sequence's tokens, a few or most, with weights of any size
            share = 0.9 if index == chosen else rng.choice([0, 0.1, 0.5])
            weight = rng.random(case.seq_len) * (rng.random(case.seq_len) < share)
        elif index != chosen and case.mask != "all":
            weight[:] = 0
        elif case.mask == "one token":
            weight = weight * (np.arange(case.seq_len) == rng.integers(case.seq_len))
        tokens = rng.integers(VOCAB, size=case.seq_len + 1)
        made.append(Sample(tokens[:-1], tokens[1:], weight.astype(np.float32), lengths, []))
    return made


class StageSamples(StageData):
    """A stage's data that are these samples."""

    def __init__(self, made: Sequence[Sample]) -> None:
        self._made = made

    def sample(self, index: int) -> Sample:
        return self._made[index]


def add_noise(model: nn.Module, seed: int) -> None:
    """Move every weight, also those that begin as zeros or ones, and the biases by which experts are chosen, by numbers
    that its name determines."""
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".feed_forward.bias"))
    for name, parameter in (*model.named_parameters(), *biases):
        number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "little")
        noise = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        own = parameter.detach()
        if isinstance(own, DTensor):
            shape, offset = local_shape_and_offset(noise.shape, own.device_mesh, own.placements)
            noise = noise[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
            own = own.to_local()
        own += noise


def on_ranks(case: Case, world: World) -> Found:
    """Whole results of one step on the ranks of `world`, float64 by default; called on all of them together, for the
    first. A number that differs between ranks which hold copies of it has a second name."""
    run = resolved(case)
    (stage,), (layout,) = run.stages, run.layouts
    learner = Learner(run, world)
    add_noise(learner.model, case.seed)
    learner.enter(stage, layout)
    shard = learner.data_shard
    batches = shard.batches(StageSamples(samples(case)), stage, 0)
    own_counts = StepCounts.from_rank(batches, False, 0.0, world.size // shard.dp_size, shard.computes_loss)
    counts = own_counts.summed_over_ranks()
    # The trainer's weights are float32, and so would be the mean's.
    batches = [dataclasses.replace(batch, loss_weight=batch.loss_weight.double()) for batch in batches]
    losses = learner.accumulate(batches, counts.loss_weight, 1)
    result = learner.measure(losses, counts.loss_weight, stage.kinds, 1)
    found = {name: torch.tensor(value) for name, value in (result.numbers | result.further).items()}
    found |= {f"gradient {n}": whole(p.grad) for n, p in learner.model.named_parameters() if p.grad is not None}
    learner.update(LR, result.numbers["grad_norm"])
    found |= {f"weight {name}": whole(weight) for name, weight in learner.model.named_parameters()}
    every: Found = {}
    for of_rank in gather(found):
        for name, value in of_rank.items():
            if not torch.equal(every.setdefault(name, value), value):
                every[f"{name}, which differs between ranks"] = value
    return every


def whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient gathered from all ranks that have a part of it."""
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def on_one_device(case: Case) -> Found:
    """Results of the step by its definition. float64 must be torch's default."""
    run = resolved(case)
    (stage,) = run.stages
    model = build_model(run.setup.spec)
    initialize_weights(model, run.seed)
    add_noise(model, case.seed)
    model.set_attention(build_attention(stage.attention, model.config.head_width))
    model.set_rope(stage.rope)
    set_trainable(model, stage.trainable)
    largest_lse = torch.full((len(model.blocks), model.config.heads), -torch.inf)
    for block, row_H in zip(model.blocks, largest_lse, strict=True):
        block.attention.largest_lse_H = row_H  # type: ignore[union-attr]  # blocks are modules to mypy
    made = samples(case)
    count = sum(float(sample.loss_weight.sum(dtype=np.float64)) for sample in made)
    output = model.embedding.weight if model.output is None else model.output.weight
    loss = torch.zeros(())
    auxiliary = torch.zeros(len(case.attention))
    for tokens, labels, weights in (document for sample in made for document in cut(sample)):
        hidden_TD, of_layers = model.hidden(tokens, torch.arange(len(tokens)), packed_layout([len(tokens)]))
        logits_TV = hidden_TD @ output.mT
        if (cap := model.config.logits_cap) is not None:
            logits_TV = cap * torch.tanh(logits_TV / cap)
        loss = loss + (F.cross_entropy(logits_TV, labels, reduction="none") * weights).sum() / count
        zero = torch.zeros(())
        sums = [zero if found_T is None else (found_T * weights).sum() / count for found_T in of_layers]
        auxiliary = auxiliary + torch.stack(sums)
    (loss + auxiliary.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def norm(*prefixes: str) -> Tensor:
        parts = [gradient.square().sum() for name, gradient in gradients.items() if name.startswith(prefixes)]
        return torch.stack([torch.zeros(()), *parts]).sum().sqrt()

    found = {"loss": loss.detach(), "grad_norm": norm("")}
    for kind in {*stage.kinds}:
        layers = [f"blocks.{layer}." for layer, other in enumerate(stage.kinds) if other == kind]
        found[f"grad_norm_{kind}"] = norm(*layers)
    if largest_lse.max() > -torch.inf:
        found["max_lse"] = largest_lse.max()
    found |= {f"auxiliary_loss_layer_{i}": x for i, x in enumerate(auxiliary.detach()) if x}
    found |= {f"gradient {name}": gradient.clone() for name, gradient in gradients.items()}
    scale = 1.0 if case.clip_norm is None else min(1.0, case.clip_norm / (float(found["grad_norm"]) + 1e-6))
    matrices = block_matrices(model) if case.optimizer == "muon" else {}
    for name, weight in model.named_parameters():
        value = weight.detach()
        if is_trainable(name, stage.trainable):
            value = value * (1 - LR * DECAY if value.dim() > 1 and not name.endswith(".bias") else 1)
            gradient = gradients[name] * scale
            if name in matrices:
                value = value - LR * 0.2 * max(gradient.shape[-2:]) ** 0.5 * orthogonalized(gradient)
            else:
                value = value - LR * gradient / (gradient.abs() + EPS)
        found[f"weight {name}"] = value
    return found


def cut(sample: Sample) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, labels and weights of each document."""
    for start, stop in pairwise([0, *np.cumsum(sample.lengths)]):
        tokens, labels = (torch.from_numpy(x[start:stop]) for x in (sample.tokens, sample.labels))
        yield tokens, labels, torch.from_numpy(sample.loss_weight[start:stop]).double()


def orthogonalized(gradient: Tensor) -> Tensor:
    """Muon's update of a matrix (Jordan et al. 2024), or of each of a stack, by its singular values: five times
    a s + b s^3 + c s^5."""
    u, values, v = torch.linalg.svd(gradient, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True).clamp(min=1e-7)
    a = 3.4445
    b = -4.7750
    c = 2.0315
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return u @ torch.diag_embed(values) @ v


def differences(got: Found, want: Found) -> list[str]:
    """What differs, with the largest error beside the largest number."""
    # The sum of the auxiliary losses is that of its layers; the load of experts is no result.
    names = {name for name in got if name != "auxiliary_loss" and not name.startswith(("expert_", "router_"))}
    found = [f"{name}: only {'on ranks' if name in got else 'on one device'}" for name in names ^ want.keys()]
    for name in sorted(names & want.keys()):
        error = (got[name] - want[name]).abs().max().item()
        largest = want[name].abs().max().item()
        # Clipping and steps have a float32 factor; all else is float64.
        allowed = (1e-6 if name.startswith("weight") else 1e-9) * largest + 1e-10
        if not error <= allowed:
            found.append(f"{name}: differs by {error:.2e} of {largest:.2e}")
    return found
