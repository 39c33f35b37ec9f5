"""Warnings about a recipe: what works, but its author has hardly meant. Only what cannot work is refused."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from moba_train.config.base import format_count
from moba_train.config.data import SourceConfig
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.data.blend import share_lengths
from moba_train.data.indexed import corpus_file
from moba_train.data.samples import StageData
from moba_train.data.sidecar import read_sidecar
from moba_train.data.tokenizer import tokenizer_file, vocabulary_size
from moba_train.errors import DataError, UserError, named_layers
from moba_train.model.feed_forward import feed_forward_costs
from moba_train.model.spec import ModelSpec, Shapes
from moba_train.resolve.data import recorded_tokenizers
from moba_train.resolve.evaluations import evaluation_settings, evaluation_warnings
from moba_train.resolve.initial_weights import (
    comparable,
    foreign_source,
    initial_tokenizers,
    left_out_kinds,
    source_length,
    source_model,
    unread_folder,
)
from moba_train.resolve.run import ResolvedRun

NamedSources = Sequence[tuple[str, SourceConfig]]
"""Sources of a recipe, with their keys."""

ROW_MULTIPLE = 128
"""Rows of the embedding are a multiple of this in most models, because matrix products are faster then."""
SPARE_ROWS = 8 * ROW_MULTIPLE
"""Rows beyond the tokenizer's that are no waste: a multiple of 128 on each of 8 tensor-parallel ranks."""
SPARE_SHARE = 0.1
"""And as a share of the tokenizer's: published models reserve a few percent for later tokens."""


def print_recipe_warnings(run: ResolvedRun) -> None:
    """Print `recipe_warnings`, a line each, as `moba-train plan` does and a run that starts."""
    for warning in recipe_warnings(run):
        print(f"warning: {warning}", flush=True)


def recipe_warnings(run: ResolvedRun) -> list[str]:
    """Sentences about a run, each with the keys to change; none if nothing is conspicuous."""
    spec = run.setup.spec
    sources = run.named_sources()
    initial = unread_folder(run.init_from, run.folders.checkpoints)
    return [
        *_batch_warnings(run.stages),
        *evaluation_warnings(run.evaluation, evaluation_settings(run)),
        *_trained_on_warnings(sources, run.data.validation),
        *_template_warnings(sources),
        *_short_validation_warnings(run),
        *_vocabulary_warnings(spec, _known_tokens(sources, run.data.tokenizer), run.init_from is not None),
        *_checkpointing_warnings(spec.config, run.memory.checkpointing),
        *(_initial_weight_warnings(spec, initial) if initial else ()),
        *(_initial_tokenizer_warnings(sources, initial) if initial else ()),
        *(_length_warnings(spec.config, run.stages, initial) if initial else ()),
        *(_foreign_warnings(run.stages[0], initial) if initial else ()),
    ]


def _batch_warnings(stages: Sequence[Stage]) -> Iterator[str]:
    """Batches that are larger than their stage, which then trains on one whole batch."""
    for stage in stages:
        if stage.batch_tokens > stage.tokens:
            yield (
                f"{stage.key('batch_tokens')}: given {stage.batch_tokens:,}, more than the {stage.tokens:,} tokens of "
                f"stage {stage.name!r}: its one step trains on {stage.batch_tokens:,}; lower it, or raise "
                f"stages[{stage.index}].tokens"
            )


def _trained_on_warnings(sources: NamedSources, validation: Sequence[SourceConfig]) -> Iterator[str]:
    """Validation corpora whose documents are also trained on."""
    trained = [(key, source) for key, source in sources if not key.startswith("data.validation")]
    for index, held_out in enumerate(validation):
        same = [key for key, source in trained if source.path == held_out.path and share_lengths(source, held_out)]
        if same:
            yield (
                f"data.validation[{index}]: the corpus {held_out.path} is trained on as well ({same[0]}), so that its "
                "loss says nothing about other text; hold out documents (`moba-data tokenize --holdout`)"
            )


