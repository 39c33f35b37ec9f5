"""What attention chose, as numbers for people: collected from every plan that is made, whatever engine asks for it."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from moba_train.attention.protocol import ATTENTIONS, Layout, LocalAttention, Plan


class _Described:
    def __init__(self, attention: LocalAttention, descriptions: list[dict[str, float]]) -> None:
        self._attention, self._descriptions = attention, descriptions
        self.name = ATTENTIONS.add(self, attention.name)  # type: ignore[arg-type]  # is one by __getattr__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def plan(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Plan:
        plan = self._attention.plan(q_THD, summaries, layout)
        self._descriptions.append(self._attention.describe_plan(plan, layout))
        return plan


def described(attention: LocalAttention, descriptions: list[dict[str, float]]) -> LocalAttention:
    """Something that does what `attention` does and appends the description of every plan it makes (`describe_plan`).

    Whoever calls an engine with it keeps it alive until then: engines find it by its name.
    """
    return _Described(attention, descriptions)  # type: ignore[return-value]  # by __getattr__


def mean_choices(descriptions: Iterable[dict[str, float] | None]) -> dict[str, float] | None:
    """One description of several plans, each number weighted by the `choices` it is the mean of; None without any."""
    told = [description for description in descriptions if description]
    if not told:
        return None
    means = {}
    for name in dict.fromkeys(name for description in told for name in description):
        having = [description for description in told if name in description]
        weight = sum(description["choices"] for description in having)
        means[name] = sum(description["choices"] * description[name] for description in having) / weight
    return means | {"choices": sum(description["choices"] for description in told)}
