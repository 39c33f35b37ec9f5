from pathlib import Path
import pytest
from tests.run.tiny_run import Run
from tests.mechanisms.test_options_gpu import ATTENTION, DEEPER
def test_it(run: Run, corpora: Path):
    run.recipe["model"] |= DEEPER
    run.recipe |= {"compile": True, "activation_checkpointing": "selective"}
    short, long = run.recipe["stages"]
    del run.recipe["attention"]
    short["attention"] = long["attention"] = ATTENTION["a narrow indexer in two stages"]
    long.pop("rope")
    status = run.train_here()
    assert status == 0, run.losses()
