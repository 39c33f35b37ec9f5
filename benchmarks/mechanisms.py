"""Time and memory of every kind of attention in one layer, beside full attention, on one GPU.

    python -m benchmarks.mechanisms --output benchmarks/results/mechanisms-h200.json   # everything, under three minutes
    python -m benchmarks.mechanisms --kinds full moba:block_size=128,topk=8 nsa --lengths 8K 32K --head-dim 128
    python -m benchmarks.mechanisms --kinds full nsa fla-nsa msa flash-msa --kv-heads 2 --head-dim 128  # beside others
    python -m benchmarks.mechanisms --quick                                            # tiny, on the CPU

A layer of Llama-3.2-1B's shape: hidden size 2048, 32 query heads, 8 key/value heads, bf16, random weights, one document
of random input. Each kind has the default options of its section, which are those of its paper, unless a row gives
others. What a row times is what the kind does with the layer's input, queries, keys and values, forward and backward:
without the projections, norms and feed-forward that all kinds share. A kind that cannot be trained is timed forward
only. What a kind refuses, what does not fit into memory and what time does not allow is a row with the reason.

The table in benchmarks/measured/attention-kinds.md is made with `python -m benchmarks.mechanisms_table --write
benchmarks/measured/attention-kinds.md`.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from torch import Tensor

from benchmarks.mechanism_peers import PEERS, peer_calls
from benchmarks.mechanisms_table import Result, compared, render
from benchmarks.options import length, need_gpus
from benchmarks.record import provenance, save, spread
from benchmarks.timing import measure, milliseconds
from moba_train.attention.kind import StageContext, TwoSublayers
from moba_train.attention.layout import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.explain import explain
from moba_train.config.model import ModelConfig
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.rope import rope_cos_sin
from moba_train.model.transformer import Transformer

VARIANTS = [
    "moba:block_size=4096,topk=12",
    "moba:block_size=128,topk=8",
    "moba:block_size=128,topk=8,key_conv=3",
]
"""Rows besides the kinds with their defaults; those whose options the kind does not have are left out."""
LENGTHS = ["8K", "32K", "128K"]
QUICK_ROWS = [*KINDS, "moba:block_size=64,topk=3"]
QUICK_TOKENS = 512
LONGEST_MS = 5000.0
"""A row is left out where the shorter length before lets expect that one call takes longer."""
SYNTAX = "KIND or KIND:OPTION=VALUE,OPTION=VALUE"


@dataclass(frozen=True)
class Row:
    """A kind with its options, or an implementation by another package (`mechanism_peers.PEERS`)."""

    name: str
    attention: LayerAttention | None

    @classmethod
    def parse(cls, text: str) -> "Row":
        """From `SYNTAX`. Raises ValueError that says what is wrong."""
        if text in PEERS:
            return cls(text, None)
        kind, _, options = text.partition(":")
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not a registered attention; allowed: {', '.join([*KINDS, *PEERS])}")
        pairs = [option.partition("=") for option in re.split(r",(?![^[]*\])", options) if option]
        given = {name: yaml.safe_load(value) for name, _, value in pairs}
        section = KINDS[kind].Options
        try:
            return cls(text, LayerAttention(kind, section.model_validate(given)))
        except ValidationError as error:
            raise ValueError(f"{text}: {'; '.join(explain(error, section))}") from None


def default_rows() -> list[str]:
    """Full attention first, which all are compared with; then the other kinds, and the variants that exist."""
    kinds = sorted(KINDS, key=lambda kind: kind != "full")
    fields = {kind: KINDS[kind].Options.model_fields for kind in kinds}
    variants = [
        text
        for text in VARIANTS
        if all(option.partition("=")[0] in fields["moba"] for option in text.partition(":")[2].split(","))
    ]
    return [*kinds, *variants]


class _Recorder(TwoSublayers):
    """Stands in for a layer's kind in one forward pass, and keeps what the layer hands to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mixed: Any = None
        self.second: Any = None

    def mix(self, layer: Any, _parameters: Any) -> tuple[Tensor, None]:
        self.mixed = layer
        return layer.q_THd, None

    def second_sublayer(self, layer: Any, _parameters: Any) -> Tensor:
        self.second = layer
        return layer.x_TD


