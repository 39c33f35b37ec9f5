"""`RunConfig`: everything a recipe may say."""

from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import AfterValidator, Field, model_validator

from moba_train.config.attention import AttentionConfig
from moba_train.config.base import Length, OpenSection, Section, TokenBudget
from moba_train.config.checkpoint import CheckpointConfig
from moba_train.config.data import DataConfig, SourceConfig
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.explain import no_credentials
from moba_train.config.health import HealthConfig
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.config.optim import MOST_RATE, AdaptersConfig, OptimConfig, ScheduleConfig
from moba_train.config.parallel import ContextParallelConfig, ParallelConfig
from moba_train.config.precision import MemoryConfig, PrecisionConfig
from moba_train.config.telemetry import TelemetryConfig
from moba_train.registry import ATTENTION_KINDS, OBJECTIVES


class TrailingLossRecovered(Section):
    """The trailing loss with the stage's own attention is no more than `tolerance` above its reference."""

    tolerance: float = Field(ge=0, description="nats per token")
    reference: Literal["full", "before"] = Field(
        "full",
        description="full: full attention on the same weights, at the same time; before: the trailing loss at the end "
        "of the stage before, which must have the same seq_len",
    )


class UntilConfig(Section):
    """A stage's exit criterion: the stage continues beyond its `tokens` until the criterion is met, but never beyond
    `max_tokens`. The criterion is either `trailing_loss_recovered`, or a bound on `metric`. It is judged once `tokens`
    are consumed and then at every evaluation that gives its numbers."""

    trailing_loss_recovered: TrailingLossRecovered | None = Field(None, description="null: `metric` decides")
    metric: str | None = Field(
        None, description="a number of an evaluation, such as eval_loss or trailing_gap; see docs/how-to/stages.md"
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


class StageConfig(OpenSection):
    """One stage of training. Keys that a stage leaves out are taken from the recipe; weights, optimizer state and
    the place in the data are carried over from the stage before."""

    members = OBJECTIVES

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="shown in logs; unique in the recipe")
    seq_len: Length = Field(le=2**30, description="tokens of one training sequence")
    tokens: TokenBudget = Field(ge=1, description="training tokens of this stage, rounded up to whole steps")
    until: UntilConfig | None = Field(
        None, description="exit criterion: the stage continues beyond `tokens` until it is met; null: it ends there"
    )
    batch_tokens: Length | None = Field(None, description="tokens per optimizer step; default: the recipe's")
    micro_batch_size: int | None = Field(None, ge=1, description="sequences per rank and pass; default: the recipe's")
    rope: RopeConfig | None = Field(None, description="merged over model.rope, key by key, for this stage only")
    attention: AttentionConfig | None = Field(None, description="merged over the recipe's attention, key by key")
    parallel: ContextParallelConfig | None = Field(
        None, description="merged over the recipe's parallel, key by key; dp_shard gives way to another cp"
    )
    train: list[SourceConfig] | None = Field(None, min_length=1, description="replaces data.train for this stage")
    trainable: Literal["all"] | Annotated[list[str], MinLen(1)] = Field(
        "all",
        description="parameters that this stage trains: all, or glob patterns on their names, such as "
        "`blocks.*.attention.*`; the others and their optimizer state stay as they are",
    )
    evaluate: bool = Field(True, description="whether the recipe's evaluations run in this stage")
    lr: float | None = Field(None, gt=0, le=MOST_RATE, description="peak learning rate of this stage's own schedule")
    schedule: ScheduleConfig | None = Field(None, description="a schedule that spans this stage alone")

    def dump_given(self) -> dict[str, Any]:
        """The keys that were given, as plain values: what a stage leaves out comes from the recipe."""
        data = self.model_dump(exclude_unset=True)
        if self.attention is not None:
            data["attention"] = self.attention.dump_given()
        return data


class RunConfig(Section):
    """A whole training run: one model taken through a list of stages."""

    not_here = {"norm_implementation": "gone: always torch"}

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="the run's name in logs and wandb")
    run_dir: str = Field(min_length=1, description="folder for logs, checkpoints and the report")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the initial weights and of the data order")
    model: ModelConfig
    init_from: Annotated[str | None, AfterValidator(no_credentials)] = Field(
        None,
        description="source of the first weights: a Hugging Face folder (docs/reference/models.md lists the "
        "families), or a checkpoint or run folder of ours; with adapters their base, else ignored once the run has "
        "saved a checkpoint",
    )
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    adapters: AdaptersConfig = AdaptersConfig()
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    batch_tokens: Length = Field(description="tokens per optimizer step over all ranks")
    micro_batch_size: int = Field(1, ge=1, description="sequences per rank and forward pass; the rest is accumulated")
    loss_norm: Literal["token", "sequence"] = Field(
        "token",
        description="token: the mean over all loss tokens of a step; sequence: the mean over its documents "
        "(conversations) of the mean loss in each",
    )
    stages: list[StageConfig] = Field(min_length=1, description="stages of training, in their order")
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    activation_checkpointing: Literal["budget", "none", "selective", "full"] = Field(
        "budget",
        description="what the forward pass keeps for the backward pass, which recomputes the rest; none: everything is "
        "kept; selective: the results of attention and of the matrix products; full: each block's input and "
        "attention's result; budget: as much as fits the GPU, what is dearest to recompute for its bytes first, and "
        "everything with pp_schedule zero_bubble",
    )
    activation_offload: bool = Field(
        False,
        description="what checkpointing keeps waits for the backward pass in page-locked host memory; with budget only "
        "if the GPU's memory would not hold it; needs parallel.pp 1",
    )
    memory: MemoryConfig = MemoryConfig()
    compile: bool = Field(False, description="torch.compile each Transformer block and, on a GPU, the loss")
    deterministic: bool = Field(
        False, description="the same recipe on the same machines gives the same bits again, at some cost in time"
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    health: HealthConfig = HealthConfig()

    @model_validator(mode="after")
    def _name_all_options(self) -> Self:
        """Give every kind that some layer has a section, so that the saved recipe holds the options of all layers: a
        resume under other defaults is then seen."""
        sections = [self.attention, *(stage.attention for stage in self.stages if stage.attention is not None)]
        used = {self.attention.default}.union(*(section.used_kinds for section in sections)) & {*ATTENTION_KINDS}
        missing = {kind: ATTENTION_KINDS[kind].Options() for kind in sorted(used - self.attention.given_members.keys())}
        if missing:
            self.__dict__["attention"] = self.attention.model_copy(update=missing)  # a section is frozen
        return self
