"""Ablations of `moba-train sparsify`: its sparse arm once more, with one thing changed each time.

    moba-train sparsify runs/smollm2/hf ... --output runs/smollm2/sparse     # first: weights, layers, full attention
    python -m benchmarks.sparsify_ablations runs/smollm2/sparse --seeds 3 --output sparsify-ablations.json
    python -m benchmarks.sparsify_ablations runs/smollm2/sparse --list

All arms begin with the same weights and have the same data, tokens and seeds. Runs and evaluations lie in the same
folder, and what is done is not done again: the same command goes on. Budgets are equal: keys a query.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import save
from moba_train.config.load import load_config, parse_yaml
from moba_train.tools.sparsify import recipes, steps
from moba_train.tools.sparsify.page import scores_of
from moba_train.tools.sparsify.places import places
from moba_train.tools.sparsify.steps import Step


def ablations(
    recipe: dict[str, Any], batch: int, count: int, layers: dict[Any, dict[str, Any]]
) -> dict[str, list[str]]:
    """Overrides of the recipe sparse.yaml, by the arm's name. batch: tokens of a step; count: layers that stay full;
    layers: its `attention.overrides`, of which those of kind by_group follow the sparse layers. Arms of blocks that the
    budget does not hold twice are left out."""
    kind = recipe["attention"]["default"]
    own = recipe["attention"][kind]
    size, topk = own["block_size"], own["topk"]
    budget = size * topk
    last = recipe["stages"][-1]
    distill = f"stages.{len(recipe['stages']) - 1}.distill"
    tokens = sum(stage["tokens"] for stage in recipe["stages"])

    whole = {layer: one for layer, one in layers.items() if one.get("kind") != "by_group"}

    def in_groups(kind: str, options: dict[str, Any]) -> list[str]:
        """The layers of kind by_group with this kind in the groups that are not full."""
        changed = {
            layer: one | {"parts": [part | {"kind": kind, "options": options} for part in one["parts"]]}
            for layer, one in layers.items()
            if layer not in whole
        }
        return [f"attention.overrides={json.dumps(whole | changed)}"] if changed else []

    def sized(block_size: int) -> list[str]:
        sizes = {"block_size": block_size, "topk": budget // block_size}
        return [*(f"attention.{kind}.{key}={value}" for key, value in sizes.items()), *in_groups(kind, own | sizes)]

    def moba(block_size: int, **options: Any) -> list[str]:
        section = recipes.selects("moba", block_size, budget // block_size) | options
        # It has no scorer to warm up, but as many stages: each shuffles its own part of the corpora.
        stages = json.dumps([last | {key: one[key] for key in ("name", "tokens")} for one in recipe["stages"]])
        chosen = ["attention.default=moba", f"attention.moba={json.dumps(section)}", f"stages={stages}"]
        chosen += ["optim.lr_factors={}"] if "optim" in recipe else []
        return [*chosen, *in_groups("moba", section)]

    without_groups = [f"attention.overrides={json.dumps(whole)}"] if whole != layers else []

    found = {
        "no-distillation": [f"{distill}=null"],
        "attention-distillation": [f"{distill}.on=attention", f"{distill}.weight=1"],
        "full-steps": [f"{distill}.full_every=4"],
        "last-layers": [f"attention.full_layers=last:{count}", *without_groups],
        "no-full-layers": ["attention.full_layers=none", *without_groups],
    }
    for name, other in (("half-blocks", size // 2), ("double-blocks", 2 * size)):
        if 1 <= other <= budget // 2:
            found[name] = sized(other)
    if budget >= 2 * 64:
        found["moba"] = moba(64)
        found["moba-per-head"] = moba(64, select="head")
        found["moba-not-forced"] = moba(64, always=["current"])
        found["moba-key-conv"] = moba(64, key_conv=3)
    if budget >= 2 * 512:
        found["moba-512"] = moba(512)
    if len(recipe["stages"]) > 1:
        frozen = own | {"train_gate": False}
        found["frozen-scorer"] = [f"attention.{kind}.train_gate=false", *in_groups(kind, frozen)]
        found["every-query"] = [f"attention.{kind}.kl_every=1", *in_groups(kind, own | {"kl_every": 1})]
        dense = 3 * tokens // 4 // batch * batch  # whole steps, so that the arm has no step more
        found["sparse-quarter"] = [f"stages.0.tokens={dense}", f"stages.1.tokens={tokens - dense}"]
        for name, other in (("qsa", 4), ("seer", 64)):
            if budget < 2 * other:
                continue
            learns = {"kl_weight": own["kl_weight"], "kl_every": own.get("kl_every", 1)}
            section = recipes.selects(name, other, budget // other) | learns
            stages = json.dumps([recipe["stages"][0] | {"attention": recipes.in_full(name)}, last])
            chosen = [f"attention.default={name}", f"attention.{name}={json.dumps(section)}", f"stages={stages}"]
            chosen.append(f"optim.lr_factors={json.dumps(recipes.scorer_rate(name))}")
            found[name] = [*chosen, *in_groups(name, section)]
    if "index_keys" in own:
        found["shared-keys"] = [f"attention.{kind}.index_keys=shared", *in_groups(kind, own | {"index_keys": "shared"})]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="OUTPUT of `moba-train sparsify`, with both arms of each seed")
    parser.add_argument("--only", nargs="*", help="names of arms; default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on a GPU of its own")
    parser.add_argument("--list", action="store_true", help="print the arms with their overrides, and end")
    parser.add_argument("--output", type=Path, default=Path("sparsify-ablations.json"), help="result file")
    given = parser.parse_args()
    arms = arms_of(given.folder)
    if given.list:
        for name, overrides in arms.items():
            print(f"{name}: {' '.join(overrides)}")
        return
    if unknown := {*(given.only or ())} - {*arms}:
        parser.error(f"--only: given {', '.join(sorted(unknown))}; allowed: {', '.join(arms)}")
    run(given.folder, given.only or list(arms), given.seeds, given.output, given.jobs)


def arms_of(folder: Path) -> dict[str, list[str]]:
    """The ablations of the sparse recipe in `folder`."""
    names = recipes.SPARSE, recipes.EVALUATION, recipes.BASE, recipes.CALIBRATED
    sparse, evaluation, base, chosen = (parse_yaml((folder / "recipes" / name).read_text(), name) for name in names)
    layers = {layer: one for read in (base, chosen) for layer, one in read["attention"].get("overrides", {}).items()}
    count = evaluation["evaluation"]["full_layers"]["count"]
    return ablations(sparse, load_config(folder / "recipes" / recipes.SPARSE).batch_tokens, count, layers)


def run(folder: Path, names: Sequence[str], seeds: int, output: Path, jobs: int = 1) -> None:
    """Train and evaluate these arms. Results are saved as they come, with those of both arms of the command."""
    arms: dict[str, list[str]] = {"full": [], "sparse": []} | arms_of(folder)
    evaluation = parse_yaml((folder / "recipes" / recipes.EVALUATION).read_text(), recipes.EVALUATION)["evaluation"]
    settings = {"request": parse_yaml((folder / "request.yaml").read_text(), "request.yaml"), "seeds": seeds}
    todo = {}
    for seed in range(1, seeds + 1):
        for name in ["full", "sparse", *names]:
            run_dir = folder / "runs" / f"{name}-{seed}"
            recipe = str(folder / "recipes" / (recipes.FULL if name == "full" else recipes.SPARSE))
            words = ["train", recipe, f"seed={seed}", recipes.word("run_dir", run_dir), *arms[name]]
            train = Step(f"train {name} {seed}", words, run_dir)
            todo[name, seed] = train, steps.evaluation_of(run_dir.name, folder, evaluation, f"full-{seed}")

    def record(line: str) -> list[dict[str, Any]]:
        """Prints a line of progress, and saves the results so far."""
        print(line, flush=True)
        results = [
            {"name": name, "seed": seed, "overrides": arms[name]}
            | steps.training(folder / "runs" / f"{name}-{seed}" / "metrics.jsonl")
            | scores_of(steps.read_json(asked.result))
            for (name, seed), (_, asked) in todo.items()
            if asked.done
        ]
        save(output, settings, results)
        return results

    with places(jobs, 1) as found:
        steps.run_steps([step for pair in todo.values() for step in pair], {}, folder, steps.run_here, record, found)
    for line in table(record("")):
        print(line)


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Losses of each arm against full attention, means over seeds."""
    means = {
        name: {
            key: statistics.mean(one[key] for one in results if one["name"] == name)
            for key in ("trailing", "needle", "ruler", "train_s")
        }
        for name in dict.fromkeys(one["name"] for one in results)
    }
    full = means["full"]
    lines = [f"{'arm':<24}{'trailing':>12}{'needle':>12}{'RULER':>12}{'seconds':>12}"]
    for name, one in means.items():
        lines.append(
            f"{name:<24}{one['trailing'] - full['trailing']:>+12.4f}{one['needle'] - full['needle']:>+12.3f}"
            f"{one['ruler'] - full['ruler']:>+12.3f}{one['train_s']:>12.1f}"
        )
    return lines


if __name__ == "__main__":
    main()
