"""`moba-train profile-spans`: a span for each attention head of a trained model, by what masking would cost.

Shape suffixes: L lengths of documents, Y layers, H query heads, X heads of all layers, C candidates.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.kind import WrappedEngine
from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.moa.influence import block_influence, masked_influence
from moba_train.attention.moa.spans import SpanRule
from moba_train.attention.protocol import Layout, LocalAttention
from moba_train.checkpoint.recipe import SavedRun
from moba_train.config.attention import LayerAttention
from moba_train.config.quantities import format_count
from moba_train.data.batch import collate
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.errors import DataError, UserError
from moba_train.evals.checkpoint import training_of
from moba_train.evals.local_model import load_on_this_machine
from moba_train.evals.progress import tracked
from moba_train.evals.span_search import candidate_rules, choose_spans, densities
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer
from moba_train.parallel.forward import training_loss
from moba_train.telemetry.atomic import write_atomically

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileOptions:
    """What `moba-train profile-spans` is asked for."""

    output: Path
    lengths: tuple[int, ...] = ()
    """Tokens of the documents; empty: a quarter, half and all of the stage's length."""
    budget: float = 0.5
    samples: int = 8
    """Documents of each length."""
    block_size: int = 64
    sink_tokens: int = 64
    max_length: int | None = None
    """Longest document that the spans are for; None: the longest of `lengths`."""


def profile_spans(saved: SavedRun, options: ProfileOptions, echo: Callable[[str], object]) -> None:
    """Measure, choose, print, and write a piece of a recipe.

    saved  the recipe with the corpora to measure on as its validation data (validation/evaluated.py)
    echo   gets the lines to print

    Raises UserError for options that cannot work, before the model is loaded.
    """
    lengths = _checked_lengths(saved, options)
    max_length = options.max_length or max(lengths)
    sizes = {"block_size": options.block_size, "sink_tokens": options.sink_tokens, "max_length": max_length}
    rules = candidate_rules(lengths, **sizes)
    density_LC = densities(rules, lengths)
    vocab_size = saved.config.model.vocab_size
    sources = saved.config.data.validation
    data = [LongDocumentSamples(sources, length, options.samples, saved.config.seed, vocab_size) for length in lengths]
    for samples in data:
        if not len(samples):
            raise DataError(
                f"--lengths: given {samples.seq_len}, but no document of the held-out text is longer; give shorter "
                "--lengths, or --data with longer documents"
            )
        if len(samples) < options.samples:
            logger.warning(
                "The held-out text has only %d samples of %d tokens inside one document", len(samples), samples.seq_len
            )
    model = load_on_this_machine(saved)
    masked_LYHC = measure(model, data, rules, options.block_size)
    chosen_X = choose_spans(masked_LYHC.flatten(1, 2), density_LC, options.budget)
    chosen_YH = chosen_X.view(masked_LYHC.shape[1:3])
    for line in table(masked_LYHC, density_LC, chosen_YH, rules, lengths, options.budget):
        echo(line)
    by_layer = [[rules[candidate] for candidate in layer] for layer in chosen_YH.tolist()]
    source = ", ".join(dict.fromkeys([saved.config.name, saved.path.name]))
    write_atomically(options.output, fragment(by_layer, source, lengths, options, max_length))
    echo(f"written: {options.output}; a recipe uses it with `extends: [RECIPE, {options.output.name}]`")


