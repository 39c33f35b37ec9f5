"""The kind `by_group`: the groups of heads of a layer, each of which shares a key/value head, have different kinds.

A group whose heads look far away may stay full, or have a window, while the others select
(`moba-train eval --tasks full_layers` says which). Each part of the layer is its kind on a smaller layer: the queries,
keys and values of its groups, and the whole input. Parts gather keys by themselves under context parallelism and while
tokens are generated, so that any of these kinds may be joined.

Shape suffixes: T rows given to the layer, n tokens among them, H query heads, K key/value heads, G query heads of a
group, d head width.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError, ValidationInfo, WithJsonSchema, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.attention.engine import Engine
from moba_train.attention.kind import (
    AttentionKind,
    KindFacts,
    LayerInput,
    MicroBatch,
    StageContext,
    TokenBytes,
    TwoSublayers,
)
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import LocalAttention
from moba_train.attention.shard import Shard, ShardPlace, States, attends_to_all, own_rows, padded
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.explain import explain
from moba_train.config.model import ModelConfig
from moba_train.model.build import attention_of_new_tokens
from moba_train.registry import ATTENTION_KINDS


def can_be_part(kind: Any) -> bool:
    """True for kinds that attend by softmax to keys: full attention, windows, and what selects blocks. None that has a
    second sublayer: that is of all heads."""
    selects = {"block_size", "topk"} <= kind.Options.model_fields.keys()
    return kind.name in ("full", "window") or (selects and not issubclass(kind, TwoSublayers))


class Part(Section):
    """Groups of heads and their kind."""

    groups: tuple[int, ...] = Field(min_length=1, description="groups, that is key/value heads, counted from 0")
    kind: str = Field(description="their attention kind")
    options: Annotated[Any, WithJsonSchema({"type": "object"})] = Field({}, description="options of that kind")

    @model_validator(mode="before")
    @classmethod
    def _with_options(cls, given: Any, info: ValidationInfo) -> Any:
        """The part whose options are the kind's section."""
        if not isinstance(given, dict) or not isinstance(name := given.get("kind"), str):
            return given
        kind = ATTENTION_KINDS.get(name)
        if kind is None or not can_be_part(kind):
            allowed = [other for other, one in ATTENTION_KINDS.usable().items() if can_be_part(one)]
            raise ValueError(f"kind: given {name}; allowed: {', '.join(allowed)}")
        options = given.get("options", {})
        if not isinstance(options, Section):
            try:
                options = kind.Options.model_validate(options, context=info.context)
            except ValidationError as error:
                found = (f"options.{problem}" for problem in explain(error, kind.Options))
                raise ValueError("; ".join(found).replace("options.the recipe:", "options:")) from None
        return {**given, "options": options}


class _NamedStates(States):
    """States while tokens are generated: those of the layer whose names begin with this one."""

    def __init__(self, states: States, name: str) -> None:
        self._states = states
        self._prefix = f"{name}."

    def get(self, name: str) -> Tensor | None:
        return self._states.get(self._prefix + name)

    def __setitem__(self, name: str, states_Bx: Tensor) -> None:
        self._states[self._prefix + name] = states_Bx


