"""The throughput that a run was planned to have, to compare the measured one with."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.data.indexed import corpus_file
from moba_train.errors import UserError
from moba_train.foreign_files import check_below, working_roots
from moba_train.report.history import History

PLANNED_MFU = 0.4
"""The default of `moba-train plan`."""


def planned_rates(history: History) -> tuple[dict[str, float], str]:
    """Planned tokens per second of each stage, by its name; or {} and the reason why there are none.

    The plan is made for the devices that the run recorded (event `code`). Only corpora below the working folder or in
    $MOBA_TRAIN_DATA_ROOTS are read: the recipe may come from elsewhere.
    """
    machine = next((event["machine"] for event in reversed(history.of_type("code")) if "machine" in event), None)
    if not isinstance(machine, dict):
        return {}, "the run did not record its devices"
    if not history.recipe:
        return {}, "its recipe cannot be read"
    device = str(machine.get("device"))
    if device.startswith("CPU"):
        return {}, "a CPU has no known peak rate"
    from moba_train.planning.devices import peak_tflops  # imports torch, which takes seconds
    from moba_train.planning.plan import make_plan

    peak = peak_tflops(device)
    if peak is None:
        return {}, f"the peak rate of {device} is not known"
    try:
        config = parse_config(yaml.safe_dump(history.recipe), "config.yaml")
        check_corpus_roots(config)
        plan = make_plan(config, int(machine["ranks"]), peak, PLANNED_MFU, int(machine["ranks_per_node"]))
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        return {}, " ".join(str(error).split())
    return {stage.stage.name: stage.tokens / stage.seconds for stage in plan.stages}, ""


def check_corpus_roots(config: RunConfig, further: Sequence[Path] = ()) -> None:
    """Raises ForeignFileError for a training corpus that is not below the working folder, $MOBA_TRAIN_DATA_ROOTS or
    `further` folders."""
    sources = [*config.data.train, *(source for stage in config.stages for source in stage.train or ())]
    for source in sources:
        for end in ("idx", "bin"):
            check_below(Path(corpus_file(source.path, end)), [*working_roots(), *further])
