"""The recipes and docs/reference/recipes.md: the page lists all of them; each can be planned as its header says and
needs what the page says; the real commands exist, and the miniatures lead from text to a model in transformers, here at
a fraction of their size."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from moba_train.checkpoint.load import CheckpointReader
from moba_train.config.load import load_config
from moba_train.config.schema import SourceConfig
from moba_train.model.spec import count_parameters
from moba_train.resolve.initial_weights import model_differences
from tests.guide import ROOT, blocks, check_usage, commands, run
from tests.resolved import stages_of

RECIPES = ROOT / "configs" / "recipes"
GUIDE = ROOT / "docs" / "reference" / "recipes.md"
BY_HAND = ROOT / "benchmarks" / "measured" / "recipes.md"
VOCAB, SHRINK, TOKENS = 384, 64, 10_000
"""Divides the miniatures' lengths by 64 and their token budgets by 10,000."""
LLAMA_3_1_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
"""What its config.json says about the weights."""


def miniature_commands() -> list[list[str]]:
    """The commands of the miniatures, in their order."""
    (block,) = blocks(BY_HAND, "bash")
    return commands(block)


def real_commands() -> list[list[str]]:
    """The commands of the guide."""
    return [words for block in blocks(GUIDE, "bash") for words in commands(block)]


def listed(folder: str) -> dict[str, list[str]]:
    """The page's rows whose first cell is a link to a file of this folder: the other cells, by the file's name."""
    found = re.findall(rf"^\| \[[^]]+\]\(../../{folder}/([^/)]+)\.yaml\) \|(.*)\|$", GUIDE.read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


@pytest.mark.parametrize("folder", ["configs/recipes", "configs/recipes/mini", "configs/models"])
def test_the_page_lists_every_file(folder: str) -> None:
    assert sorted(listed(folder)) == sorted(path.stem for path in (ROOT / folder).glob("*.yaml"))


def test_the_page_counts_the_parameters_of_every_model(tmp_path: Path) -> None:
    for name, (_, count) in listed("configs/models").items():
        (tmp_path / "recipe.yaml").write_text(
            f"extends: {ROOT}/configs/models/{name}.yaml\nname: any\nrun_dir: any\nbatch_tokens: 1K\n"
            "data: {train: [{path: any}]}\nstages: [{name: any, seq_len: 1K, tokens: 1M}]\n"
        )
        assert f"{count_parameters(load_config(tmp_path / 'recipe.yaml').model).total:,}" == count, name


@pytest.mark.parametrize(
    "recipe", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(RECIPES).with_suffix(""))
)
def test_every_recipe_can_be_planned_as_its_header_says_and_needs_what_the_page_says(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder without corpora: those that lie in the repository's would have documents of their own lengths."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    command = re.search(
        r"^# +(moba-train plan \S+(?: \S+=\S+)* --gpus (\d+)(?: --gpu \S+)? --no-data)$",
        recipe.read_text(),
        re.MULTILINE,
    )
    assert command, "the header names no plan command"
    words = command[1].split()
    assert Path(words[2]).resolve() == recipe
    printed = run(words, *([] if "--gpu" in words else ["--gpu", "h200"]))
    if recipe.parent == RECIPES:
        _, gpus, time, memory = listed("configs/recipes")[recipe.stem]
        assert gpus == command[2]
        assert time.endswith("CPU") or f"all stages: {time}\n" in printed or f"time is {time}: " in printed
        assert f"needs most, {memory} GiB" in printed


def test_recipes_for_many_gpus_are_compiled_as_the_measured_rows_were() -> None:
    """Without experts and lightning attention, whose recipes leave that to their user."""
    many = {name for name, (_, gpus, *_) in listed("configs/recipes").items() if int(gpus) >= 8}
    assert len(many) == 9
    for name in many - {"lightning-hybrid", "qwen3-30b-a3b-128k"}:
        assert load_config(RECIPES / f"{name}.yaml").compile, name


