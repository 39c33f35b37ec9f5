"""What one row of `benchmarks.training` trains, from a short text: `128K:moba-512-8:full:cp2`.

LENGTH:ATTENTION, then options in any order:

    ATTENTION         full | moba-BLOCK-TOPK | moba-BLOCK-TOPK-lastN (the last N layers full) | torchtitan (full, by it)
    none | selective | full | budget    activation checkpointing; offload: what it keeps goes to host memory
    memory-budget                       of torchtitan alone: half of what its compiled blocks would keep
    fp8 | fp8-rowwise                   linear layers in FP8
    cpN, tpN, ppN, epN                  GPUs that share a sequence; each layer; the layers out; the experts of a layer
    microN, batchN                      sequences of a pass on a rank; sequences of a step on all GPUs
    loraN                               adapters of rank N in all linear layers are trained, on a base of random weights
    warmN, stepsN                       steps that are left out of the numbers; steps that are measured
    eager                               blocks are not compiled
    even                                tokens take experts in turn, whatever the router of random weights prefers
    packed                              documents of 4K to 64K tokens; else one that is longer than the sequences
    key.path=value                      any other key of the recipe

With --model qwen3-30b-a3b, `model.moe=null` is the dense model of as many active parameters: its feed-forward is as
wide as all active experts together. Untrained routers of a deep model choose few experts, for all tokens the same:
`expert_load_max` of the result says so, and `even` is for these.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.options import length
from benchmarks.trainer_run import recipe

Float8 = Literal["off", "tensorwise", "rowwise"]
POLICIES = ("none", "selective", "full", "budget")
_MOBA = re.compile(r"moba-([0-9]+K?)-([0-9]+)(?:-last([0-9]+))?")
_SIZE = re.compile(r"(cp|tp|pp|ep|micro|batch|lora|warm|steps)([1-9][0-9]*)")
_WORDS: dict[str, dict[str, Any]] = {
    **{policy: {"policy": policy} for policy in POLICIES},
    "memory-budget": {"policy": "memory_budget"},
    "offload": {"offload": True},
    "fp8": {"fp8": "tensorwise"},
    "fp8-rowwise": {"fp8": "rowwise"},
    "eager": {"compiled": False},
    "even": {"even": True},
    "packed": {"documents": "packed"},
}


@dataclass(frozen=True)
class Row:
    """A model shape's training at one length: by our trainer, or by torchtitan."""

    name: str = ""
    seq_len: int = 8192
    attention: str = "full"
    """`full`, `torchtitan` or `moba-BLOCK-TOPK[-lastN]`."""
    policy: str = "none"
    """Activation checkpointing."""
    offload: bool = False
    fp8: Float8 = "off"
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    micro: int | None = None
    """Sequences of a pass on one rank; None: as many as a GPU has in a step."""
    batch: int | None = None
    """Sequences of a step; None: as many as all GPUs have in a step."""
    lora: int = 0
    """Rank of LoRA adapters; 0: all weights are trained."""
    warm: int = 4
    """First steps, left out of all numbers."""
    steps: int = 6
    """Steps that are measured."""
    compiled: bool = True
    even: bool = False
    """Experts are taken in turn."""
    documents: Literal["long", "packed"] = "long"
    overrides: tuple[str, ...] = ()
    """Further keys of the recipe, `key.path=value`."""

    @property
    def by_torchtitan(self) -> bool:
        """Whether torchtitan trains this row."""
        return self.attention == "torchtitan"

    @property
    def label(self) -> str:
        """What computes attention, for readers."""
        if self.by_torchtitan:
            return "torchtitan"
        if (match := _MOBA.fullmatch(self.attention)) is None:
            return "full attention"
        block, topk, full_layers = match.groups()
        return f"MoBA {length(block)}/{topk}" + (f", last {full_layers} layers full" if full_layers else "")

    def sequences(self, gpus: int, per_gpu: int) -> int:
        """Sequences of one step on `gpus` GPUs, by default `per_gpu` for each, or for each group that shares them."""
        return self.batch or max(1, gpus // (self.cp * self.pp)) * per_gpu

    def recipe(
        self, model: str, corpus: Path, run_dir: Path, gpus: int, per_gpu: int, layers: int | None = None
    ) -> dict[str, Any]:
        """The recipe for a model of configs/models, without checkpoints; `layers`: of a smaller model. It is one step
        longer than what is measured: the run is killed before its end. Beside `run_dir`, the folder `base` is the
        base of adapters (`random_base.write_base`)."""
        adapters = {"init_from": str(run_dir.with_name("base")), "adapters": {"lora": {"r": self.lora}}}
        return recipe(
            model,
            corpus,
            run_dir,
            self.seq_len,
            self.sequences(gpus, per_gpu),
            self.warm + self.steps + 1,
            attention=_attention(self.attention),
            parallel={"cp": self.cp, "tp": self.tp, "pp": self.pp, "ep": self.ep},
            precision={"linear": "fp8", "fp8": {"scaling": self.fp8}} if self.fp8 != "off" else {},
            activation_checkpointing="full" if self.policy == "memory_budget" else self.policy,
            micro_batch_size=self.micro or per_gpu,
            compile=self.compiled,
            checkpoint={"every": None},
            **({"activation_offload": True} if self.offload else {}),
            **({"model": {"layers": layers}} if layers else {}),
            **(adapters if self.lora else {}),
        )


def parse_row(text: str, defaults: Row) -> Row:
    """The row that `text` names, see above; `defaults` give what it leaves out. Raises ValueError.

    Defaults that torchtitan does not take are not those of its rows: pp, and the policy `budget`.
    """
    first, _, rest = text.partition(":")
    attention, *options = rest.split(":")
    if attention not in ("full", "torchtitan") and _MOBA.fullmatch(attention) is None:
        raise ValueError(
            f"{text!r}: attention {attention!r}; allowed: full, torchtitan, moba-BLOCK-TOPK, moba-BLOCK-TOPK-lastN"
        )
    row = replace(defaults, name=text, seq_len=length(first), attention=attention)
    if row.by_torchtitan:
        row = replace(row, pp=Row.pp, policy=Row.policy if row.policy == "budget" else row.policy)
    for option in options:
        if match := _SIZE.fullmatch(option):
            size: dict[str, Any] = {match[1]: int(match[2])}
            row = replace(row, **size)
        elif option in _WORDS:
            row = replace(row, **_WORDS[option])
        elif "=" in option:
            row = replace(row, overrides=(*row.overrides, option))
        else:
            raise ValueError(
                f"{text!r}: option {option!r}; allowed: {', '.join(_WORDS)}, cpN, tpN, ppN, epN, microN, batchN, "
                "loraN, warmN, stepsN, key.path=value"
            )
    if row.policy == "memory_budget" and not row.by_torchtitan:
        raise ValueError(f"{text!r}: memory-budget is of torchtitan alone; allowed: {', '.join(POLICIES)}")
    if row.by_torchtitan and (
        row.documents != "long" or row.offload or row.overrides or row.policy == "budget" or row.pp > 1 or row.lora
    ):
        raise ValueError(
            f"{text!r}: torchtitan takes one long document and none of offload, budget, ppN, loraN, key.path=value"
        )
    return row


def _attention(text: str) -> dict[str, Any]:
    """The recipe's section `attention`."""
    match = _MOBA.fullmatch(text)
    if match is None:
        return {"default": "full"}
    block, topk, full_layers = match.groups()
    layers = f"last:{full_layers}" if full_layers else "none"
    return {"full_layers": layers, "moba": {"block_size": length(block), "topk": int(topk)}}
