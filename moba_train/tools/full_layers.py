"""Choice of the layers that stay full in a model whose other layers are sparse, by measurement instead of by position.

Each layer is switched alone (as LoZA does): with all others sparse, what the loss gains when it is full; with all
others full, what it loses when it is sparse. Other candidates are the layers whose probability lies outside the
selection, those whose heads copy a needle (RTPurbo, arXiv:2605.16928), equal steps, and the last ones, which MoBA's
authors chose. Each candidate's layers are then measured together, as gains need not add up: layers may do each other's
work. Groups of heads may be candidates, too few to fill their layers (`by_group`): as many groups as those layers have.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import Field, field_validator

from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.base import MOST_SAMPLES, Length
from moba_train.config.load import Dumper
from moba_train.data.samples import Sample
from moba_train.errors import DataError
from moba_train.evals.evaluation import EvaluationContext, EvaluationResult, EvaluationSetting, Layers
from moba_train.evals.position_wise import (
    LongDocumentEvaluation,
    PositionWise,
    PositionWiseLoss,
    SamplesOfOneLength,
    position_wise_loss,
)
from moba_train.mechanisms.by_group import ByGroupKind, Part, can_be_part
from moba_train.mechanisms.probes.gate_probe import GateProbe, GateProbeConfig
from moba_train.mechanisms.probes.head_reach import Budget, Look, head_reach
from moba_train.tools.needle.answers import Question, answer_sample, padded_length
from moba_train.tools.needle.haystack import stage_lengths
from moba_train.tools.needle.needle import NeedleTexts, text_problems
from moba_train.tools.needle.options import HiddenNeedles


class FullLayersConfig(HiddenNeedles):
    """Layers that should stay full, chosen by loss. See docs/how-to/evaluate.md."""

    not_here = {
        **HiddenNeedles.not_here,
        "queries": "gone: always 256",
        "windows": "gone: attention.overrides gives layers a window",
        "attention": "gone: it changed nothing",
    }

    count: int = Field(3, ge=1, description="layers to choose")
    bucket: Length = Field(2048, description="last tokens of a sequence whose loss counts; divides the seq_len")
    sequences: int = Field(8, ge=1, le=MOST_SAMPLES, description="samples of long documents")
    switch: list[Literal["full", "sparse"]] = Field(
        ["full", "sparse"],
        description="how each layer is tried alone; full: all others are sparse; sparse: all others are full, which is "
        "much the quicker with a slow kind such as oracle",
    )
    groups: bool = Field(
        False,
        description="also try groups of heads of any layers, as many as `count` layers have: those with the most "
        "probability outside and, unless `by: loss`, those that copy needles; see the kind by_group",
    )
    stands_for: dict[str, Any] | None = Field(
        None,
        description="`kind` and `options` that other groups have in the recipe, if the sparse kind here stands for it",
    )
    by: Literal["loss", "needle", "copy"] = Field(
        "loss",
        description="what decides: the loss of the last tokens of long documents or of needles' answers, or, copy, the "
        "probability that a layer's heads, or a group's, give the needle's token, whatever the losses; needle and "
        "copy take the longest length and need data.tokenizer",
    )

    @field_validator("stands_for")
    @classmethod
    def _is_a_part(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Refuses, before anything is measured, what a recipe could not have."""
        if given is not None:
            Part.model_validate({**given, "groups": [0]})
        return given


