"""The recipe decides which sinks there are."""

from pathlib import Path

import pytest

from moba_train.config.schema import RunConfig
from moba_train.telemetry.factory import make_telemetry

RECIPE = {
    "name": "run",
    "run_dir": "unused",
    "model": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
    },
    "data": {"train": [{"path": "corpus"}]},
    "batch_tokens": 4096,
    "stages": [{"name": "short", "seq_len": 4096, "tokens": 1000000}],
}


@pytest.mark.parametrize(
    ("section", "console", "files"),
    [
        ({"console": False, "wandb": {"mode": "disabled"}}, False, {"metrics.jsonl"}),
        ({"tensorboard": True, "wandb": {"mode": "disabled"}}, True, {"metrics.jsonl", "tensorboard"}),
    ],
)
def test_the_sinks_asked_for(tmp_path, capsys, section: dict, console: bool, files: set[str]) -> None:
    run_dir: Path = tmp_path / "run"
    config = RunConfig.model_validate(RECIPE | {"telemetry": section})
    telemetry = make_telemetry(config, run_dir, "run-id", None, 100)
    telemetry.log(1, 4096, {"loss": 3.5})
    telemetry.close()
    assert {path.name for path in run_dir.iterdir()} == files
    assert ("loss 3.5000" in capsys.readouterr().out) == console
