"""The sections about running: parallel layout, precision, checkpoints, exit criteria, logging, health."""

from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import Field, model_validator

from moba_train.config.base import Section, TokenBudget

CPTransport = Literal["allgather", "ulysses", "hierarchical", "ring", "dispatch"]
"""How the ranks of a context-parallel group exchange queries, keys and values (parallel/context/transport)."""

CPLayout = Literal["contiguous", "zigzag"]
"""Which tokens of a sequence each rank of a context-parallel group holds (parallel/context/layout.py)."""

PipelineSchedule = Literal["1f1b", "interleaved_1f1b", "zero_bubble"]
"""The order in which a pipeline's ranks run micro-batches forward and backward (parallel/pipeline)."""

YEAR = 365 * 86400
"""Largest number of seconds that anything waits for; some orders of magnitude more overflow in Python's clocks."""


class ContextParallelConfig(Section):
    """Context parallelism: how each packed sequence is sharded over ranks. See docs/context-parallelism.md."""

    cp: int = Field(1, ge=1, description="ranks that share one sequence; 1: every rank holds whole sequences")
    cp_transport: Literal["auto"] | CPTransport = Field(
        "auto",
        description="how the ranks exchange queries, keys and values; auto: ulysses among more than two ranks of a "
        "node when each gets whole key/value heads and its buffers fit in memory, otherwise the transport with the "
        "lowest predicted communication time among those whose buffers fit; dispatch, which auto never takes: queries "
        "travel to the owners of the blocks that they select; all layers must select blocks",
    )
    cp_layout: Literal["auto"] | CPLayout = Field(
        "auto",
        description="which tokens each rank holds; contiguous: one part of the sequence; zigzag: two parts, equally "
        "far from its start and its end, which balances work that grows with position; auto: zigzag for ring, "
        "allgather and dispatch, and for hierarchical when a layer of the stage has such work (full attention), "
        "otherwise contiguous",
    )
    cp_ring_depth: int | None = Field(
        None,
        ge=2,
        description="ring only: number of buffers for the key/value chunks of other ranks; null: one for each rank. "
        "With more than cp / 2 of them inside a node, a rank attends to all keys in one call. With fewer, which need "
        "less memory, and between nodes, it attends to some chunks while others arrive, which is slower",
    )
    cp_slices: int | None = Field(
        None,
        ge=1,
        description="allgather and hierarchical only: number of transfers in which a layer's key/value heads are "
        "gathered; more slices overlap more communication with attention and need less memory, fewer slices give "
        "attention larger kernel launches; null: 1 inside a node if it fits in memory, otherwise 4",
    )


class ParallelConfig(ContextParallelConfig):
    """The device mesh. Layers differ over pp, batches over dp_replicate x dp_shard, the tokens of a sequence over cp,
    heads and hidden columns over tp. Parameters, gradients and optimizer state are sharded over dp_shard x cp (FSDP2)
    and over tp, and replicated over dp_replicate (HSDP). One of the dp sizes may be -1: it fills the rest. Ranks of one
    tp group are neighbours, and so are the tp groups of one cp group; those of one pipeline are the farthest apart."""

    dp_replicate: int = Field(1, ge=-1, description="replicas of the sharded model; -1 fills the world")
    dp_shard: int = Field(-1, ge=-1, description="with cp, ranks that share one copy of the parameters; -1 fills")
    tp: int = Field(
        1,
        ge=1,
        description="ranks of one node that share each layer's heads and columns (tensor parallelism); the same in all "
        "stages. See docs/context-parallelism.md",
    )
    pp: int = Field(
        1,
        ge=1,
        description="ranks of a pipeline, each with a part of the layers (pipeline parallelism); the same in all "
        "stages. See docs/pipeline-parallelism.md",
    )
    pp_schedule: PipelineSchedule = Field(
        "1f1b",
        description="order of a pipeline's passes; 1f1b: one forward, one backward; interleaved_1f1b: each rank has "
        "several parts of the layers, far apart, so that ranks wait less and send more; zero_bubble: as 1f1b, with the "
        "gradients of weights computed where a rank would wait",
    )
    pp_layers: Literal["auto"] | Annotated[list[Annotated[int, Field(ge=1)]], MinLen(1)] = Field(
        "auto",
        description="layers of each part, first to last: as many parts as `pp`, for interleaved_1f1b a multiple, of "
        "which rank r has parts r, r + pp, ...; auto: parts of nearly equal cost, output projection included, for "
        "interleaved_1f1b two on each rank",
    )
    tp_overlap: bool = Field(
        False,
        description="transfers of tensor parallelism in parts, each hidden behind the matrix products of the part "
        "before, by torch.compile and symmetric memory: needs compile: true, and GPUs that reach each other's memory; "
        "made steps longer where it was measured with cp above 1",
    )
    reshard_after_forward: bool | Literal["budget"] = Field(
        True,
        description="a block's weights, gathered for its forward pass, are gathered again for its backward pass; "
        "false: they stay until then, which saves one of FSDP's three transfers and takes the memory of all blocks' "
        "weights in the compute dtype; budget: those of as many blocks stay, last ones first, as memory.gpu_gib holds "
        "beside the activations; a pipeline keeps them in any case",
    )
    gradient_transport: Literal["reduce_scatter", "all_to_all"] = Field(
        "reduce_scatter",
        description="how FSDP adds up gradients over ranks, in float32 in any case: reduce_scatter sends them in "
        "float32; all_to_all sends them in the compute dtype, half the bytes in bf16, and each rank adds up what has "
        "arrived; in a pipeline both send float32",
    )
    fsdp_copy_engines: bool = Field(
        False,
        description="blocks' weights are gathered by the GPUs' copy engines, not by NCCL's kernels, which take "
        "multiprocessors from the layers computed meanwhile: among GPUs of one node that reach each other's memory, "
        "in buffers for two blocks; gradients, too, whatever gradient_transport says, in the compute dtype, and "
        "added up in float32; on a CPU nothing changes",
    )
    timeout: int = Field(600, ge=1, le=YEAR, description="seconds a rank waits for others before it ends the run")

    @model_validator(mode="before")
    @classmethod
    def _drop_a_removed_key(cls, value: Any) -> Any:
        """Recipes in checkpoints of some hours of 26 November 2026 have `fsdp_max_ctas`, mostly null: no limit."""
        if isinstance(value, dict) and value.get("fsdp_max_ctas", 0) is None:
            return {key: given for key, given in value.items() if key != "fsdp_max_ctas"}
        return value