class FullLayers(LongDocumentEvaluation[FullLayersConfig]):
    """Loss with each layer switched alone and with each candidate, and the `full_layers` that follow."""

    name = "full_layers"
    Options = FullLayersConfig
    data_name = "full_layers_chosen"
    numbers = frozenset({"full_layers_loss"})
    in_pipelines = False

    def __init__(self, options: FullLayersConfig, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        self.compare_with_full = False
        self._probe = GateProbe(GateProbeConfig(), setting)
        self._questions: list[Question] = []
        if options.by != "loss":
            length = max(stage_lengths(options, setting.stage), default=setting.stage.seq_len)
            self._questions = NeedleTexts(options, setting, self.key).questions(length)

    @classmethod
    def default_options(cls, setting: EvaluationSetting) -> FullLayersConfig:
        """Buckets as `position_wise` has them, and at most half of the layers."""
        count = max(1, min(3, setting.model.layers // 2))
        return FullLayersConfig(bucket=PositionWise.default_options(setting).bucket, count=count)

    @classmethod
    def problems(cls, options: FullLayersConfig, setting: EvaluationSetting) -> Iterator[str]:
        """Those of the base class, more layers than the model has, and texts that cannot be made."""
        yield from super().problems(options, setting)
        layers = setting.model.layers
        if options.count >= layers:
            yield f"{cls.key}.count: given {options.count}; allowed: fewer than the model's {layers} layers"
        if options.by != "loss":
            yield from text_problems(options, setting, cls.key)

    @classmethod
    def check_samples(cls, options: FullLayersConfig, setting: EvaluationSetting) -> None:
        """Raise DataError for a length that leaves no room for the needles."""
        cls(options, setting)

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`full_layers_loss`: trailing loss with the chosen layers full and all others sparse."""
        own = context.attentions[context.own]
        # All others keep what kind `full`, which attention.full_layers means, lacks: a window, a cap, parameters.
        full = tuple(layer if layer.kind == "window" else layer.full() or layer for layer in own)
        open_layers = [number for number, layer in enumerate(full) if layer.kind == "full"]
        sparse = next((own[layer] for layer in open_layers if own[layer].kind != "full"), None)
        count = self._options.count
        if sparse is None:
            raise DataError(f"{self.key}: no layer could be full and is not; give attention.default=moba, for example")
        if count >= len(open_layers):
            raise DataError(
                f"{self.key}.count: given {count}; allowed: fewer than the {len(open_layers)} layers that can be either"
            )
        if self._options.groups and not can_be_part(KINDS[sparse.kind]):
            raise DataError(
                f"{self.key}.groups: given true with kind {sparse.kind}; allowed: kinds of {ByGroupKind.name}"
            )
        model = _Switched(own, full, open_layers, sparse, context.model.config.kv_heads)
        ends = {"sparse": model.full_in([]), "full": model.full_in(open_layers)}
        alone = {
            f"only {layer} {how}": model.full_in([layer] if how == "full" else {*open_layers} - {layer})
            for how in self._options.switch
            for layer in open_layers
        }
        found = self._measured(context, {**ends, **alone})
        groups = self._reach(context, sparse, ends["full"])
        seen = replace(context, attentions={"sparse": ends["sparse"]})
        selected = {one["layer"]: 1 - one["mass_recall"] for one in self._probe.run(seen).data["layers"]}
        rows = [
            {
                "layer": layer,
                "gain": found["sparse"].above(one) if (one := found.get(f"only {layer} full")) else None,
                "cost": one.above(found["full"]) if (one := found.get(f"only {layer} sparse")) else None,
                "mass_outside": selected.get(layer, _mean(groups[layer], "outside")),
                "copy": max(group["copy"] for group in groups[layer]) if self._questions else None,
                "groups": groups[layer],
            }
            for layer in open_layers
        ]
        chosen_by = self._candidates(rows)
        together = self._measured(context, {str(layers): model.full_in(layers) for layers in chosen_by.values()})
        found |= {name: together[str(layers)] for name, layers in chosen_by.items()}
        groups_by = self._group_candidates(rows) if self._options.groups else {}
        found |= self._measured(context, {name: model.full_in_groups(some) for name, some in groups_by.items()})
        best = min([*chosen_by, *groups_by], key=lambda name: found[name].deciding.trailing)
        if self._options.by == "copy":
            best = "groups_copy" if groups_by else "copy"
        overrides: dict[int, dict[str, Any]] = {}
        if best in groups_by:
            every = model.kv_heads
            chosen_by[best] = [layer for layer, some in groups_by[best].items() if len(some) == every]
            overrides = {
                layer: {"kind": ByGroupKind.name, "parts": [self._rest(sparse, some, every)]}
                for layer, some in groups_by[best].items()
                if len(some) < every
            }
        context.restore_attention()
        return self._result(context, found, {**chosen_by, **groups_by}, chosen_by[best], best, rows, overrides)

    def _candidates(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
        """Layers to compare, by what they are chosen by."""
        count = self._options.count
        layers = [row["layer"] for row in rows]

        def most(value: Any) -> list[int]:
            return sorted(row["layer"] for row in sorted(rows, key=value, reverse=True)[:count])

        found = {
            name: most(lambda row, name=name: row[name].deciding.trailing)
            for name, how in (("gain", "full"), ("cost", "sparse"))
            if how in self._options.switch
        }
        found |= {
            "mass_outside": most(lambda row: row["mass_outside"]),
            "spread": [layers[place] for place in np.linspace(0, len(layers) - 1, count + 2).round().astype(int)[1:-1]],
            "last": layers[-count:],
        }
        return found | ({"copy": most(lambda row: row["copy"])} if self._questions else {})

    def _group_candidates(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, list[int]]]:
        """Groups of heads to compare, by layer, by what they are chosen by."""

        def most(key: str) -> dict[int, list[int]]:
            groups = [(one[key], row["layer"], number) for row in rows for number, one in enumerate(row["groups"])]
            count = self._options.count * len(rows[0]["groups"])
            found: dict[int, list[int]] = {}
            for layer, number in sorted(place for _, *place in sorted(groups, reverse=True)[:count]):
                found.setdefault(layer, []).append(number)
            return found

        return {f"groups_{key}": most(key) for key in ("outside", *(["copy"] if self._questions else []))}

    def _rest(self, sparse: LayerAttention, full: Sequence[int], kv_heads: int) -> dict[str, Any]:
        """The part of a layer, in a recipe, whose groups of heads are not full."""
        options = sparse.options.model_dump(mode="json", exclude_defaults=True)
        named = self._options.stands_for or {"kind": sparse.kind, "options": options}
        return {"groups": [group for group in range(kv_heads) if group not in full], **named}

    def _result(
        self,
        context: EvaluationContext,
        found: Mapping[str, "_Losses"],
        shown_by: Mapping[str, Any],
        chosen: Sequence[int],
        best: str,
        rows: Sequence[Mapping[str, Any]],
        overrides: Mapping[int, Mapping[str, Any]],
    ) -> EvaluationResult:
        shown = {"sparse": [], "full": [row["layer"] for row in rows], **shown_by}
        candidates = [{"name": name, "layers": layers, **found[name].to_json()} for name, layers in shown.items()]
        plain = [{**row, **_told("gain", row["gain"]), **_told("cost", row["cost"])} for row in rows]
        fragment = yaml_fragment(chosen, best, candidates, plain, overrides)
        losses = {name: found[name].trailing.trailing for name in ("sparse", "full", "last")}
        losses["chosen"] = found[best].trailing.trailing
        message = (
            f"full_layers {[*chosen]}, by {best}: trailing loss {losses['chosen']:.4f}, "
            f"last:{self._options.count} {losses['last']:.4f}"
        )
        data = {
            "attention": context.own,
            "by": self._options.by,
            "chosen": [*chosen],
            "losses": losses,
            "candidates": candidates,
            "layers": plain,
            "yaml": fragment,
        }
        table = [f"{context.own}, the layers that stay full:", *fragment, message]
        return EvaluationResult({"full_layers_loss": losses["chosen"]}, message, table, data)

    def _measured(self, context: EvaluationContext, attentions: Mapping[str, Layers]) -> dict[str, "_Losses"]:
        """Losses with each of these attentions."""
        trying = replace(context, attentions=dict(attentions))
        answers = self._answers(context)

        def loss(samples: SamplesOfOneLength, bucket: int) -> PositionWiseLoss:
            arguments = context.model, samples, bucket, context.data_shard, context.device
            return position_wise_loss(*arguments, context.between_batches)

        return {
            name: _Losses(
                loss(self._samples, self._options.bucket),
                loss(answers, answers.seq_len) if len(answers) else None,
            )
            for name in trying.each_attention()
        }

    def _answers(self, context: EvaluationContext) -> "_Answers":
        """The questions, as samples of one length."""
        longest = max((len(question.tokens) for question in self._questions), default=0)
        return _Answers(self._questions, padded_length(longest, context.data_shard))

    def _budget(self, sparse: LayerAttention) -> Budget:
        """Keys that the kind attends to; a quarter of the sequence for one without blocks."""
        options = sparse.options.model_dump()
        return Budget(options.get("block_size", max(1, self._samples.seq_len // 64)), options.get("topk", 16))

    def _reach(self, context: EvaluationContext, sparse: LayerAttention, full: Layers) -> list[list[dict[str, float]]]:
        """Means over the heads of each group, by layer, with the attention `full`: probability outside the best blocks
        of the kind's budget, outside a window of as many keys, and, at needles' answers, the most that a head gives the
        token to copy."""
        config = context.model.config
        seq_len = self._samples.seq_len
        budget = self._budget(sparse)
        count = min(GateProbeConfig().queries, seq_len // 2)
        tokens = np.linspace(seq_len // 2, seq_len - 1, count).astype(int).tolist()
        texts = [Look(self._samples.sample(index), tokens, []) for index in range(len(self._samples))]
        answers = self._answers(context)
        asked = [
            Look(answers.sample(index), [place - 1 for place in one.places], one.sources)
            for index, one in enumerate(self._questions)
        ]
        outside, window, _ = head_reach(context, full, texts, budget).swapaxes(0, 1)
        copied = head_reach(context, full, asked, budget)[:, 2]
        shape = (config.layers, config.kv_heads, -1)
        by_group = [outside.reshape(shape).mean(-1), window.reshape(shape).mean(-1), copied.reshape(shape).max(-1)]
        names = ("outside", "outside_window", "copy")
        return [
            [dict(zip(names, map(float, group), strict=True)) for group in zip(*layer, strict=True)]
            for layer in zip(*by_group, strict=True)
        ]


@dataclass(frozen=True)
class _Switched:
    """The model's layers, of which some can be switched between full and sparse attention."""

    own: Layers
    full: Layers
    switched: Sequence[int]
    sparse: LayerAttention
    kv_heads: int

    def full_in(self, chosen: Collection[int]) -> Layers:
        """Full attention in the `chosen` layers, sparse attention in the rest."""

        def attention(layer: int) -> LayerAttention:
            if layer not in self.switched:
                return self.own[layer]
            return self.full[layer] if layer in chosen else self.sparse

        return tuple(map(attention, range(len(self.own))))

    def full_in_groups(self, chosen: Mapping[int, Sequence[int]]) -> Layers:
        """Full attention in these groups of heads, by layer, sparse attention in the rest."""
        found = [*self.full_in([layer for layer, groups in chosen.items() if len(groups) == self.kv_heads])]
        for layer, groups in chosen.items():
            if len(groups) < self.kv_heads:
                rest = tuple(group for group in range(self.kv_heads) if group not in groups)
                part = Part(kind=self.sparse.kind, groups=rest, options=self.sparse.options)
                found[layer] = LayerAttention(ByGroupKind.name, ByGroupKind.Options(parts=(part,)))
        return tuple(found)


@dataclass(frozen=True)
class _Losses:
    """Losses with one attention, or their differences between two."""

    trailing: PositionWiseLoss
    answers: PositionWiseLoss | None

    @property
    def deciding(self) -> PositionWiseLoss:
        """The loss that layers are chosen by."""
        return self.answers or self.trailing

    def above(self, other: "_Losses") -> "_Losses":
        """Difference on the same samples."""
        answers = None if self.answers is None or other.answers is None else self.answers.above(other.answers)
        return _Losses(self.trailing.above(other.trailing), answers)

    def to_json(self) -> dict[str, float | None]:
        """Means and standard errors."""
        answers = self.answers
        return {
            "trailing": self.trailing.trailing,
            "trailing_error": self.trailing.trailing_error,
            "answers": None if answers is None else answers.trailing,
            "answers_error": None if answers is None else answers.trailing_error,
        }


class _Answers:
    """Questions as samples whose mean loss over all tokens is the mean loss of their answers' tokens."""

    def __init__(self, questions: Sequence[Question], length: int) -> None:
        self._questions = questions
        self.seq_len = length

    def __len__(self) -> int:
        return len(self._questions)

    def sample(self, index: int) -> Sample:
        """Question `index`."""
        question = self._questions[index]
        found = answer_sample(question, self.seq_len)
        return replace(found, loss_weight=found.loss_weight * np.float32(self.seq_len / len(question.places)))


def _told(name: str, difference: _Losses | None) -> dict[str, float | None]:
    """A difference of the loss that decides, and its standard error; None if it was not measured."""
    if difference is None:
        return {name: None, f"{name}_error": None}
    loss = difference.deciding
    return {name: loss.trailing, f"{name}_error": loss.trailing_error}


def format_difference(mean: float | None, error: float | None) -> str:
    """A difference with its standard error, which a single sequence does not have; – for none."""
    if mean is None:
        return "–"
    return f"{mean:+.4f}" + ("" if error is None or math.isnan(error) else f" ± {error:.4f}")


def _mean(groups: Sequence[Mapping[str, float]], key: str) -> float:
    return sum(group[key] for group in groups) / len(groups)


def yaml_fragment(
    chosen: Sequence[int],
    best: str,
    candidates: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    overrides: Mapping[int, Mapping[str, Any]],
) -> list[str]:
    """Lines of a recipe that keep these layers full, with what was measured beside them."""
    lines = ["attention:", f"  full_layers: {[*chosen]}"]
    if overrides:
        text = yaml.dump(dict(overrides), Dumper=Dumper, default_flow_style=True, width=1000)
        lines.append(f"  overrides: {text.strip()}")
    lines.append(f"  # chosen by {best}; all others sparse, or with a window in the line of that name:")
    for one in candidates:
        answers = "" if one["answers"] is None else f", of needles' answers {one['answers']:.4f}"
        layers = "all" if one["name"] == "full" else one["layers"]
        lines.append(f"  #   {one['name']:<12} {layers}: trailing loss {one['trailing']:.4f}{answers}")
    lines.append("  # layer  gain if it alone is full  loss if it alone is sparse  probability outside the selection")
    for row in rows:
        gain, cost = (format_difference(row[name], row[f"{name}_error"]) for name in ("gain", "cost"))
        lines.append(f"  # {row['layer']:>5}  {gain:>24}  {cost:>26}  {row['mass_outside']:>33.3f}")
    lines.append(
        "  # groups of heads: probability outside the best blocks / outside a window; most of a needle's token"
    )
    for row in rows:
        cells = [f"{one['outside']:.3f} / {one['outside_window']:.3f}; {one['copy']:.3f}" for one in row["groups"]]
        lines.append(f"  # {row['layer']:>5}  {'   '.join(cells)}")
    return lines
