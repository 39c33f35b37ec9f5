"""A recipe's plan: layout, parameters, and for each stage its FLOPs, memory and time."""

from dataclasses import dataclass

from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.config.validate import data_parallel_sizes
from moba_train.planning.flops import dense_flops, real_flops
from moba_train.planning.memory import Memory, estimate_memory
from moba_train.planning.parameters import ParameterCounts, count_parameters


@dataclass(frozen=True)
class StagePlan:
    """What one stage costs. FLOPs are per token, forward and backward."""

    stage: Stage
    dense_flops: float
    real_flops: float
    memory: Memory
    accumulation: int
    """Micro-batches per rank and optimizer step."""
    seconds: float
    """Time of the whole stage at the plan's rate, counted by the real FLOPs."""

    @property
    def tokens(self) -> int:
        """Tokens of the stage, whole steps."""
        return self.stage.end_token - self.stage.first_token


@dataclass(frozen=True)
class Plan:
    """What a recipe costs on `world_size` GPUs of `peak_tflops`, used at `mfu` (counted by the real FLOPs)."""

    world_size: int
    dp_replicate: int
    dp_shard: int
    peak_tflops: float
    mfu: float
    parameters: ParameterCounts
    stages: tuple[StagePlan, ...]

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(stage.seconds for stage in self.stages)


def make_plan(config: RunConfig, world_size: int, peak_tflops: float, mfu: float) -> Plan:
    """The plan of a validated recipe. peak_tflops: dense peak of one GPU; mfu: 0 to 1."""
    dp_replicate, dp_shard = data_parallel_sizes(config, world_size)
    rate = world_size * peak_tflops * 1e12 * mfu
    stages = []
    for stage in resolve_stages(config):
        real = real_flops(config.model, stage.attention, stage.seq_len)
        stages.append(
            StagePlan(
                stage=stage,
                dense_flops=dense_flops(config.model, stage.seq_len),
                real_flops=real,
                memory=estimate_memory(config, dp_shard, stage.micro_batch_size * stage.seq_len),
                accumulation=stage.batch_sequences // (stage.micro_batch_size * world_size),
                seconds=real * (stage.end_token - stage.first_token) / rate,
            )
        )
    return Plan(world_size, dp_replicate, dp_shard, peak_tflops, mfu, count_parameters(config.model), tuple(stages))