def _template_warnings(sources: NamedSources) -> Iterator[str]:
    """Corpora whose conversations different chat templates wrote."""
    found: dict[str, str] = {}
    with suppress(DataError):
        for key, source in sources:
            if template := (read_sidecar(corpus_file(source.path, "json")) or {}).get("chat_template"):
                found.setdefault(str(template), f"{source.path} ({key})")
    if len(found) > 1:
        yield (
            f"the conversations of {' and '.join(found.values())} were made with different chat templates: exports and "
            "questions take that of the last ones that are trained on; make them with one (`moba-data sft --template`)"
        )


def _short_validation_warnings(run: ResolvedRun) -> Iterator[str]:
    """Validation corpora with less text than is evaluated, in the first stage that needs more."""
    sources, sequences = run.data.validation, run.evaluation.sequences
    for stage in run.stages if sources else ():
        with suppress(DataError):  # of a corpus that is damaged, or need not exist yet
            data = StageData(sources, stage.seq_len, sequences, run.seed, {}, run.setup.shape.vocab_size)
            if stage.evaluate and (short := data.read_again()):
                name, tokens, taken = short[0]
                yield (
                    f"evaluation.sequences: given {sequences}, which in stage {stage.name!r} take {taken:,} tokens of "
                    f"{name}, which has {tokens:,}: text that is evaluated twice makes errors look smaller than they "
                    "are; hold out more, or lower it"
                )
                return


