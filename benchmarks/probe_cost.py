"""What gate probes and the other evaluations of a recipe cost in training: seconds of a probe beside seconds of a step.

    python -m benchmarks.probe_cost --output benchmarks/results/probe-cost-h200.json

The real trainer on random tokens, one GPU, 1B parameters, MoBA 512/3 in all layers but the last three, 8K tokens. The
share is that of one probe of every sparse layer every `--every` steps (the default of `evaluation.every`), 256 queries
of one sequence each.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.options import length, need_gpus
from benchmarks.record import save, spread
from benchmarks.trainer_run import WARM_UP_STEPS, launch, model_shape, recipe, write_corpus
from moba_train.telemetry.jsonl import read_records


def measured(folder: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps and of probes; the first probe compiles and is left out."""
    needed = settings.steps * settings.sequences * settings.seq_len
    write_corpus(folder / "corpus", 2 * needed, model_shape(settings.model)["vocab_size"])
    probe = {"queries": settings.queries, "sequences": 1, "every": settings.probe_every}
    content = recipe(
        settings.model,
        folder / "corpus",
        folder / "run",
        settings.seq_len,
        settings.sequences,
        settings.steps,
        data={"train": [{"path": str(folder / "corpus")}], "validation": [{"path": str(folder / "corpus")}]},
        attention={"full_layers": "last:3", "moba": {"block_size": 512, "topk": 3}},
        evaluation={"every": 10**6, "sequences": 1, "gate_probe": probe},
    )
    launch(content, folder / "recipe.yaml", 1, check=True)
    records = read_records(folder / "run" / "metrics.jsonl")
    steps = [
        settings.sequences * settings.seq_len / record["tokens_per_s"]
        for record in records
        if record["type"] == "metrics"
        and record["step"] > WARM_UP_STEPS
        and (record["step"] - 1) % settings.probe_every
    ]
    probes = [record["gate_probe"]["seconds"] for record in records if record["type"] == "gate_probe"][1:]
    share = spread(probes)["median"] / (settings.every * spread(steps)["median"])
    return {"step_s": spread(steps), "probe_s": spread(probes), "share_of_step_time": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--seq-len", type=length, default=8192)
    parser.add_argument("--sequences", type=int, default=8, help="sequences of an optimizer step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--probe-every", type=int, default=5, help="steps between the probes that are measured")
    parser.add_argument("--every", type=int, default=100, help="steps between probes that the share is given for")
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    need_gpus(parser)
    with tempfile.TemporaryDirectory() as folder:
        results = measured(Path(folder), settings)
    save(settings.output, {key: value for key, value in vars(settings).items() if key != "output"}, results)
    print(
        f"a step {results['step_s']['median']:.3f} s, a probe {results['probe_s']['median']:.3f} s: "
        f"{results['share_of_step_time']:.2%} of step time every {settings.every} steps"
    )


if __name__ == "__main__":
    main()