def _checked_lengths(saved: SavedRun, options: ProfileOptions) -> tuple[int, ...]:
    """The lengths, ascending. Raises UserError for options out of range, and where there is nothing to measure on."""
    if options.output.exists():
        raise UserError(f"--output: {options.output} exists and is not overwritten; give another file, or remove it")
    if not options.output.parent.is_dir():
        raise UserError(f"--output: the folder {options.output.parent} does not exist")
    if not 0 < options.budget <= 1:
        raise UserError(f"--budget: given {options.budget:g}; allowed: above 0, at most 1, which is full attention")
    if not saved.config.data.validation:
        raise DataError("the recipe has no held-out text to measure on; give --data CORPUS")
    seq_len = saved.stage.seq_len
    lengths = tuple(sorted(set(options.lengths or (seq_len // 4, seq_len // 2, seq_len))))
    if lengths[0] <= options.block_size:
        given = "given" if options.lengths else "by default a quarter of the stage's length,"
        raise UserError(f"--lengths: {given} {lengths[0]}; allowed: above --block-size {options.block_size}")
    if options.max_length is not None and options.max_length < lengths[-1]:
        raise UserError(
            f"--max-length: given {options.max_length}; allowed: at least {lengths[-1]}, the longest length"
        )
    trained = training_of(saved).seq_len
    if lengths[-1] > trained:
        logger.warning(
            "Documents of %d tokens are longer than the %d tokens that the model was trained with", lengths[-1], trained
        )
    return lengths


def measure(
    model: Transformer, data: Sequence[LongDocumentSamples], rules: Sequence[SpanRule], block_size: int
) -> Tensor:
    """float64 [L, Y, H, C] in nats per token: the change of the loss, to first order, if a head's attention were masked
    as each rule says, in the mean over the samples of each length. All layers have full attention."""
    config = model.config
    full = LayerAttention("full", FullAttention.Options())
    model.set_attention(build_attention([full] * config.layers, config.head_width))
    model.requires_grad_(False)
    model.embedding.weight.requires_grad_()  # gradients then reach all layers, and are kept for one matrix alone
    device = model.embedding.weight.device
    masked_LYHC = torch.zeros(len(data), config.layers, config.heads, len(rules), dtype=torch.float64)

    def add(at: int, samples: int, layer: int, influence_HNN: Tensor) -> None:
        masked_LYHC[at, layer] += masked_influence(influence_HNN, rules, block_size).cpu() / samples

    work = [(at, index) for at, samples in enumerate(data) for index in range(len(samples))]
    for number in tracked(range(len(work)), "measuring influences"):
        at, index = work[number]
        batch = collate([data[at].sample(index)]).to(device)
        with _influences(model, partial(add, at, len(data[at])), block_size):
            (training_loss(model, batch).loss / batch.loss_weight_sum).backward()
        model.embedding.weight.grad = None
    return masked_LYHC


@contextmanager
def _influences(model: Transformer, see: Callable[[int, Tensor], None], block_size: int) -> Iterator[None]:
    """Inside, the backward pass calls `see` with each layer and the influences of its attention."""

    def engine(layer: int) -> WrappedEngine:
        def run(
            q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, layout: Layout
        ) -> tuple[Tensor, Tensor]:
            def look(dout_THD: Tensor) -> None:
                see(
                    layer,
                    block_influence(q_THD, k_TKD, v_TKD, dout_THD, scale=attention.scale, block_size=block_size),
                )

            out_THD, lse_HT = LOCAL_ENGINE(q_THD, k_TKD, v_TKD, attention, layout)
            out_THD.register_hook(look)
            return out_THD, lse_HT

        return WrappedEngine(LOCAL_ENGINE, run)

    model.set_engines([engine(layer) for layer in range(model.config.layers)])
    try:
        yield
    finally:
        model.set_engines([LOCAL_ENGINE] * model.config.layers)


def table(
    masked_LYHC: Tensor,
    density_LC: Tensor,
    chosen_YH: Tensor,
    rules: Sequence[SpanRule],
    lengths: Sequence[int],
    budget: float,
) -> Iterator[str]:
    """The chosen spans of each layer, and what they mask beside one span for all heads."""
    names = [format_count(length, 1024) for length in lengths]
    spans_C = torch.tensor([min(max(rule.alpha + rule.beta * lengths[-1], 0), lengths[-1]) for rule in rules])
    yield f"{'layer':<6}" + "".join(f"{'density ' + name:>14}" for name in names) + f"   spans at {names[-1]}, sorted"
    for layer, chosen_H in enumerate(chosen_YH):
        density = "".join(f"{share:>14.3f}" for share in density_LC[:, chosen_H].mean(1).tolist())
        yield f"{layer:<6}{density}   {' '.join(f'{span:.0f}' for span in spans_C[chosen_H].sort().values.tolist())}"
    index_YH1 = chosen_YH.unsqueeze(-1)
    own_L = [float(masked_YHC.gather(-1, index_YH1).sum()) for masked_YHC in masked_LYHC]
    alike_LC = masked_LYHC.sum((1, 2))
    affordable_C = (density_LC <= budget + 1e-12).all(0)
    best = int(torch.where(affordable_C, alike_LC.mean(0), torch.inf).argmin())
    density = "".join(f"{share:>14.3f}" for share in density_LC[:, chosen_YH.flatten()].mean(1).tolist())
    yield f"{'all':<6}{density}   budget {budget:g}"
    rise = ", ".join(f"{value:+.4f} at {name}" for value, name in zip(own_L, names, strict=True))
    yield f"estimated change of the loss, nats per token: {rise}"
    rise = ", ".join(f"{value:+.4f} at {name}" for value, name in zip(alike_LC[:, best].tolist(), names, strict=True))
    yield f"with alpha {rules[best].alpha}, beta {rules[best].beta:g} in all heads: {rise}"


def fragment(
    by_layer: Sequence[Sequence[SpanRule]],
    source: str,
    lengths: Sequence[int],
    options: ProfileOptions,
    max_length: int,
) -> str:
    """A piece of a recipe with the spans of every layer's heads."""
    sizes = {"block_size": options.block_size, "sink_tokens": options.sink_tokens, "max_length": max_length}
    lines = [
        f"# Spans of kind moa for {source}: moba-train profile-spans, documents of",
        f"# {', '.join(map(str, lengths))} tokens, at most {options.budget:g} of full attention's pairs.",
        "# In a recipe: extends: [RECIPE.yaml, THIS.yaml]",
        "attention:",
        "  default: moa",
        f"  moa: {_flow(sizes)}",
        "  overrides:",
    ]
    for layer, rules in enumerate(by_layer):
        alpha, beta = [rule.alpha for rule in rules], [rule.beta for rule in rules]
        lines.append(f"    {layer}: {_flow({'alpha': alpha, 'beta': beta})}")
    return "\n".join(lines) + "\n"


def _flow(values: Mapping[str, object]) -> str:
    """A mapping in YAML's flow style."""
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items()) + "}"
