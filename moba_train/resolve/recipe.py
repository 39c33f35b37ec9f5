"""Resolution of a recipe, through all checks, to a resolved run."""

from moba_train.config.mesh import WorldSize
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError
from moba_train.memory.devices import Device
from moba_train.resolve.checks import files_problems, layout_problems, part_problems, stage_problems
from moba_train.resolve.run import ResolvedRun, resolve_unchecked


def resolve(
    config: RunConfig,
    world: WorldSize | None = None,
    device: Device | None = None,
    *,
    check_files: bool = False,
    allow_idle: bool = False,
    training: bool = True,
) -> ResolvedRun:
    """The run of `config` on the ranks of `world` and their devices. Raises ConfigError with all problems, each named
    by its key.

    world: None leaves out what depends on the number of ranks
    device: of the weakest rank; None where it is not known
    check_files: also look for the corpora, the tokenizer and the first weights, relative to the working directory, and
        for the packages that telemetry asks for
    allow_idle: accept options that change nothing, as recipes of earlier versions may have them, and what this version
        refuses of evaluations, criteria and objectives: the model is trained
    training: False where a trained model is only evaluated or generates
    """
    problems = part_problems(config, world, device, allow_idle=allow_idle, training=training)
    run = None if problems else resolve_unchecked(config)  # stages are resolved from sound parts only
    if run is not None:
        problems += stage_problems(config, run, world, device, allow_idle=allow_idle)
    stages = run.stages if run is not None and not problems else ()
    problems += layout_problems(config, stages, world, device, allow_idle=allow_idle, training=training)
    if check_files:
        problems += files_problems(config, run if not problems else None, training=training)
    if problems or run is None:
        raise ConfigError(problems)
    return run.on(world, device)
