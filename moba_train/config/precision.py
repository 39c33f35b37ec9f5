"""The sections `precision` and `memory`: number formats of the layers, and the memory that activations may take."""

from typing import Literal

from pydantic import Field

from moba_train.config.base import Section


class Float8Config(Section):
    """FP8 in linear layers, used with `precision.linear: fp8`."""

    scaling: Literal["tensorwise", "rowwise"] = Field(
        "tensorwise",
        description="tensorwise: one scale for a tensor, and weights are gathered in FP8; rowwise: one for each row, "
        "more exact and slower",
    )
    exclude: list[str] = Field(
        [],
        description="linear layers that stay out of FP8, as patterns of names; each must match at least one: "
        "blocks.0.*, *.feed_forward.down_proj",
    )
    emulate: bool = Field(
        False, description="round as FP8 does but multiply in the compute dtype: for tests, on any device"
    )


class PrecisionConfig(Section):
    """Master weights and gradient reduction are always float32; this is what the layers compute in."""

    compute: Literal["auto", "bf16", "fp32"] = Field("auto", description="auto: bf16 on a GPU, fp32 on a CPU")
    linear: Literal["auto", "bf16", "fp8"] = Field(
        "auto",
        description="what the linear layers of the blocks multiply in; auto: as `compute`; fp8: FP8, on GPUs that "
        "have it; embedding, output projection, norms and attention stay as `compute` says",
    )
    implementation: Literal["torchao", "transformer_engine"] = Field(
        "torchao",
        description="of FP8 layers; transformer_engine: NVIDIA's package, with tensorwise scaling, without compile, "
        "tensor parallelism and emulation, and with weights gathered in bf16",
    )
    fp8: Float8Config = Float8Config()

    @property
    def gathers_fp8(self) -> bool:
        """True if FSDP gathers the weights of linear layers in FP8."""
        return self.linear == "fp8" and self.implementation == "torchao" and self.fp8.scaling == "tensorwise"


class MemoryConfig(Section):
    """Memory that activations may take on each GPU and its host. See docs/how-to/out-of-memory.md."""

    gpu_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of each GPU that `budget` of `activation_checkpointing` and `parallel.reshard_after_forward` "
        "fill, weights and everything else included; a stage that needs more even so takes it, with a warning; null: "
        "85 % of the GPU",
    )
    host_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of page-locked host memory for each GPU's offloaded activations; null: 80 % of the node's "
        "memory, divided by its ranks, without what the copy of a save and the optimizer's state take of it",
    )