class MechanismLayer:
    """One kind in the model's own layer, with fixed random weights and inputs."""

    def __init__(self, attention: LayerAttention, model: ModelConfig, tokens: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        (kind,) = build_attention([attention], model.head_width)
        self.kind: Any = kind
        with device:
            parameters = KINDS[attention.kind].parameters(attention.options, model, layer=0)
            transformer = Transformer(model, [{} if parameters is None else {self.kind.name: parameters}])
        initialize_weights(transformer, seed=0)
        for parameter in transformer.parameters():  # as FSDP casts them: buffers keep their dtype
            parameter.data = parameter.data.to(dtype)
        self.parameters = parameters
        x_TD = random(tokens, model.hidden_size)
        self._record(transformer, x_TD)
        self.upstream = [random(tokens, model.heads, model.head_width)]
        if self.second is not None:
            self.upstream.append(random(tokens, model.hidden_size))
        self.upstream.append(torch.full((tokens,), 1 / tokens, device=device))

    def _record(self, transformer: Transformer, x_TD: Tensor) -> None:
        """Run the block once around a recorder; its inputs become leaves of their own.

        The recorder is taken out again. What it recorded would live on with the layer, whose `rotate_at` belongs to the
        module, and after it: a circle of references, which waits for Python's garbage collector.
        """
        block: Any = transformer.blocks[0]
        recorder: Any = _Recorder(self.kind.name)
        block.attention.kind = recorder
        tokens = len(x_TD)
        positions = torch.arange(tokens, device=x_TD.device)
        cos, sin = rope_cos_sin(positions, transformer.config.rope, transformer.config.head_width)
        with torch.no_grad():
            block(x_TD, cos, sin, packed_layout([tokens], x_TD.device))
            block.attention.kind = None
        self.layer = _with_leaves(recorder.mixed)
        self.second = _with_leaves(recorder.second) if isinstance(self.kind, TwoSublayers) else None
        inputs = [value for part in (self.layer, self.second or ()) for value in part if isinstance(value, Tensor)]
        own = [] if self.parameters is None else [p for p in self.parameters.parameters() if p.requires_grad]
        self.leaves = [*inputs, *own]

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """The kind's results, each with the gradient that reaches it."""
        *outs, per_token = self.upstream
        out_THd, auxiliary_T = self.kind.mix(self.layer, self.parameters)
        results = [(out_THd, outs[0])]
        if self.second is not None:
            results.append((self.kind.second_sublayer(self.second, self.parameters), outs[1]))
        if auxiliary_T is not None and auxiliary_T.requires_grad:
            results.append((auxiliary_T, per_token))
        return results

    @torch.no_grad()
    def inference(self) -> None:
        """The forward pass of evaluation."""
        self.forward()

    def both(self) -> None:
        """Forward and backward, to the layer's inputs and to the kind's parameters."""
        results, gradients = zip(*self.forward(), strict=True)
        torch.autograd.grad(results, self.leaves, gradients, allow_unused=True)

    def parameter_count(self) -> int:
        """Elements of the kind's own parameters."""
        return 0 if self.parameters is None else sum(p.numel() for p in self.parameters.parameters())


def _with_leaves(inputs: Any) -> Any:
    """`inputs` with tensors of floating dtype detached and waiting for gradients."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in inputs._asdict().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return inputs._replace(**leaves)


def refusals(attention: LayerAttention, context: StageContext) -> tuple[list[str], list[str]]:
    """Why the kind cannot train in such a stage, and why it cannot even evaluate."""
    kind = KINDS[attention.kind]
    options = attention.options
    return list(kind.problems(options, context)), list(kind.problems(options, replace(context, training=False)))


Measure = Callable[[Callable[[], Any], Callable[[], Any] | None], dict[str, Any]]
"""Times a forward pass, and forward and backward unless None."""


def on_gpu(budget_s: float) -> Measure:
    """`timing.measure`, also of a forward pass alone."""

    def timed(forward: Callable[[], Any], both: Callable[[], Any] | None) -> dict[str, Any]:
        if both is not None:
            return measure(forward, both, budget_s)
        torch.cuda.reset_peak_memory_stats()
        return {
            "forward_ms": spread(milliseconds(forward, budget_s)),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }

    return timed


def on_cpu(forward: Callable[[], Any], both: Callable[[], Any] | None) -> dict[str, Any]:
    """One call each, without memory."""

    def once(call: Callable[[], Any]) -> dict[str, float]:
        began = time.perf_counter()
        call()
        return spread([1000 * (time.perf_counter() - began)])

    return {"forward_ms": once(forward), **({"both_ms": once(both)} if both else {})}


def run(row: Row, model: ModelConfig, tokens: int, device: torch.device, timed: Measure) -> Result:
    """Time one kind at one length, or say why not."""
    if row.attention is None:
        return _of_peer({"row": row.name, "kind": row.name, "tokens": tokens}, model, device, timed)
    options = row.attention.options.model_dump(mode="json")
    result: Result = {"row": row.name, "kind": row.attention.kind, "options": options, "tokens": tokens}
    context = StageContext(model, tokens, 1, 1, False, device.type, layers="in the layer")
    in_training, in_evaluation = refusals(row.attention, context)
    if in_evaluation:
        return result | {"skipped": "; ".join(in_evaluation)}
    try:
        layer = MechanismLayer(row.attention, model, tokens, device)
        result["parameters"] = layer.parameter_count()
        result["pairs"] = layer.kind.pairs(model, [tokens])
        if in_training:
            result["forward_only"] = "; ".join(in_training)
            return result | timed(layer.inference, None)
        return result | timed(layer.forward, layer.both)
    except Exception as error:  # the rows that work are still worth their time
        return result | {"error": _said(error)}


def _of_peer(result: Result, model: ModelConfig, device: torch.device, timed: Measure) -> Result:
    try:
        return result | timed(*peer_calls(result["row"], model, result["tokens"], device))
    except Exception as error:  # as above: a package that fails here is a result
        return result | {"error": _said(error)}


def _said(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {str(error).partition('. ')[0]}"
    return f"{type(error).__name__}: {str(error)[:300]}"


def measured(
    rows: Sequence[Row],
    lengths: Iterable[int],
    model: ModelConfig,
    device: torch.device,
    timed: Measure,
    deadline: float,
) -> Iterator[Result]:
    """All rows, shorter lengths first, compared with full attention; what cannot end in time is left out."""
    done: list[Result] = []
    for tokens in sorted(lengths):
        for row in rows:
            shorter = [before for before in done if before["row"] == row.name]
            failed = [before["tokens"] for before in shorter if "error" in before]
            expected = max((_call_ms(before) * tokens / before["tokens"] for before in shorter), default=0.0)
            kind = row.name if row.attention is None else row.attention.kind
            where: Result = {"row": row.name, "kind": kind, "tokens": tokens}
            if time.monotonic() > deadline:
                result = where | {"skipped": "no time left: --budget-seconds"}
            elif failed:
                result = where | {"skipped": f"it fails with {failed[0]} tokens"}
            elif expected > LONGEST_MS:
                result = where | {"skipped": f"a call would take {expected / 1000:.0f} s or more"}
            else:
                result = run(row, model, tokens, device, timed)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            done.append(compared(result, done))
            yield done[-1]


def _call_ms(result: Result) -> float:
    times: dict[str, float] = result.get("both_ms") or result.get("forward_ms") or {"median": 0.0}
    return times["median"]


def model_of_one_layer(hidden: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """The shape of the layer; the feed-forward and the vocabulary are as small as they can be."""
    return ModelConfig(
        vocab_size=2,
        hidden_size=hidden,
        intermediate_size=1,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def row_argument(text: str) -> Row:
    """`Row.parse` for argparse, which shows the message of an ArgumentTypeError alone."""
    try:
        return Row.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kinds", nargs="+", type=row_argument, help=f"{SYNTAX} ...; default: {' '.join(default_rows())}"
    )
    parser.add_argument("--lengths", nargs="+", type=length, help=f"default: {' '.join(LENGTHS)}")
    parser.add_argument("--head-dim", type=int, choices=[64, 128], default=64)
    parser.add_argument(
        "--kv-heads",
        type=int,
        choices=[1, 2, 4, 8, 16, 32],
        default=8,
        help=f"2 for fla-nsa; of others: {', '.join(PEERS)}",
    )
    parser.add_argument("--budget-seconds", type=float, default=170, help="no row begins later than this")
    parser.add_argument("--row-budget", type=float, default=0.2, help="seconds of GPU time per measurement")
    parser.add_argument("--quick", action="store_true", help="tiny shapes on the CPU: shows that every kind runs")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not arguments.quick:
        need_gpus(parser)
    began = time.monotonic()
    device = torch.device("cpu" if arguments.quick else "cuda")
    rows = arguments.kinds or [Row.parse(text) for text in (QUICK_ROWS if arguments.quick else default_rows())]
    lengths = arguments.lengths or ([QUICK_TOKENS] if arguments.quick else [length(text) for text in LENGTHS])
    shape = (64, 4, 2, 16) if arguments.quick else (2048, 32, arguments.kv_heads, arguments.head_dim)
    model = model_of_one_layer(*shape)
    timed = on_cpu if arguments.quick else on_gpu(arguments.row_budget)
    settings = {
        "hidden_size": model.hidden_size,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_width,
        "dtype": "float32" if arguments.quick else "bfloat16",
    }
    results: list[Result] = []
    for result in measured(rows, lengths, model, device, timed, began + arguments.budget_seconds):
        results.append(result)
        reason = result.get("skipped") or result.get("error") or result.get("forward_only") or ""
        print(f"{time.monotonic() - began:6.1f} s  {result['tokens']:7} {result['row']}  {reason}", flush=True)
        if arguments.output:
            save(arguments.output, settings, results)
    print(f"\n{time.monotonic() - began:.0f} s in all\n")
    print(render({**provenance(), "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