def _vocabulary_warnings(spec: ModelSpec, known: int | None, from_elsewhere: bool) -> Iterator[str]:
    """A vocabulary much larger than the tokenizer's, such as that of a model file made for another tokenizer.

    known: size of the tokenizer; None: not known. from_elsewhere: the recipe has `init_from`
    """
    model = spec.config
    if known is None or (rows := model.vocab_size - known) <= max(SPARE_ROWS, SPARE_SHARE * known):
        return
    parts = "embedding" if model.tie_embeddings else "embedding and output projection"
    cost = format_count(rows * model.hidden_size * (1 if model.tie_embeddings else 2))
    fits = -(-known // ROW_MULTIPLE) * ROW_MULTIPLE
    change = f"set it to {fits}, a multiple of {ROW_MULTIPLE}"
    if from_elsewhere:
        change = "it is that of init_from, whose tokenizer may be another one"
    yield (
        f"model.vocab_size: given {model.vocab_size}, but the tokenizer has {known} tokens: rows that no token uses "
        f"take {cost} of {format_count(spec.counts.total)} parameters ({parts}); {change}"
    )


def _checkpointing_warnings(
    model: ModelConfig, policy: Literal["budget", "none", "selective", "full"]
) -> Iterator[str]:
    """Sizes by which activation checkpointing confuses a block's matrix products (parallel/activations.py)."""
    widths = {
        "hidden_size": model.hidden_size,
        "heads x head_dim": model.heads * model.head_width,
        "kv_heads x head_dim": model.kv_heads * model.head_width,
    }
    inner = {width for layer in range(model.layers) for width in feed_forward_costs(model, layer).widths}
    for inner_width in sorted(inner if policy in ("selective", "budget") else ()):
        if same := [name for name, width in widths.items() if width == inner_width]:
            owners = () if inner_width == model.intermediate_size else model.given_members
            key = f"model.{''.join(f'{name}.' for name in owners)}intermediate_size"
            yield (
                f"{key}: gives {inner_width} columns, as large as {' and '.join(same)}: activation "
                "checkpointing distinguishes matrix products by the sizes of their weights, so that it keeps other "
                f"results and recomputes more products than planned with activation_checkpointing: {policy}; set it to "
                "none or full, or choose another intermediate_size; no result of training changes"
            )


def _initial_weight_warnings(spec: ModelSpec, folder: Path) -> Iterator[str]:
    """Parameters of attention kinds that the model in `folder`, `init_from`, has and the recipe does not."""
    left_out: dict[tuple[int, str], Shapes] = {}
    with suppress(UserError):  # `plan --no-data`: it need not exist yet
        left_out = left_out_kinds(spec, folder)
    for kind in sorted({kind for _, kind in left_out}):
        layers = sorted(layer for layer, other in left_out if other == kind)
        numbers = sum(math.prod(shape) for layer in layers for shape in left_out[layer, kind].values())
        yield (
            f"init_from: {folder} has {format_count(numbers)} parameters of attention kind {kind!r} in "
            f"{named_layers(layers)}, which no stage of this recipe uses there: they "
            "are left out; use the kind in a stage to keep them"
        )


def _length_warnings(model: ModelConfig, stages: Iterable[Stage], folder: Path) -> Iterator[str]:
    """Stages with longer sequences than the model in `folder`, `init_from`, was made for, and its rotary embedding."""
    with suppress(UserError):
        source, length = source_model(folder), source_length(folder)
        if length is None:
            return
        longest, theirs = _reach(source, length), comparable(source)["rope"]
        for stage in stages:
            ours = comparable(model.model_copy(update={"rope": stage.rope}))["rope"]
            if stage.seq_len > longest and ours == theirs:
                yield (
                    f"stages[{stage.index}].rope: {stage.name!r} has sequences of {stage.seq_len} tokens, and the "
                    f"rotary embedding of init_from ({folder}), which was made for {longest:.0f}; set one for that "
                    "length (docs/how-to/stages.md), unless the stage is to teach the model the new positions"
                )


def _reach(model: ModelConfig, length: int) -> float:
    """Tokens that the model's rotary embedding is for, if it was trained with `length`."""
    ropes = model.rope.by_layer(model.layers)
    if all(rope.kind == "nope" for rope in ropes):
        return math.inf
    # Qwen's config.json with YaRN may have the length before it as max_position_embeddings.
    stretched = (rope for rope in ropes if rope.kind in ("yarn", "longrope"))
    return max([length, *(rope.factor * (rope.original_seq_len or 0) for rope in stretched)])


def _foreign_warnings(stage: Stage, folder: Path) -> Iterator[str]:
    """Warnings of the source of the weights in `folder`, `init_from`, if they are not in our own format."""
    with suppress(UserError):
        source = foreign_source(folder)
        yield from source.warnings(folder, stage.attention) if source else ()


def _initial_tokenizer_warnings(sources: Iterable[tuple[str, SourceConfig]], folder: Path) -> Iterator[str]:
    """Corpora whose tokenizer is not that of `folder`, `init_from`. No error: one tokenizer may be written in several
    ways."""
    with suppress(UserError, OSError):  # `plan --no-data`: neither need exist yet
        trained = initial_tokenizers(folder)
        corpora = [*recorded_tokenizers(sources)] if trained else []
        if other := [(key, path, name) for key, path, name, digest in corpora if digest not in trained]:
            key, path, name = other[0]
            yield (
                f"init_from: {folder} was trained with another tokenizer than {name}, which made the corpus "
                f"{path} ({key}): where the same token ids are other text, its weights are worth nothing; make the "
                "corpora with its tokenizer, unless both are the same one in two forms"
            )


def _known_tokens(sources: NamedSources, tokenizer: str | None) -> int | None:
    """Size of the tokenizer that made the corpora, as their sidecars record it, else of `tokenizer`; None where neither
    can be read."""
    with suppress(DataError):
        sidecars = [read_sidecar(corpus_file(source.path, "json")) or {} for _, source in sources]
        if all(sizes := [info.get("vocab_size", 0) for info in sidecars]):
            return int(max(sizes))
    with suppress(DataError):
        if tokenizer is not None and tokenizer_file(tokenizer).is_file():
            return vocabulary_size(tokenizer)
    return None
