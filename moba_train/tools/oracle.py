"""Cost of sparse attention on given weights, split into three errors by the attentions they are measured with.

- budget: with the ideal selection (mechanisms/oracle.py), less with full attention: what no selector could avoid;
- selector: with the stage's own selection, if it has these sizes, else with MoBA's gate, less with the ideal one;
- weights: full attention on these weights, less full attention on weights that were trained with it (`dense`).

Layers of full attention in the stage's own attention have it in all of these.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.config.attention import LayerAttention
from moba_train.config.base import MOST_SAMPLES, Length, Section, format_count
from moba_train.errors import DataError, ForeignFileError
from moba_train.evals.evaluation import (
    EvaluationContext,
    EvaluationResult,
    EvaluationSetting,
    Layers,
    finite,
    full_attention,
    name_of,
)
from moba_train.evals.position_wise import LongDocumentEvaluation, PositionWise, PositionWiseLoss
from moba_train.foreign_files import read_foreign_json, working_roots
from moba_train.mechanisms.by_group import ByGroupKind, Part
from moba_train.mechanisms.oracle import IdealAttention
from moba_train.tools.full_layers import format_difference
from moba_train.tools.needle.needle import Needle
from moba_train.tools.needle.options import HiddenNeedles, NeedleConfig
from moba_train.tools.tasks.ruler import Ruler, RulerConfig

Budget = IdealAttention.Options

_SIZES = ((512, 8), (128, 8), (128, 32), (64, 32))


RULER_TASKS = ["niah_multikey", "vt"]
"""RULER's tasks that are asked."""


class OracleConfig(HiddenNeedles):
    """Cost of sparse attention, split into budget, selector and weights. See docs/how-to/evaluate.md."""

    not_here = {
        **HiddenNeedles.not_here,
        "ruler": "gone: always niah_multikey and vt",
        "attention": "gone: it changed nothing",
    }

    budgets: list[Budget] = Field(
        [
            *(Budget(block_size=size, topk=topk) for size, topk in _SIZES),
            *(Budget(block_size=size, topk=topk, select="group") for size, topk in _SIZES),
        ],
        min_length=1,
        description="selections to try, each ideal and by MoBA's gate; block_size 1: tokens, ideal alone",
    )
    bucket: Length = Field(2048, description="loss by position: tokens averaged together; divides the seq_len")
    sequences: int = Field(8, ge=1, le=MOST_SAMPLES, description="loss by position: samples of long documents")
    questions: list[Literal["needle", "ruler"]] = Field(
        [],
        description="also ask for needles, at `depths`, or RULER's niah_multikey and vt, at `lengths`; needs "
        "data.tokenizer",
    )
    dense: str | None = Field(
        None,
        min_length=1,
        description="evaluation.json of this evaluation on weights trained with full attention; null: the error of the "
        "weights is not known",
    )

    def named_files(self) -> list[str]:
        """The other weights' result."""
        return [self.dense] if self.dense is not None else []


def label_of(budget: Budget) -> str:
    """Name of a budget: `128/32 group, first + previous`; of tokens: `2048 tokens`."""
    size = f"{budget.block_size}/{budget.topk}" if budget.block_size > 1 else f"{budget.topk} tokens"
    forced = " + ".join(name for name in ("first", "previous") if name in budget.always)
    return size + (" group" if budget.select == "group" else "") + (f", {forced}" if forced else "")