class NamedShard(Shard):
    """A shard for a part of a layer: what it gathers and its states have names of their own."""

    def __init__(self, shard: Shard, name: str) -> None:
        self._shard = shard
        self._name = name
        self.generation = given = shard.generation
        if given is not None:
            self.generation = given._replace(states=_NamedStates(given.states, name))

    @property
    def layout(self) -> Layout:
        return self._shard.layout

    @property
    def place(self) -> ShardPlace:
        return self._shard.place

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        return self._shard.gather(f"{self._name}.{name}", x_nx)

    def all_ranks(self, x: Tensor) -> Tensor:
        return self._shard.all_ranks(x)

    def attend(
        self, q_nHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, selected_HnC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._shard.attend(q_nHD, k_TKD, v_TKD, attention, selected_HnC)


class _PartEngine(Engine):
    """A part's engine: it gathers keys and attends by itself, as an engine exchanges the keys of a whole layer."""

    def __init__(self, engine: Engine, name: str, full: LocalAttention | None) -> None:
        """`full`: `attention_of_new_tokens`."""
        self._engine = engine
        self._name = name
        self._full = full
        self.observers = engine.observers

    def __call__(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout, *sink: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert not sink, "no kind that takes sinks is given one here"
        shard = self.shard(layout)
        if attends_to_all(shard):
            attention = self._full or attention
        k_TKD, v_TKD = (shard.gather(name, own_rows(x, shard)) for name, x in (("k", k_LKD), ("v", v_LKD)))
        out_nHD, lse_Hn = shard.attend(own_rows(q_LHD, shard), k_TKD, v_TKD, attention)
        return padded(out_nHD, len(q_LHD)), F.pad(lse_Hn, (0, len(q_LHD) - len(out_nHD)))

    def shard(self, layout: Layout) -> Shard:
        return NamedShard(self._engine.shard(layout), self._name)


class _PartModules(nn.ModuleDict):
    """Parameters of the parts by their kinds, and the groups that each has."""

    def __init__(self, modules: Mapping[str, nn.Module], groups: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(modules)
        self.groups = groups


class _PartLayer(nn.Module):
    """A layer's projections as a part has them, from which it derives values of its own."""

    def __init__(self, layer: nn.Module, groups: Sequence[int], kv_heads: int) -> None:
        super().__init__()
        self._layer = layer
        self._groups = [*groups]
        self._kv_heads = kv_heads

    def get_parameter(self, target: str) -> nn.Parameter:
        """The rows of its heads, in a tensor that is not sharded."""
        whole = self._layer.get_parameter(target)
        rows = (whole.full_tensor() if isinstance(whole, DTensor) else whole).unflatten(0, (self._kv_heads, -1))
        return nn.Parameter(rows[self._groups].flatten(0, 1))


def with_the_rest(named: Mapping[str, tuple[int, ...]], kv_heads: int) -> dict[str, tuple[int, ...]]:
    """Groups by their kind, those that are not named by `full`."""
    given = {group for groups in named.values() for group in groups}
    rest = tuple(group for group in range(kv_heads) if group not in given)
    return {**named, "full": (*named.get("full", ()), *rest)} if rest else dict(named)


class ByGroupKind(AttentionKind):
    """Groups of heads with different kinds; those that no part names have full attention."""

    name = "by_group"

    class Options(Section):
        """Options of `kind: by_group`."""

        parts: tuple[Part, ...] = Field(
            (), description="groups of heads, their kinds and options, a kind once; other groups have full attention"
        )
        mode: Literal["warmup", "sparse"] | None = Field(
            None, description="`mode` of parts whose kind has one, such as msa; null: as their options say"
        )

        @model_validator(mode="after")
        def _each_once(self) -> Self:
            groups = [str(group) for part in self.parts for group in part.groups]
            for what, values in (("kind", [part.kind for part in self.parts]), ("group", groups)):
                if twice := {value for value in values if values.count(value) > 1}:
                    raise ValueError(f"parts: given {what} {min(twice)} more than once; allowed: once")
            return self

        def complete(self, kv_heads: int) -> list[Part]:
            """The parts with `mode`, and the groups that none names, which have full attention."""
            options = {part.kind: self._in_mode(part.options) for part in self.parts}
            named = {part.kind: part.groups for part in self.parts}
            return [
                Part(kind=kind, groups=groups, options=options.get(kind, {}))
                for kind, groups in with_the_rest(named, kv_heads).items()
            ]

        def warming_up(self) -> "ByGroupKind.Options | None":
            """Full attention in all groups, from which the parts that have a gate learn; None if none has."""
            parts = tuple(part for part in self.parts if _has_mode(part.options))
            return ByGroupKind.Options(parts=parts, mode="warmup") if parts else None

        def _in_mode(self, options: Section) -> Section:
            if self.mode is None or not _has_mode(options):
                return options
            return options.model_copy(update={"mode": self.mode})

    options: Options

    def __init__(self, options: Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        # Full attention is there in any case: how many groups the layer has is not known here.
        self._named = {part.kind: part.groups for part in options.parts}
        self._kinds = {part.kind: _kind_of(part, head_dim) for part in options.complete(0)}
        self._kinds.setdefault("full", ATTENTION_KINDS["full"](ATTENTION_KINDS["full"].Options(), head_dim))
        self._full = {name: attention_of_new_tokens(kind) for name, kind in self._kinds.items()}
        facts = [kind.facts for kind in self._kinds.values()]
        self.facts = KindFacts(
            not_exported=frozenset(),
            learns=any(one.learns for one in facts),
            prefill_unit=math.lcm(*(one.prefill_unit for one in facts)),
            own_kernels=any(one.own_kernels for one in facts),
            own_decode_problem=next((one.own_decode_problem for one in facts if one.own_decode_problem), ""),
        )

    @classmethod
    def problems(cls, options: Options, context: StageContext) -> Iterator[str]:
        """Groups that the model does not have, tensor parallelism, and the problems of each part."""
        most = context.model.kv_heads
        if missing := [group for part in options.parts for group in part.groups if not 0 <= group < most]:
            yield f"parts: given group {missing[0]} {context.layers}; allowed: 0 to {most - 1}, the key/value heads"
            return
        if context.tp > 1:
            yield f"parts: given {context.layers} with parallel.tp {context.tp}; allowed: with tp 1"
        for part in options.complete(most):
            here = dataclasses.replace(context, model=_part_model(context.model, part))
            for problem in ATTENTION_KINDS[part.kind].problems(part.options, here):
                yield f"parts ({part.kind}): {problem}"

    @classmethod
    def parameters(cls, options: Options, model: ModelConfig, layer: int) -> nn.Module | None:
        """Those of the parts, by the names of their kinds."""
        found = {
            part.kind: ATTENTION_KINDS[part.kind].parameters(part.options, _part_model(model, part), layer)
            for part in options.complete(model.kv_heads)
        }
        modules = {name: module for name, module in found.items() if module is not None}
        groups = {part.kind: part.groups for part in options.parts}
        return _PartModules(modules, groups) if modules else None

    @classmethod
    def initial_values(cls, parameter: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """Those of the part's kind."""
        kind, _, own = parameter.partition(".")
        values: Tensor | None = ATTENTION_KINDS[kind].initial_values(own, shape, generator)
        return values

    @classmethod
    @torch.no_grad()
    def derived_values(cls, parameter: str, shape: torch.Size, model: ModelConfig, layer: nn.Module) -> Tensor | None:
        """Those of the part's kind, from the projections of its heads."""
        kind, _, own = parameter.partition(".")
        modules = layer.get_submodule(cls.name)
        assert isinstance(modules, _PartModules)
        part = Part(kind=kind, groups=modules.groups[kind])
        heads = _PartLayer(layer, part.groups, model.kv_heads)
        values: Tensor | None = ATTENTION_KINDS[kind].derived_values(own, shape, _part_model(model, part), heads)
        return values

    @classmethod
    def full_attention(cls, options: Options, keep_windows: bool = False) -> LayerAttention | None:
        """That of each part; kind `full` if none is left that differs from it."""
        found = {part.groups: LayerAttention(part.kind, part.options).full(keep_windows) for part in options.parts}
        parts = tuple(
            Part(groups=groups, kind=full.kind, options=full.options)
            for groups, full in found.items()
            if full is not None and full.kind != "full"
        )
        if None in found.values():
            return None
        return LayerAttention(cls.name, cls.Options(parts=parts)) if parts else super().full_attention(options)

    def mix(self, layer: LayerInput, parameters: nn.ModuleDict | None) -> tuple[Tensor, Tensor | None]:
        """The outputs of the parts, each where its heads are; the sum of their auxiliary losses."""
        kv_heads = layer.k_TKd.shape[1]
        outputs = []
        losses = []
        order: list[int] = []
        for kind, numbers in with_the_rest(self._named, kv_heads).items():
            groups = list(numbers)
            q_TGd = layer.q_THd.unflatten(1, (kv_heads, -1))[:, groups].flatten(1, 2)
            smaller = layer._replace(
                q_THd=q_TGd,
                k_TKd=layer.k_TKd[:, groups],
                v_TKd=layer.v_TKd[:, groups],
                engine=_PartEngine(layer.engine, kind, self._full[kind]),
                sink=(),
            )
            own = parameters[kind] if parameters is not None and kind in parameters else None
            out_TGd, loss_T = self._kinds[kind].mix(smaller, own)
            outputs.append(out_TGd.unflatten(1, (len(groups), -1)))
            losses += [] if loss_T is None else [loss_T]
            order += groups
        back = sorted(range(kv_heads), key=order.__getitem__)
        out_TKGd = torch.cat(outputs, 1)[:, back]
        return out_TKGd.flatten(1, 2), sum(losses[1:], losses[0]) if losses else None

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Mean over the heads."""
        parts = self.kinds_of(model)
        return sum(kind.pairs(part, lengths) * part.heads for part, kind in parts) / model.heads

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Sum of the parts."""
        return sum(kind.flops(part, lengths) for part, kind in self.kinds_of(model))

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Sum of the parts. One that leaves its keys to the engine has them gathered here, and again what its gate
        learns from, which it counts as kept of other ranks."""
        parts = self.kinds_of(model)
        found = [kind.token_bytes(part, batch) for part, kind in parts]
        alone = [kind.token_bytes(part, batch._replace(cp=1)).activations for part, kind in parts]
        gathered = 0
        for (part, _), one, own in zip(parts, found, alone, strict=True):
            keys = 2 * batch.width * part.kv_heads * model.head_width
            again = (one.activations - own) // max(1, batch.cp - 1)
            gathered += keys + again if one.gathered is None else one.gathered
        return TokenBytes(sum(one.saved for one in found), sum(alone), gathered, max(one.workspace for one in found))

    def kinds_of(self, model: ModelConfig) -> list[tuple[ModelConfig, AttentionKind]]:
        """The shape of each part's smaller layer, and its kind."""
        parts = self.options.complete(model.kv_heads)
        return [(_part_model(model, part), self._kinds[part.kind]) for part in parts]


def _has_mode(options: Section) -> bool:
    """True for kinds whose gate learns in a mode with full attention."""
    return "mode" in type(options).model_fields


def _kind_of(part: Part, head_dim: int) -> AttentionKind:
    kind: AttentionKind = ATTENTION_KINDS[part.kind](part.options, head_dim)
    return kind


def _part_model(model: ModelConfig, part: Part) -> ModelConfig:
    """The model with the part's heads alone."""
    groups = len(part.groups)
    sizes = {"heads": groups * (model.heads // model.kv_heads), "kv_heads": groups, "head_dim": model.head_width}
    return model.model_copy(update=sizes)
