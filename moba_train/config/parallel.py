"""The section `parallel`: the device mesh, and how ranks share sequences, layers and weights."""

from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import Field, field_validator

from moba_train.config.base import LONGEST_WAIT_S, Section
from moba_train.config.explain import one_of
from moba_train.registry import TRANSPORTS

CPLayout = Literal["contiguous", "zigzag"]
"""Assignment of a sequence's tokens to the ranks of a context-parallel group (parallel/context/layout.py)."""

PipelineSchedule = Literal["1f1b", "interleaved_1f1b", "zero_bubble"]
"""The order in which a pipeline's ranks run micro-batches forward and backward (parallel/pipeline)."""


class ContextParallelConfig(Section):
    """Sharding of each packed sequence over ranks: docs/explanation/context-parallelism.md."""

    not_here = {
        "cp_ring_depth": "gone: a ring has a buffer for each rank, and two if these do not fit",
        "cp_slices": "gone: one slice inside a node if it fits, otherwise 4",
        "gradient_transport": "gone: gradients are always reduced by NCCL or gloo",
    }

    cp: int = Field(1, ge=1, description="ranks that share one sequence; 1: every rank holds whole sequences")
    cp_transport: str = Field(
        "auto",
        description="how the ranks exchange queries, keys and values: any registered transport; auto: ulysses among "
        "more than two ranks of a node when each gets whole key/value heads and its buffers fit in memory, otherwise "
        "the transport with the lowest predicted communication time among those whose buffers fit; dispatch, which "
        "auto never takes: queries travel to the owners of the blocks that they select; all layers must select blocks",
        json_schema_extra={"examples": ["auto", "allgather", "ulysses", "hierarchical", "ring", "dispatch"]},
    )
    cp_layout: Literal["auto"] | CPLayout = Field(
        "auto",
        description="which tokens each rank holds; contiguous: one part of the sequence; zigzag: two parts, equally "
        "far from its start and its end, which balances work that grows with position; auto: zigzag for ring, "
        "allgather and dispatch, and for hierarchical when a layer of the stage has such work (full attention), "
        "otherwise contiguous",
    )

    @field_validator("cp_transport")
    @classmethod
    def _known(cls, name: str) -> str:
        return one_of(name, ["auto", *TRANSPORTS])


class ParallelConfig(ContextParallelConfig):
    """The device mesh. Layers differ over pp, batches over dp_replicate x dp_shard, the tokens of a sequence over cp,
    heads and hidden columns over tp. Parameters, gradients and optimizer state are sharded over dp_shard x cp (FSDP2)
    and over tp, and replicated over dp_replicate (HSDP). One of the dp sizes may be -1: it fills the rest. Ranks of one
    tp group are neighbours, and so are the tp groups of one cp group; those of one pipeline are the farthest apart."""

    dp_replicate: int = Field(1, ge=-1, description="replicas of the sharded model; -1 fills the world")
    dp_shard: int = Field(-1, ge=-1, description="with cp, ranks that share one copy of the parameters; -1 fills")
    ep: int = Field(
        1,
        ge=1,
        description="ranks of dp_shard x cp that the experts of a layer are divided over (expert parallelism): tokens "
        "travel to their experts; 1: every rank computes with all experts",
    )
    tp: int = Field(
        1,
        ge=1,
        description="ranks of one node that share each layer's heads and columns (tensor parallelism); the same in all "
        "stages. See docs/how-to/parallelism.md",
    )
    pp: int = Field(
        1,
        ge=1,
        description="ranks of a pipeline, each with a part of the layers (pipeline parallelism); the same in all "
        "stages. See docs/how-to/parallelism.md",
    )
    pp_schedule: PipelineSchedule = Field(
        "1f1b",
        description="order of a pipeline's passes; 1f1b: one forward, one backward; interleaved_1f1b: each rank has "
        "several parts of the layers, far apart, so that ranks wait less and send more; zero_bubble: as 1f1b, with the "
        "gradients of weights computed when a rank would wait",
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
        "before, by torch.compile and symmetric memory: needs compile: true, GPUs that reach each other's memory, and "
        "cp 1 in every stage, as steps with cp above 1 were 28 % longer",
    )
    reshard_after_forward: bool | Literal["budget"] = Field(
        True,
        description="a block's weights, gathered for its forward pass, are gathered again for its backward pass; "
        "false: they stay until then, which saves one of FSDP's three transfers and takes the memory of all blocks' "
        "weights in the compute dtype; budget: those of as many blocks stay, last ones first, as memory.gpu_gib holds "
        "next to the activations; a pipeline keeps them in any case",
    )
    fsdp_copy_engines: bool = Field(
        False,
        description="blocks' weights are gathered by the GPUs' copy engines, not by NCCL's kernels, which take "
        "multiprocessors from the layers computed meanwhile: among GPUs of one node that reach each other's memory, "
        "in buffers for two blocks; also gradients, in the compute dtype (in a pipeline in float32), and added up in "
        "float32; on a CPU nothing changes",
    )
    timeout: int = Field(
        600, ge=1, le=LONGEST_WAIT_S, description="seconds a rank waits for others before it ends the run"
    )
