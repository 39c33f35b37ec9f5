"""The kind `by_group`: groups of heads, each of which shares a key/value head, attend by different kinds.

Each part is its kind on a smaller layer: the queries, keys and values of its groups, and the whole input.

Shape suffixes as in `attention`, and G query heads of a key/value head.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from .attention import KINDS, Call, Kind, New, Rotary
from .cache import Kept, Texts
from .options import LAYERS


class ByGroup(Kind):
    """Kind `by_group`. Groups that no part names have full attention."""

    takes_sink = False

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.kv_heads: int = config.num_key_value_heads
        parts = [*options["parts"]]
        named = {group for part in parts for group in part["groups"]}
        if rest := [group for group in range(self.kv_heads) if group not in named]:
            parts.append({"kind": "full", "groups": rest, "options": {}})
        self.groups: dict[str, list[int]] = {}
        given: dict[str, dict[str, Any]] = {}
        for part in parts:
            if part["kind"] not in KINDS:
                raise ValueError(f"moba.layers: part {part['kind']!r} given, allowed: {', '.join(KINDS)}")
            self.groups.setdefault(part["kind"], []).extend(part["groups"])
            given.setdefault(part["kind"], part["options"])
        for name, groups in self.groups.items():
            smaller = copy.copy(config)
            smaller.num_key_value_heads = len(groups)
            smaller.num_attention_heads = len(groups) * (config.num_attention_heads // self.kv_heads)
            own = given[name] | {"kind": name}
            if options.get("mode") is not None and "mode" in LAYERS[name]:
                own["mode"] = options["mode"]
            self.add_module(name, KINDS[name](smaller, own, layer))
        self.in_parts = all(KINDS[name].in_parts for name in self.groups)

    def of_part(self, x_BHTd: Tensor, name: str) -> Tensor:
        """Query heads, or key/value heads, of a part."""
        return x_BHTd.unflatten(1, (self.kv_heads, -1))[:, self.groups[name]].flatten(1, 2)

    def new_of(self, new: New, name: str) -> New:
        """The tensors of a part."""
        return New(new.x, *(self.of_part(x, name) for x in new[1:]))

    def prepare(self, new: New, rotate: Rotary, store: Kept, texts: Texts) -> Tensor:
        k_BKTd = new.k.clone()
        for name, groups in self.groups.items():
            kind: Any = self.get_submodule(name)
            k_BKTd[:, groups] = kind.prepare(self.new_of(new, name), rotate, store.part(name), texts)
        return k_BKTd

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        """The outputs of the parts, each where its heads are."""
        out_BKGTd = torch.empty_like(call.q).unflatten(1, (self.kv_heads, -1))
        for name, groups in self.groups.items():
            q_BHTd, k_BKSd, v_BKSd = (self.of_part(x, name) for x in (call.q, call.k, call.v))
            own = call._replace(
                q=q_BHTd, k=k_BKSd, v=v_BKSd, store=call.store.part(name), new=self.new_of(call.new, name)
            )
            kind: Any = self.get_submodule(name)
            out_BHTd = kind(own, to_all and kind.decodes_full)
            out_BKGTd[:, groups] = out_BHTd.unflatten(1, (len(groups), -1))
        return out_BKGTd.flatten(1, 2)


KINDS["by_group"] = ByGroup