def test_the_models_follow_from_each_other(tmp_path: Path) -> None:
    """Llama 3.1 8B is what continue-1m begins with, and what that ends with, sft-1m begins with; so in miniature."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    assert not list(model_differences(load_config(RECIPES / "continue-1m.yaml").model, tmp_path))
    for folder in (RECIPES, RECIPES / "mini"):
        before, after = (load_config(folder / f"{name}-1m.yaml") for name in ("continue", "sft"))
        last = stages_of(before)[-1]
        assert after.model == before.model.model_copy(update={"rope": last.rope})
        assert stages_of(after)[-1].attention == last.attention
        assert after.init_from == before.run_dir


def test_the_real_commands_of_the_page_are_what_the_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    done = {tuple(words[:2]) for words in miniature_commands()} | {("sbatch", "--nodes")}
    plans = {}
    for words in real_commands():
        if words[0] == "bash":
            assert Path(words[1]).is_file()
            assert words[2] in listed("configs/recipes/mini")
            continue
        assert tuple(words[:2]) in done or words[1] == "plan", f"no miniature of {shlex.join(words)}"
        recipes = [word for word in words if word.endswith(".yaml")]
        assert all(load_config(recipe).run_dir for recipe in recipes)
        if words[0] == "sbatch":
            assert Path(words[3]).is_file()
            assert len(recipes) == 1
            continue
        check_usage(words)
        if words[1] == "plan":
            plans[words[2]] = words
    command = plans["configs/recipes/continue-1m.yaml"]
    plan = run(command)
    rows = re.findall(r"^\| (?:time|FLOPs|memory)[^|]*\|(.*)\|$", GUIDE.read_text(), re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        values = [cell.strip() for cell in row.split("|")]
        assert re.search(r"[│ ]+".join(map(re.escape, values)), plan), values
    on_one_node = ["8" if word == "64" else word for word in command]
    needs = run(on_one_node, *(f"stages.{index}.parallel.cp=8" for index in (2, 3, 4)))
    assert all(memory in needs for memory in ("99.86", "109.83"))


def test_the_blend_in_the_guide_is_that_of_the_recipe() -> None:
    (_, text) = blocks(GUIDE, "yaml")
    shown = [SourceConfig.model_validate(source) for source in yaml.safe_load(text)["train"]]
    assert shown == load_config(RECIPES / "continue-1m.yaml").data.train


def test_the_launcher_makes_the_same_documents_as_the_guide() -> None:
    launcher = " ".join((ROOT / "launch" / "miniature.sh").read_text().replace("\\\n", "").split())
    made = [words for words in miniature_commands() if words[1] == "long-range"]
    assert len(made) == 5
    for words in made:
        output, sizes = Path(words[5]).stem.removeprefix("sft-"), words[7::2]
        plain = f"--documents {sizes[0]} --characters {sizes[-1]}"
        assert (plain if len(sizes) == 2 else f"conversations {output} {' '.join(sizes)}") in launcher


def smaller(recipe: Path) -> list[str]:
    """Overrides that make seconds on a CPU of a miniature; stages, their order and their kinds stay as they are."""
    config: Any = load_config(recipe)  # the sections of its kinds are found when it is loaded
    changes: dict[str, Any] = {
        "model.vocab_size": VOCAB,
        "model.hidden_size": 32,
        "model.intermediate_size": 64,
        "model.layers": 2,
        "model.heads": 2,
        "model.kv_heads": 1,
        "batch_tokens": config.batch_tokens // SHRINK,
        "optim.schedule.warmup_tokens": 0,
        "optim.schedule.decay_tokens": config.optim.schedule.decay_tokens // TOKENS,
        "attention.moba.block_size": config.attention.moba.block_size // SHRINK,
        "evaluation.every": 1000,
        "evaluation.sequences": 2,
        "telemetry.console": False,
        "telemetry.log_every": 1,
    }
    if (position_wise := config.evaluation.position_wise) is not None:
        changes["evaluation.position_wise"] = {"bucket": position_wise.bucket // SHRINK, "sequences": 2}
    for index, source in enumerate(config.data.train):
        for key in ("min_length", "below_length"):
            if (length := getattr(source, key)) is not None:
                changes[f"data.train.{index}.{key}"] = length // SHRINK
        if source.upsample:
            changes[f"data.train.{index}.upsample.0.min_length"] = source.upsample[0].min_length // SHRINK
    for index, stage in enumerate(config.stages):
        changes[f"stages.{index}.seq_len"] = stage.seq_len // SHRINK
        # A single batch of conversations may have no token that carries loss, and a stage without any is an error.
        batch = (stage.batch_tokens or config.batch_tokens) // SHRINK
        changes[f"stages.{index}.tokens"] = max(stage.tokens // TOKENS, 0 if stage.until else 4 * batch)
        if stage.until:
            changes[f"stages.{index}.until.max_tokens"] = stage.until.max_tokens // TOKENS
        if stage.attention and "moba" in stage.attention.model_fields_set:
            changes[f"stages.{index}.attention.moba.block_size"] = stage.attention.moba.block_size // SHRINK
    return [f"{key}={json.dumps(value, default=str)}" for key, value in changes.items()]


def run_smaller(words: list[str]) -> str:
    """A miniature command at a fraction of its size."""
    options = dict(pairwise(words))
    small = {"--documents": "12", "--vocab-size": str(VOCAB), "--holdout": "0.4", "--max-new-tokens": "3"}
    if "--characters" in options:
        small["--characters"] = str(int(options["--characters"]) // 12)
    if "--questions" in options:  # a conversation must fit into a sequence, else most have no answer
        small["--characters"] = str(int(options["--characters"]) // 1000)
        small["--questions"] = str(-(-int(options["--questions"]) // 10))
        small["--reads"] = "1"
    words = [words[0], *(small.get(before, word) for before, word in pairwise(words))]
    if words[:2] == ["moba-data", "tokenize"]:
        return run(words, "--workers", "1")
    recipe = Path(words[2])
    return run(words, *(smaller(recipe) if recipe.suffix == ".yaml" else ()))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each miniature command of the guide printed, run in its order in a folder of its own, which stays the
    working folder."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(ROOT / "data_tools", folder / "corpus")
    (folder / "corpus" / "short.txt").write_text("A few words.")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        yield {shlex.join(words): run_smaller(words) for words in miniature_commands()}


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/mini/{name}/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", sorted((RECIPES / "mini").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_miniature_trains_through_all_its_stages(recipe: Path, printed: dict[str, str]) -> None:
    config, found = load_config(recipe), records(recipe.stem)
    names = [stage.name for stage in config.stages]
    assert [record["stage"] for record in found if record["type"] == "stage"] == names
    evaluated = {record["stage"] for record in found if record["type"] == "position_wise"}
    assert evaluated == (set(names) if config.evaluation.position_wise else set())
    prolonged = {stage.name for stage in config.stages if stage.until}
    assert {record["stage"] for record in found if record["type"] == "stage_exit"} == prolonged
    assert ('"key":"position-wise"' in Path(config.run_dir, "report.html").read_text()) == bool(evaluated)


def output_of(printed: dict[str, str], beginning: str) -> str:
    (found,) = (output for command, output in printed.items() if command.startswith(beginning))
    return found


def test_what_the_guide_says_its_miniatures_print(printed: dict[str, str]) -> None:
    assert "share of tokens" in output_of(printed, "moba-data stats runs/mini/data/corpus-train")
    blended = output_of(printed, "moba-data blend")
    assert all(source in blended for source in ("corpus-train", "short"))
    evaluated = output_of(printed, "moba-train eval")
    assert re.search(r"^tokens +moba\S* +full$", evaluated, re.MULTILINE)
    assert '"key":"position-wise"' in Path("runs/mini/continue-1m/evaluation/evaluation.html").read_text()


def test_the_conversations_carry_loss_on_their_answers_alone(printed: dict[str, str]) -> None:
    shown = run(["moba-data", "show", "runs/mini/data/sft-short-train"])
    question = r"what is the number of the \w+ \w+ \d+\?<\|im_end\|>"
    assert re.search(rf"{question}\n<\|im_start\|>assistant\n\[\[\d+<\|im_end\|>\]\]\n", shown)
    logged = records("sft-1m")
    assert {record["stage"] for record in logged} >= {"1k", "8k", "32k"}
    steps = [record for record in logged if record["type"] == "metrics"]  # none where no token carries loss
    assert all(0 < step["loss_token_fraction"] < 0.3 for step in steps)


def test_trajectories_carry_loss_on_calls_and_answers(printed: dict[str, str]) -> None:
    steps = [record for record in records("sft-agents") if record["type"] == "metrics"]
    assert len(steps) > 1
    assert all(0 < step["loss_token_fraction"] < 0.5 for step in steps)
    (folder,) = Path("runs/mini/sft-agents/checkpoints").glob("step_*")
    names = {name for name in CheckpointReader(folder).tensors if name.startswith("model.")}
    assert all("lora_" in name or name == "model.adapters_base" for name in names)


def test_the_export_runs_in_transformers_with_moba(printed: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    from moba_train.tools.hf.config import read_model_config

    last, folder = load_config("runs/mini/sft-1m/config.yaml"), "runs/mini/llama-32k"
    assert read_model_config(Path(folder)).rope == last.model.rope
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "MobaLlamaForCausalLM"
    prompt = transformers.AutoTokenizer.from_pretrained(folder)("what is the number?", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3).shape[1] == prompt["input_ids"].shape[1] + 3
