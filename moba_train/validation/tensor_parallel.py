"""Checks of tensor parallelism: sizes that `parallel.tp` must divide, and what `parallel.tp_overlap` needs."""

from collections.abc import Iterator
from math import gcd
from typing import get_args

from moba_train.config.mesh import allowed_divisors
from moba_train.config.run import CPLayout
from moba_train.config.schema import RunConfig
from moba_train.config.stages import resolve_stages
from moba_train.evals.registry import enabled_evaluations
from moba_train.parallel.context.layout import SequenceLayout

_DIVIDED = ("heads", "kv_heads", "intermediate_size", "vocab_size")


def tensor_problems(config: RunConfig, ranks_per_node: int | None) -> Iterator[str]:
    """Sizes of the model, and ranks of a node, that `parallel.tp` does not divide, and an overlap that cannot be."""
    tp = config.parallel.tp
    if config.parallel.tp_overlap and (tp == 1 or not config.compile):
        missing = "parallel.tp is 1" if tp == 1 else "compile is false"
        yield f"parallel.tp_overlap: given true, but {missing}; it needs parallel.tp above 1 and compile: true"
    sizes = {key: getattr(config.model, key) for key in _DIVIDED}
    uneven = [f"model.{key} {size}" for key, size in sizes.items() if size % tp]
    if uneven:
        allowed = allowed_divisors(gcd(*sizes.values()))
        yield f"parallel.tp: given {tp}, which does not divide {', '.join(uneven)}; {allowed}"
    if ranks_per_node is not None and ranks_per_node % tp:
        ranks = f"the {ranks_per_node} rank{'s' * (ranks_per_node > 1)} of a node"
        yield (
            f"parallel.tp: given {tp}, which does not divide {ranks}; a tp group must not span nodes; "
            f"{allowed_divisors(ranks_per_node)}"
        )


def row_problems(config: RunConfig) -> Iterator[str]:
    """Stages whose rows (tokens on a rank) `parallel.tp` does not divide, in training or evaluation, as problems."""
    tp = config.parallel.tp
    for stage in resolve_stages(config) if tp > 1 else ():
        cp = stage.parallel.cp
        layout = stage.parallel.cp_layout
        passes = {f"seq_len {stage.seq_len} x micro_batch_size {stage.micro_batch_size}": stage.micro_batch_size}
        for evaluation in enabled_evaluations(config) if stage.evaluate else ():
            passes[f"seq_len {stage.seq_len} ({evaluation.key})"] = evaluation.sequences_per_pass(stage)
        for text, sequences in passes.items():
            tokens = stage.seq_len * sequences
            # `auto` may choose either, by the memory that is free
            kinds = get_args(CPLayout) if layout == "auto" else (layout,)
            rows = {SequenceLayout.split(tokens, cp, kind).rows for kind in kinds} if tokens >= cp else set()
            if uneven := [str(count) for count in sorted(rows) if count % tp]:
                over, unit = (f" over cp {cp}", 2 * cp * tp) if cp > 1 else ("", tp)
                yield (
                    f"parallel.tp: given {tp}, which does not divide the {' or '.join(uneven)} rows of {text}{over} in "
                    f"stage {stage.name!r}; make them a multiple of {unit} tokens"
                )
                break