class Oracle(LongDocumentEvaluation[OracleConfig]):
    """Errors of budget, selector and weights: trailing loss, needles and RULER. The numbers are those of the trailing
    loss with the first budget."""

    name = "oracle"
    Options = OracleConfig
    data_name = "oracle_split"
    numbers = frozenset({"budget_error", "selector_error"})
    in_pipelines = False  # layers on several ranks are switched one rank at a time

    def __init__(self, options: OracleConfig, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        self.compare_with_full = True
        self._asked: list[Needle | Ruler] = []
        try:
            for evaluation, asked in _questions(options):
                evaluation.check_samples(asked, setting)
                self._asked.append(evaluation(asked, setting))
        except DataError as error:
            raise DataError(_under(self.key, str(error))) from error
        self.missing = next((one.missing for one in self._asked if one.missing), self.missing)
        self._dense: dict[str, Any] | None = None
        if options.dense is not None and not self.missing:
            scores = {f"{one.name} {length}" for one in self._asked for length in one.lengths}
            self._dense = _read_dense(options.dense, self._shape, scores)

    @classmethod
    def default_options(cls, setting: EvaluationSetting) -> OracleConfig:
        """Buckets as `position_wise` has them, and the budgets whose blocks the length holds more of than they take."""
        seq_len = setting.stage.seq_len
        budgets = [one for one in OracleConfig().budgets if one.block_size * one.topk < seq_len]
        smallest = [Budget(block_size=max(1, seq_len // 16), topk=2)]
        return OracleConfig(bucket=PositionWise.default_options(setting).bucket, budgets=budgets or smallest)

    @classmethod
    def problems(cls, options: OracleConfig, setting: EvaluationSetting) -> Iterator[str]:
        """Those of the base class, and questions that cannot be asked."""
        yield from super().problems(options, setting)
        for budget in options.budgets:
            if len({"current", *budget.always}) > budget.topk:
                yield f"{cls.key}.budgets: given {label_of(budget)}; allowed: a topk of at least the blocks of always"
        for evaluation, asked in _questions(options):
            yield from (_under(cls.key, text) for text in evaluation.problems(asked, setting))

    @classmethod
    def check_samples(cls, options: OracleConfig, setting: EvaluationSetting) -> None:
        """Raise DataError for `lengths` that leave no room for the questions, and other weights' result that cannot be
        compared with."""
        cls(options, setting)

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """All attentions on the same weights and samples."""
        attentions = self._attentions(context)
        context = replace(context, attentions=attentions)
        curves = self._curves(context, self._options.bucket)
        scores: dict[str, dict[str, float]] = {name: {} for name in attentions}
        for asked in self._asked:
            for name, found in _scores(asked, context).items():
                scores[name] |= found
        own = attentions[context.own]
        owned = {name for name, layers in attentions.items() if name.startswith("gate ") and layers == own}
        split = Split(self._options.budgets, curves, scores, self._dense, owned)
        first = split.loss(self._options.budgets[0])
        numbers = {f"{name}_error": first[name].trailing if name in first else 0.0 for name in ("budget", "selector")}
        data = {"attention": context.own, **self._shape, **split.to_json()}
        return EvaluationResult(numbers, split.message(), split.table(), data)

    @property
    def _shape(self) -> dict[str, int]:
        """Facts that two results must have in common to be compared."""
        return {"seq_len": self._samples.seq_len, "bucket": self._options.bucket, "sequences": len(self._samples)}

    def _attentions(self, context: EvaluationContext) -> dict[str, Layers]:
        """Full attention, the stage's own, and each budget with both selectors, in the layers whose own is not full; in
        all that could be sparse, if the stage has full attention. Raises DataError if there is no such layer."""
        own = context.attentions[context.own]
        full = tuple(layer.full() or layer for layer in own)
        may_select = {n for n, layer in enumerate(full) if layer.kind == "full"}
        sparse = {n for n in may_select if own[n].kind != "full"}
        if not sparse and full_attention(own) == own:
            sparse = may_select
        if not sparse:
            raise DataError(f"{self.key}: given layers of {name_of(own)}; allowed: some that kind full could replace")
        parts = [part for n in sorted(sparse) for part in (_parts(own[n]) or [own[n]])]
        selecting = next((part for part in parts if part.kind not in ("full", "moba", "window")), None)
        sizes = None if selecting is None else selecting.options.model_dump()
        moba = next((part.options for part in parts if part.kind == "moba"), MobaAttention.Options())

        def in_sparse(kind: str, options: Any) -> Layers:
            return tuple(_selecting(layer, kind, options) if n in sparse else full[n] for n, layer in enumerate(own))

        found = {"full": full, name_of(own): own}
        for budget in self._options.budgets:
            found[f"oracle {label_of(budget)}"] = in_sparse("oracle", budget)
            if sizes is not None and (sizes.get("block_size"), sizes.get("topk")) == (budget.block_size, budget.topk):
                found[f"gate {label_of(budget)}"] = own
            elif budget.block_size > 1:
                found[f"gate {label_of(budget)}"] = in_sparse("moba", moba.model_copy(update=budget.model_dump()))
        return found


def _parts(layer: LayerAttention) -> tuple[Part, ...]:
    """The parts of a layer whose groups of heads differ."""
    return layer.options.parts if isinstance(layer.options, ByGroupKind.Options) else ()


def _selecting(layer: LayerAttention, kind: str, options: Section) -> LayerAttention:
    """The layer with another selection; groups of heads that are full or have a window stay so."""
    if not _parts(layer):
        return LayerAttention(kind, options)
    stays = [part for part in _parts(layer) if part.kind in ("full", "window")]
    rest = sorted(group for part in _parts(layer) if part not in stays for group in part.groups)
    parts = (*stays, *([Part(kind=kind, groups=tuple(rest), options=options)] if rest else []))
    return LayerAttention(ByGroupKind.name, ByGroupKind.Options(parts=parts))


def _questions(options: OracleConfig) -> Iterator[tuple[Any, Section]]:
    """Evaluations of the `questions`, each with a section of its own."""
    if "needle" in options.questions:
        yield Needle, NeedleConfig(**options.model_dump(include={*NeedleConfig.model_fields}))
    if "ruler" in options.questions:
        yield Ruler, RulerConfig(**options.model_dump(include={*RulerConfig.model_fields}), tasks=RULER_TASKS)


def _under(key: str, problem: str) -> str:
    """A problem of another evaluation's options as one of this evaluation's, which have the same names."""
    for other in (Needle.key, Ruler.key):
        if problem.startswith(other):
            return key + problem.removeprefix(other)
    return problem


def _scores(asked: Needle | Ruler, context: EvaluationContext) -> dict[str, dict[str, float]]:
    """Mean scores with each attention: of all lengths, and of each one."""
    data = asked.run(context).data
    found: dict[str, dict[str, float]] = {}
    for name in context.attentions:
        if isinstance(asked, Needle):
            by_length = [sum(depths) / len(depths) for depths in data["maps"][name]["passed"]]
        else:
            tasks = data["scores"][name]["teacher_forced"].values()
            by_length = [sum(column) / len(column) for column in zip(*tasks, strict=True)]
        found[name] = {asked.name: sum(by_length) / len(by_length)}
        found[name] |= {
            f"{asked.name} {length}": score for length, score in zip(data["lengths"], by_length, strict=True)
        }
    return found


def _read_dense(path: str, shape: Mapping[str, int], scores: Collection[str]) -> dict[str, Any]:
    """Full attention's part of another result. Raises DataError unless it is one, on as many samples of this length,
    with these scores."""
    try:
        content = read_foreign_json(Path(path), roots=[Path(path).resolve().parent, *working_roots()])
        other = content["oracle"]
        if any(other[name] != value for name, value in shape.items()):
            given = {name: other[name] for name in shape}
            raise DataError(f"{Oracle.key}.dense: given {path}, of {given}; allowed: a result of {dict(shape)}")
        full: dict[str, Any] = other["attentions"]["full"]
        asked = {name.split()[0] for name in scores}
        there = {name for name in full["scores"] if " " in name and name.split()[0] in asked}
        if there != {*scores}:  # means over other lengths are no comparison either
            raise DataError(
                f"{Oracle.key}.dense: given {path}, with the scores {', '.join(sorted(there)) or 'of no question'}; "
                f"allowed: a result with {', '.join(sorted(scores))}"
            )
        return full
    except (OSError, ForeignFileError, KeyError, TypeError, ValueError) as error:
        problem = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{Oracle.key}.dense: given {path}, which holds no result of this evaluation ({problem}); allowed: an "
            "evaluation.json of `moba-train eval --tasks oracle`"
        ) from error


def _pair(difference: PositionWiseLoss) -> list[float | None]:
    """A difference of trailing losses and its standard error, as JSON values."""
    pair: list[float | None] = finite([difference.trailing, difference.trailing_error])
    return pair


def _told(difference: PositionWiseLoss) -> str:
    """A difference of trailing losses, with its standard error."""
    return format_difference(difference.trailing, difference.trailing_error)


@dataclass(frozen=True)
class Split:
    """Losses and scores of all attentions, and the errors that follow; above 0: worse."""

    budgets: Sequence[Budget]
    curves: Mapping[str, PositionWiseLoss]
    scores: Mapping[str, Mapping[str, float]]
    """Shares of right answers by name, for each attention."""
    dense: Mapping[str, Any] | None
    """Full attention's entry in the result on weights that were trained with it."""
    owned: Collection[str]
    """Names of the gates that are the stage's own attention."""

    def pairs(self, budget: Budget) -> dict[str, tuple[str, str]]:
        """By the error's name, two attentions that differ by it alone: the one that has it first."""
        label = label_of(budget)
        found = {"budget": (f"oracle {label}", "full")}
        return found | ({"selector": (f"gate {label}", f"oracle {label}")} if f"gate {label}" in self.curves else {})

    def loss(self, budget: Budget) -> dict[str, PositionWiseLoss]:
        """Errors in loss, nats per token."""
        return {name: self.curves[one].above(self.curves[other]) for name, (one, other) in self.pairs(budget).items()}

    def score(self, budget: Budget, of: str) -> dict[str, float]:
        """Errors in a share of right answers."""
        return {name: self.scores[b][of] - self.scores[a][of] for name, (a, b) in self.pairs(budget).items()}

    def weights(self) -> tuple[PositionWiseLoss, dict[str, float]] | None:
        """The error of the weights in trailing loss and in each share; None if it is not known."""
        if self.dense is None:
            return None
        full = self.curves["full"]
        before = PositionWiseLoss(full.bucket, np.array(self.dense["trailing_by_sequence"])[:, None])
        shares = {name: self.dense["scores"][name] - share for name, share in self.scores["full"].items()}
        return replace(full, losses=full.losses[:, -1:]).above(before), shares

    def to_json(self) -> dict[str, Any]:
        """JSON values: every attention, and the errors of every budget."""
        attentions = {name: {**curve.to_json(), "scores": self.scores[name]} for name, curve in self.curves.items()}
        budgets = [
            {
                "label": label_of(budget),
                **budget.model_dump(mode="json"),
                "own_gate": f"gate {label_of(budget)}" in self.owned,
                "loss": {name: _pair(gap) for name, gap in self.loss(budget).items()},
                "scores": {of: self.score(budget, of) for of in self.scores["full"]},
            }
            for budget in self.budgets
        ]
        weights = self.weights()
        of_weights = None if weights is None else {"loss": _pair(weights[0]), "scores": weights[1]}
        return {"attentions": attentions, "budgets": budgets, "weights": of_weights}

    def table(self) -> list[str]:
        """Loss by position of every attention, then the errors of every budget."""
        full = self.curves["full"]
        edges = [format_count(place * full.bucket, 1024) for place in range(1, full.losses.shape[1] + 1)]
        shares = [*self.scores["full"]]
        width = max(map(len, self.curves)) + 2
        lines = [f"{'loss up to token':<{width}}" + "".join(f"{name:>12}" for name in [*edges, *shares])]
        for name, curve in self.curves.items():
            values = [*curve.mean, *(self.scores[name][share] for share in shares)]
            lines.append(f"{name:<{width}}" + "".join(f"{value:>12.4f}" for value in values))
        columns = ["budget", "selector"]
        heads = [f"loss: {name}" for name in columns] + [f"{share}: {name}" for share in shares for name in columns]
        lines += ["", f"{'error of':<{width}}" + "".join(f"{head:>24}" for head in heads)]
        for budget in self.budgets:
            losses = self.loss(budget)
            cells = [_told(losses[name]) if name in losses else "–" for name in columns]
            for share in shares:
                errors = self.score(budget, share)
                cells += [f"{errors[name]:+.3f}" if name in errors else "–" for name in columns]
            lines.append(f"{label_of(budget):<{width}}" + "".join(f"{cell:>24}" for cell in cells))
        if (weights := self.weights()) is not None:
            told = "".join(f", {share} {error:+.3f}" for share, error in weights[1].items())
            lines.append(f"error of the weights: loss {_told(weights[0])}{told}")
        return [*lines, self.message()]

    def message(self) -> str:
        """The first budget in a sentence."""
        errors = self.loss(self.budgets[0])
        text = f"trailing loss {self.curves['full'].trailing:.4f} with full attention; {label_of(self.budgets[0])} "
        text += f"loses {_told(errors['budget'])} by its budget"
        return text + (f" and {_told(errors['selector'])} by its selector" if "selector" in errors else "")
