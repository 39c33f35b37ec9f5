"""Backends of attention to selected blocks are decided with the run, by the table that the layers ask."""

from collections.abc import Callable

import pytest
import torch

from moba_train.attention.layout import packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.config.mesh import WorldSize
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError
from moba_train.memory.devices import H200, Device
from moba_train.model.build import build_attention
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import ResolvedRun

HERE = Device(None, host_memory=None, is_here=True)
ELSEWHERE = Device(H200, host_memory=None, is_here=False)


Load = Callable[..., RunConfig]
WIDE = ["model.head_dim=64", "attention.moba.topk=3"]
TWO_LAYERS = 2
"""Attentions to blocks in the second stage: that of layer 1 has another topk."""


def resolved(load: Load, device: Device | None, *overrides: str) -> ResolvedRun:
    return resolve(load(*overrides), WorldSize(1, 1), device)


def test_a_cpu_has_the_reference_which_is_what_its_layers_take(load: Load) -> None:
    run = resolved(load, HERE)
    first, second = run.layouts
    assert first.backends == {}  # full attention
    assert len(second.backends) == TWO_LAYERS
    for layer, choice in second.backends.items():
        assert choice.order == ("reference",)
        (attention,) = build_attention([layer], run.setup.shape.head_width)[0].attentions
        assert isinstance(attention, MobaAttention)
        q_THD = torch.zeros(run.stages[1].seq_len, run.setup.shape.heads, run.setup.shape.head_width)
        assert attention.blocks.pick(q_THD, packed_layout([run.stages[1].seq_len]), 1).NAME == "reference"


def test_a_plan_for_a_gpu_that_is_elsewhere_names_its_kernels(load: Load) -> None:
    choices = resolved(load, ELSEWHERE, *WIDE).layouts[1].backends.values()
    assert [choice.order[0] for choice in choices] == ["triton"] * TWO_LAYERS


def test_a_backend_that_cannot_run_is_refused_with_its_key(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"attention\.moba\.backend: given 'triton', which cannot run"):
        resolved(load, ELSEWHERE, "attention.moba.backend=triton", "precision.compute=fp32", *WIDE)


def test_nothing_is_decided_for_a_device_that_is_not_known(load: Load) -> None:
    assert [layout.backends for layout in resolved(load, None).layouts] == [{}, {}]
