"""Choice of the layers that stay full in a model whose other layers are sparse, by measurement instead of by position.

Each layer is switched alone: with all others sparse, what the loss gains when it is full; with all others full, what it
loses when it is sparse. The layers that gain most are chosen and measured together, as are the last ones, which MoBA's
authors chose. Gains need not add up: layers may do each other's work.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from moba_train.config.base import MOST_SAMPLES, Length, Section
from moba_train.config.stages import Stage
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.errors import DataError
from moba_train.evals.evaluation import (
    Evaluation,
    EvaluationContext,
    EvaluationResult,
    EvaluationSetting,
    Layers,
    full_attention,
)
from moba_train.evals.position_wise import PositionWise, PositionWiseLoss, position_wise_loss
from moba_train.mechanisms.probes.gate_probe import GateProbe, GateProbeConfig


class FullLayersConfig(Section):
    """Layers that should stay full, chosen by loss. See docs/how-to/evaluate.md."""

    count: int = Field(3, ge=1, description="layers to choose")
    bucket: Length = Field(2048, description="last tokens of a sequence whose loss counts; divides the seq_len")
    sequences: int = Field(8, ge=1, le=MOST_SAMPLES, description="samples of long documents")
    queries: int = Field(256, ge=1, description="queries of one sequence for the probability outside the selection")
    every: int | None = Field(
        None, ge=1, description="optimizer steps between evaluations; null: evaluation.every; always at a stage's end"
    )


class FullLayers(Evaluation[FullLayersConfig]):
    """Trailing loss with each layer switched alone, and the `full_layers` that follow."""

    name = "full_layers"
    Options = FullLayersConfig
    data_name = "full_layers_chosen"
    numbers = frozenset({"full_layers_loss"})

    def __init__(self, options: FullLayersConfig, setting: EvaluationSetting) -> None:
        self.every = options.every or setting.every
        self._options = options
        self._probe = GateProbe(GateProbeConfig(queries=options.queries), setting)
        seq_len = setting.stage.seq_len
        self._samples = LongDocumentSamples(
            setting.validation, seq_len, options.sequences, setting.seed, setting.model.vocab_size
        )
        if not len(self._samples):
            self.missing = f"data.validation has no document longer than the stage's {seq_len} tokens"

    @classmethod
    def default_options(cls, setting: EvaluationSetting) -> FullLayersConfig:
        """Buckets as `position_wise` has them, and at most half of the layers."""
        count = max(1, min(3, setting.model.layers // 2))
        return FullLayersConfig(bucket=PositionWise.default_options(setting).bucket, count=count)

    @classmethod
    def problems(cls, options: FullLayersConfig, setting: EvaluationSetting) -> Iterator[str]:
        """No documents, a bucket that does not divide the length, and more layers than the model has."""
        if not setting.validation:
            yield f"{cls.key}: needs documents to evaluate on; set data.validation, or remove it"
        stage = setting.stage
        layers = setting.model.layers
        if stage.evaluate and stage.seq_len % options.bucket:
            given = f"{cls.key}.bucket: given {options.bucket}"
            yield f"{given}, which does not divide stages[{stage.index}].seq_len {stage.seq_len}"
        if options.count >= layers:
            yield f"{cls.key}.count: given {options.count}; allowed: fewer than the model's {layers} layers"

    @classmethod
    def pipeline_problem(cls, options: FullLayersConfig) -> tuple[str, str]:
        """All of it."""
        return f"{cls.key}: given", "set it to null and run `moba-train eval`"

    @classmethod
    def sequences_per_pass(cls, stage: Stage) -> int:
        """One, because losses are reported for each sequence."""
        return 1

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`full_layers_loss`: with the chosen layers full and all others sparse."""
        own = context.attentions[context.own]
        sparse = next((layer for layer in own if layer.kind != "full" and full_attention(layer) != layer), None)
        if sparse is None:
            raise DataError(f"{self.key}: all layers have full attention; give attention.default=moba, for example")
        count = self._options.count
        layers = range(len(own))

        def with_full_in(chosen: Sequence[int]) -> Layers:
            full = map(full_attention, own)  # or, of bare layers, their own
            return tuple(layer if n in chosen or layer.kind != "full" else sparse for n, layer in enumerate(full))

        alone = {f"only {layer} full": with_full_in([layer]) for layer in layers}
        others = {f"only {layer} sparse": with_full_in([at for at in layers if at != layer]) for layer in layers}
        ends = {"sparse": with_full_in([]), "full": with_full_in(layers)}
        losses = self._losses(context, {**ends, **alone, **others})
        gains = [losses["sparse"].above(losses[f"only {layer} full"]) for layer in layers]
        costs = [losses[f"only {layer} sparse"].above(losses["full"]) for layer in layers]
        chosen = sorted(sorted(layers, key=lambda layer: -gains[layer].trailing)[:count])
        last = [*layers][-count:]
        losses |= self._losses(context, {"chosen": with_full_in(chosen), "last": with_full_in(last)})
        probed = self._probe.run(replace(context, attentions={"sparse": ends["sparse"]})).data["layers"]
        outside = {layer["layer"]: 1 - layer["mass_recall"] for layer in probed}
        rows = [
            {
                "layer": layer,
                "gain": gains[layer].trailing,
                "gain_error": gains[layer].trailing_error,
                "cost": costs[layer].trailing,
                "cost_error": costs[layer].trailing_error,
                "mass_outside": outside.get(layer),
            }
            for layer in layers
        ]
        trailing = {name: losses[name].trailing for name in ("sparse", "full", "chosen", "last")}
        fragment = yaml_fragment(chosen, count, trailing, rows)
        message = f"full_layers {chosen}: trailing loss {trailing['chosen']:.4f}, last:{count} {trailing['last']:.4f}"
        data = {"attention": context.own, "chosen": chosen, "losses": trailing, "layers": rows, "yaml": fragment}
        context.restore_attention()
        table = [f"{context.own}, the layers that stay full:", *fragment, message]
        return EvaluationResult({"full_layers_loss": trailing["chosen"]}, message, table, data)

    def _losses(self, context: EvaluationContext, attentions: Mapping[str, Layers]) -> dict[str, PositionWiseLoss]:
        """Loss by position with each of these attentions."""
        trying = replace(context, attentions=dict(attentions))
        arguments = context.model, self._samples, self._options.bucket, context.data_shard, context.device
        return {name: position_wise_loss(*arguments, context.between_batches) for name in trying.each_attention()}


def yaml_fragment(
    chosen: Sequence[int], count: int, losses: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Lines of a recipe that keep these layers full, with what was measured beside them."""
    lines = [
        "attention:",
        f"  full_layers: {[*chosen]}",
        f"  # trailing loss {losses['chosen']:.4f}; with last:{count} {losses['last']:.4f}, all sparse "
        f"{losses['sparse']:.4f}, all full {losses['full']:.4f}",
        "  # layer  gain if it alone is full  loss if it alone is sparse  probability outside the selection",
    ]
    for row in rows:
        outside = "–" if row["mass_outside"] is None else f"{row['mass_outside']:.3f}"
        gain, cost = (f"{row[name]:+.4f} ± {row[f'{name}_error']:.4f}" for name in ("gain", "cost"))
        lines.append(f"  # {row['layer']:>5}  {gain:>24}  {cost:>26}  {outside:>33}")
    return lines
