"""The sizes of the device mesh on a number of ranks."""

from math import isqrt, prod
from typing import NamedTuple

from moba_train.config.parallel import ParallelConfig
from moba_train.errors import ConfigError


class WorldSize(NamedTuple):
    """Ranks of a run, and of each of its nodes."""

    ranks: int
    ranks_per_node: int


class MeshSizes(NamedTuple):
    """Ranks along each dimension of the parallel layout, outermost first, with nothing left to fill."""

    pp: int = 1
    """Ranks of a pipeline, which hold different layers."""
    dp_replicate: int = 1
    """Copies of the sharded parameters."""
    dp_shard: int = 1
    """Shards of a copy of the parameters, together with cp: dp_shard x cp ranks share one copy."""
    cp: int = 1
    """Ranks that share a sequence."""
    tp: int = 1
    """Ranks that share each layer's heads and columns."""

    @property
    def ranks(self) -> int:
        """Ranks of the whole layout."""
        return prod(self)

    @property
    def dp(self) -> int:
        """Groups of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the parameters (with pp and tp, of a pipeline rank's and a tp rank's part)."""
        return self.dp_shard * self.cp


def mesh_sizes(parallel: ParallelConfig, world_size: int) -> MeshSizes:
    """The mesh on `world_size` ranks, with -1 filled in. Raises ConfigError when the sizes do not fit."""
    sizes, problems = fit_mesh(parallel, world_size)
    if sizes is None:
        raise ConfigError(problems)
    return sizes


def fit_mesh(
    parallel: ParallelConfig, world_size: int | None, cp_key: str = "parallel.cp"
) -> tuple[MeshSizes | None, list[str]]:
    """The mesh, or None and the problems that prevent one (none where only the world size is unknown).

    `cp_key`: the key that set `parallel.cp`, for the messages.
    """
    given = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    problems = [f"parallel.{key}: given 0; allowed: >= 1, or -1 to fill the rest" for key in given if given[key] == 0]
    free = [key for key, size in given.items() if size == -1]
    if len(free) == 2:
        problems.append(
            "parallel: dp_replicate and dp_shard are both -1; allowed: one of them, the other fills the rest"
        )
    if problems or world_size is None:
        return None, problems

    cp = parallel.cp
    tp = parallel.tp
    pp = parallel.pp
    if world_size % pp:
        return None, [
            f"parallel.pp: given {pp}, which does not divide {_ranks(world_size)}; {allowed_divisors(world_size)}"
        ]
    part_ranks = world_size // pp
    each = f", {pp} to a pipeline (parallel.pp)" if pp > 1 else ""
    if part_ranks % tp:
        ranks = f"{_ranks(world_size)}{each}"
        return None, [f"parallel.tp: given {tp}, which does not divide {ranks}; {allowed_divisors(part_ranks)}"]
    groups = part_ranks // tp
    each += f" in groups of {tp} (parallel.tp)" if tp > 1 else ""
    if groups % cp:
        return None, [
            f"{cp_key}: given {cp}, which does not divide {_ranks(world_size)}{each}; {allowed_divisors(groups)}"
        ]
    dp = groups // cp
    sharing = each + (f", {cp * tp} to a sequence ({cp_key})" if cp > 1 else "")
    fixed = abs(parallel.dp_replicate * parallel.dp_shard)
    if free and dp % fixed == 0:
        given[free[0]] = dp // fixed
    elif free:
        other = next(key for key in given if key not in free)
        ranks = f"{_ranks(world_size)}{sharing}"
        return None, [f"parallel.{other}: given {fixed}, which does not divide {ranks}; {allowed_divisors(dp)}"]
    elif fixed != dp:
        side = "more ranks than the layout uses" if dp > fixed else "fewer ranks than the layout needs"
        replicate = parallel.dp_replicate if dp % parallel.dp_replicate == 0 else 1
        layout = f"dp_replicate {parallel.dp_replicate}, dp_shard {parallel.dp_shard}" + f", cp {cp}" * (cp > 1)
        layout += f", tp {tp}" * (tp > 1) + f", pp {pp}" * (pp > 1)
        needed = fixed * cp * tp * pp
        fits = f"start {needed} ranks, or set parallel: {{dp_replicate: {replicate}, dp_shard: -1}}"
        return None, [f"parallel: {layout} make {needed} ranks, {world_size} were started{sharing}: {side}; {fits}"]
    return MeshSizes(pp, given["dp_replicate"], given["dp_shard"], cp, tp), []


def _ranks(number: int) -> str:
    return f"the {number} ranks" if number > 1 else "the number of ranks, 1"


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def allowed_divisors(number: int) -> str:
    """The divisors of `number` as text: `allowed: 1, 2, 4`."""
    return "allowed: " + ", ".join(map(str, divisors(number)))