class Float8Config(Section):
    """How linear layers compute with `precision.linear: fp8`."""

    scaling: Literal["tensorwise", "rowwise"] = Field(
        "tensorwise",
        description="tensorwise: one scale for a tensor, and weights are gathered in FP8; rowwise: one for each row, "
        "more exact and slower",
    )
    exclude: list[str] = Field(
        [],
        description="linear layers that do not, by name with wildcards, each of which matches one at least: "
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
        """Whether FSDP gathers the weights of linear layers in FP8."""
        return self.linear == "fp8" and self.implementation == "torchao" and self.fp8.scaling == "tensorwise"


class MemoryConfig(Section):
    """Memory that activations may take on each GPU and its host. See docs/memory.md."""

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


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept. The last one, the newest good one and the newest one without
    NaN or infinite values are always kept."""

    every: int | None = Field(
        100,
        ge=1,
        description="optimizer steps between checkpoints; null: none is saved, not even the last, and nothing can be "
        "resumed: for measurements",
    )
    keep_last: int = Field(2, ge=1, description="number of newest checkpoints that are kept")
    keep_every: int | None = Field(None, ge=1, description="checkpoints at multiples of this step stay for ever")
    keep_best: int = Field(
        0,
        ge=0,
        description="number of checkpoints of lowest validation loss that are kept in each stage; `every` must then "
        "be a multiple of evaluation.every",
    )
    fallback_dir: str | None = Field(
        None,
        min_length=1,
        description="folder, best on another disk, that takes a checkpoint when the run folder does not; the run "
        "resumes from the newest of both. Every rank must see it: with several nodes, a local disk will not do",
    )
    alert_after_failures: int = Field(
        3, ge=1, description="failed saves in a row after which the run reports, as an alert, how much it can lose"
    )
    max_failures: int | None = Field(
        None, ge=1, description="failed saves in a row after which the run ends; null: it goes on"
    )


class TrailingLossRecovered(Section):
    """The trailing loss with the stage's own attention is no more than `tolerance` above its reference."""

    tolerance: float = Field(ge=0, description="nats per token")
    reference: Literal["full", "before"] = Field(
        "full",
        description="full: full attention on the same weights, at the same time; before: the trailing loss at the end "
        "of the stage before, which must have the same seq_len",
    )


class UntilConfig(Section):
    """A stage's exit criterion: the stage goes on beyond its `tokens` until the criterion is met, but never beyond
    `max_tokens`. The criterion is either `trailing_loss_recovered`, or a bound on `metric`. It is judged once `tokens`
    are consumed and then at every evaluation that gives its numbers."""

    trailing_loss_recovered: TrailingLossRecovered | None = Field(None, description="null: `metric` decides")
    metric: str | None = Field(
        None, description="a number of an evaluation, such as eval_loss or trailing_gap; see docs/stages.md"
    )
    at_most: float | None = Field(None, description="met when `metric` is not above this")
    at_least: float | None = Field(None, description="met when `metric` is not below this")
    max_tokens: TokenBudget = Field(ge=1, description="the stage ends here at the latest; more than `tokens`")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the evaluations' numbers that the criterion reads."""
        if self.trailing_loss_recovered is None:
            return (self.metric,) if self.metric is not None else ()
        if self.trailing_loss_recovered.reference == "full":
            return ("trailing_loss", "trailing_loss_full")
        return ("trailing_loss",)


class WandbConfig(Section):
    """Weights & Biases, which needs the package wandb (`pip install "moba-train[wandb]"`). One run across restarts; a
    failing wandb never stops training."""

    mode: Literal["disabled", "offline", "online"] = Field(
        "disabled", description="offline: written into the run folder, `wandb sync` uploads it later"
    )
    project: str = Field("moba_train", min_length=1, description="wandb project")
    entity: str | None = Field(None, description="wandb team or user; null: the account's default")
    tags: list[str] = Field([], description="tags of the wandb run")


class TelemetryConfig(Section):
    """Metrics always go to `metrics.jsonl` in the run folder; the rest is chosen here."""

    log_every: int = Field(1, ge=1, description="optimizer steps between logged metrics")
    console: bool = Field(True, description="progress and metrics in the terminal")
    tensorboard: bool = Field(
        False, description='also write TensorBoard events, which needs `pip install "moba-train[tensorboard]"`'
    )
    report: Literal["auto"] | bool = Field(
        "auto",
        description="write report.html, the page of `moba-train report`, when a run ends in order; auto: if plotly is "
        'installed (`pip install "moba-train[report]"`)',
    )
    wandb: WandbConfig = WandbConfig()

    @model_validator(mode="before")
    @classmethod
    def _read_plots(cls, value: Any) -> Any:
        """Read `plots`, the former name of `report`. Checkpoints of before 30 November 2026 hold it in their recipe,
        as true where nobody chose it."""
        if not isinstance(value, dict) or "plots" not in value or "report" in value:
            return value
        renamed = {"report" if key == "plots" else key: given for key, given in value.items()}
        return renamed | {"report": "auto"} if renamed["report"] is True else renamed


class SpikeConfig(Section):
    """Spikes of loss and gradient norm: one-sided robust z-score over a trailing window. See docs/run-health.md."""

    # Every checkpoint's meta holds the values, and is refused above 8 MiB.
    window: int = Field(128, ge=8, le=10_000, description="number of unflagged values that the score looks back on")
    warn_sigma: float = Field(6.0, gt=0, description="robust standard deviations above the median that flag a step")
    reaction: Literal["log", "skip_step", "rollback"] = Field(
        "log",
        description="log: report, and stop at NaN or Inf; skip_step: flagged steps leave the weights alone; rollback: "
        "that, and back to the last good checkpoint when the loss does not recover, or at NaN or Inf",
    )
    max_skips: int = Field(
        20, ge=1, description="steps to skip in any 1,000; one more ends the run (skip_step) or goes back (rollback)"
    )
    max_rollbacks: int = Field(3, ge=1, description="rollbacks in any 1,000 steps; one more ends the run")


class WatchConfig(Section):
    """Stalled ranks and stragglers. A phase of the run (waiting for data, a step, an evaluation, a checkpoint) stalls
    when it takes much longer than it lately did; until that is known, and at most, 0.8 x parallel.timeout."""

    least: float = Field(120.0, gt=0, description="seconds before any phase counts as stalled")
    factor: float = Field(
        10.0, gt=1, description="times the median of the phase's recent times before it is called stalled"
    )
    compare_every: int = Field(
        10, ge=0, description="logged steps between comparisons of the ranks' step and attention times; 0: never"
    )


class RerunConfig(Section):
    """A step whose loss or gradient norm is not finite is run again on the same batch. A fault that repeats is reported
    with the batch's documents, and health.spike.reaction follows; one that does not, with its rank and host."""

    max_transient: int = Field(
        3,
        ge=0,
        description="faults in any 1,000 steps that did not repeat; one more ends the run with exit code 75, because a "
        "node is suspect",
    )


class NodeConfig(Section):
    """Broken GPUs (ECC, row remapping, NVLink, clocks lowered by the hardware) and full disks."""

    on_fault: Literal["refuse", "warn"] = Field(
        "refuse",
        description="what a GPU with uncorrected ECC errors or a failed row remap, or one that the driver cannot "
        "reach, means for a run that starts; refuse: it ends with exit code 75; warn: it starts, with a report",
    )
    every: float = Field(
        60.0, gt=0, le=YEAR, description="seconds between looks at GPUs and disks while the run goes on"
    )


class HealthConfig(Section):
    """Detection of loss spikes, faults of the machine, stalled ranks, stragglers, and restarts that lead nowhere."""

    spike: SpikeConfig = SpikeConfig()
    rerun: RerunConfig = RerunConfig()
    node: NodeConfig = NodeConfig()
    watch: WatchConfig = WatchConfig()
    max_restarts_without_progress: int = Field(
        20,
        ge=1,
        le=1000,
        description="starts of the run in a row that save no newer checkpoint, after which it refuses to start; those "
        "that end in order do not count. See docs/durability.md",
    )
