"""launch/slurm.sbatch on a real cluster: the quick start's model over a time limit and over the loss of a node.

Takes eight minutes, root, and Debian's packages slurm-wlm and munge:

    MOBA_SLURM=1 python -m pytest tests/tools/test_slurm.py
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.telemetry.jsonl import read_records
from tests.run.tiny_run import assert_same_tensors
from tests.run.two_hosts import TwoHosts
from tests.tools.launch.slurm_cluster import SlurmCluster, missing_programs

ROOT = Path(__file__).parents[3]
RECIPE = "configs/recipes/quickstart.yaml"
pytestmark = [
    pytest.mark.skipif("MOBA_SLURM" not in os.environ, reason="MOBA_SLURM=1 asks for it"),
    pytest.mark.timeout(1500),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)}; apt-get install slurm-wlm munge")
    hosts = TwoHosts()
    folder = tmp_path / "slurm"
    folder.mkdir()
    made = SlurmCluster(folder, hosts)
    try:
        hosts.plug_in()
        made.start()
        yield made
    finally:
        made.stop()
        hosts.unplug()


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True, cwd=ROOT)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The quick start's tokenizer and corpora, from a part of the standard library."""
    folder = tmp_path / "data"
    folder.mkdir()
    text = str(Path(sysconfig.get_paths()["stdlib"], "asyncio"))
    tokenizer = str(folder / "tokenizer.model")
    python("data_tools", "train-tokenizer", "--input", text, "--output", tokenizer, "--vocab-size", "2048")
    corpus = ["--input", text, "--tokenizer", tokenizer, "--output", str(folder / "corpus"), "--holdout", "0.05"]
    python("data_tools", "tokenize", *corpus)
    return folder


def overrides(data: Path, run_dir: Path) -> list[str]:
    """The quick start on that data, with fewer steps and a checkpoint at every tenth."""
    return [
        f"run_dir={run_dir}",
        f"data.tokenizer={data}/tokenizer.model",
        f"data.train=[{{path: {data}/corpus-train}}]",
        f"data.validation=[{{path: {data}/corpus-valid}}]",
        "stages.0.tokens=160K",
        "stages.1.tokens=80K",
        "checkpoint.every=10",
        "parallel.timeout=30",
        "telemetry.wandb.mode=disabled",
    ]


def step_of(run_dir: Path) -> int:
    newest = latest_checkpoint(run_dir / "checkpoints")
    return 0 if newest is None else int(newest.name.rpartition("_")[2].rpartition("-")[2])


def test_a_job_goes_on_after_its_time_limit_and_after_the_loss_of_a_node(
    cluster: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    """Until training is complete, as one that was never disturbed, to the bit."""
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    environment = {"MOBA_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "GPUS": "1", "RESTARTS": "0"}
    output = tmp_path / "output"
    options = ["--parsable", "--nodes=2", "--gpus-per-node=1", "--time=60", f"--output={output}"]
    batch = ["sbatch", *options, "--chdir", str(ROOT), "launch/slurm.sbatch", RECIPE, *overrides(data, disturbed)]
    number = cluster.run(0, *batch, **environment).strip()

    def restarts() -> int:
        return int(cluster.job(number)["Restarts"])

    cluster.wait(lambda: step_of(disturbed) > 0, 300, "a checkpoint")
    cluster.run(0, "scontrol", "update", f"JobId={number}", "TimeLimit=11")  # less than ten minutes are left of it
    cluster.wait(lambda: restarts() == 1, 120, "the end of the time limit")
    saved = step_of(disturbed)
    assert "an orderly stop" in output.read_text()
    cluster.wait(lambda: cluster.job(number)["JobState"] == "PENDING", 60, "queued again")
    cluster.run(0, "scontrol", "update", f"JobId={number}", "StartTime=now", "TimeLimit=60")  # else after two minutes

    cluster.wait(lambda: step_of(disturbed) > saved, 180, "a checkpoint after the time limit")
    cluster.kill_node(1)
    cluster.wait(lambda: restarts() == 2, 120, "that Slurm misses the node")
    cluster.start_node(1)  # Slurm lets the job wait for two minutes, so that nodes can recover

    cluster.wait(lambda: cluster.job(number)["JobState"] == "COMPLETED", 900, "the end of training")
    python("moba_train.tools.cli", "train", RECIPE, "--gpus", "2", *overrides(data, undisturbed))
    losses = [
        {
            record["step"]: record["loss"]
            for record in read_records(run / "metrics.jsonl")
            if record["type"] == "metrics"
        }
        for run in (disturbed, undisturbed)
    ]
    assert losses[0] == losses[1]
    ends = [latest_checkpoint(run / "checkpoints") for run in (disturbed, undisturbed)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert_same_tensors(ends[0], ends[1])
