"""F8, F10, F11 and F12: their quick forms train, and their sentences follow from the arms."""

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from experiments import corpus, page, run_arm, schedule
from experiments.__main__ import main as experiments
from experiments.byte_tokenizer import write_byte_tokenizer
from experiments.comparison import mean_of
from experiments.corpus import BYTES, Corpus
from experiments.estimate import modelled_seconds
from experiments.figure import Arm, Figure, Result
from experiments.forced_choices import divergence
from experiments.needle_documents import needle_document
from experiments.registry import FIGURES
from experiments.versions import insertion_costs
from moba_train import train
from moba_train.cli import app
from moba_train.config.load import parse_config
from moba_train.data.indexed import IndexedDatasetWriter
from moba_train.data.tokenizer import load_text_tokenizer
from moba_train.training import trainer
from moba_train.validation.recipe import validate

NAMES = ("versions", "mechanisms", "needles", "forced")


def in_this_process(command: list[str], environment: Any, log: Path) -> None:
    """In place of `run_arm.start`: training and evaluation without another interpreter."""
    if "moba_train.train" in command:
        assert train.main(command[command.index("moba_train.train") + 1 :]) == 0
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(run_arm.ROOTS, environment[run_arm.ROOTS])
        found = CliRunner().invoke(app, command[command.index("moba_train.cli") + 1 :])
    assert found.exit_code == 0, found.output


class OneThread:
    """A pool of one, in the main thread, which alone may handle signals as the trainer does."""

    def __init__(self, workers: int) -> None:
        assert workers == 1

    def __enter__(self) -> "OneThread":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, run: Callable[..., None], *arguments: object) -> "Future[None]":
        """Run at once."""
        run(*arguments)
        future: Future[None] = Future()
        future.set_result(None)
        return future


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, which share the quick corpus."""
    return tmp_path_factory.mktemp("runs")


def quick(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch, arms: Sequence[str]) -> list[Result]:
    """Run these arms of a figure's quick form, draw it, and return the arms."""
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    monkeypatch.setattr(trainer, "draw_plots", lambda folder: None)  # a run's own pictures take half as long as the run
    monkeypatch.setattr(run_arm, "start", in_this_process)
    monkeypatch.setattr(schedule, "ThreadPoolExecutor", OneThread)
    assert experiments([name, "--quick", "--runs", str(runs), "--seconds", "10000", "--arms", *arms]) == 0
    output = runs / f"{name}-quick.json"
    page.draw(FIGURES[name], output, runs / f"{name}.svg")
    assert (runs / f"{name}.svg").stat().st_size > 5000
    results: list[Result] = json.loads(output.read_text())["results"]["arms"]
    assert sorted(result["name"] for result in results) == sorted(arms)
    return results


def test_versions_compares_and_inserts(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ["full-tiny-x1", "moba_v1-sum-tiny-x1", "inserted-moba_v1-sum"]
    results = quick("versions", runs, monkeypatch, arms)
    finding = FIGURES["versions"].find(results)
    by_name = {result["name"]: result for result in results}
    row = next(row for row in finding.rows if row[0] == "v1, sum, tiny")
    changed = by_name["moba_v1-sum-tiny-x1"]["evaluations"]["full-in-place"]["validation_loss"]["full"]
    own = by_name["moba_v1-sum-tiny-x1"]["stages"]["train"]["validation_loss"]["eval_loss"]
    assert row[1:4] == [f"{own:.4f}", "x1", f"{changed - own:+.4f}"]
    at_once, after, curve = insertion_costs(results)["moba_v1-sum"]
    before = by_name["full-tiny-x1"]["stages"]["train"]["validation_loss"]["eval_loss"]
    steps = [(one["step"], one["eval_loss"]) for one in by_name["inserted-moba_v1-sum"]["history"]]
    assert steps[0] == (0, before + at_once)
    assert steps[-1] == (curve[-1][0], before + after)
    assert abs(at_once) > 1e-4, "MoBA's first version is not full attention"


def test_mechanisms_trains_kinds_with_stages_of_their_own(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = quick("mechanisms", runs, monkeypatch, ["full-1k", "seer-1k"])
    rows = {row[0]: row for row in FIGURES["mechanisms"].find(results).rows}
    assert list(rows) == ["", "full-1k", "infllm-1k, weights of full", "seer-1k"]
    assert rows["full-1k"][5] == "0"
    # Two layers: a matrix of each of 2 query heads (16 x 16) and of one key head (48 x 16).
    assert rows["seer-1k"][5] == f"{2 * (2 * 16 * 16 + 3 * 16 * 16):,}"
    seer = next(result for result in results if result["name"] == "seer-1k")
    assert list(seer["stages"]) == ["train", "warmup", "sparse"]
    frozen = [seer["stages"][stage]["validation_loss"]["eval_loss"] for stage in ("train", "warmup")]
    assert frozen[0] == frozen[1], "the gate alone learns in its warm-up, under full attention"
    full = next(result for result in results if result["name"] == "full-1k")
    read = full["evaluations"]["infllm"]
    assert read["attentions"] == {"infllm": {"infllm": 2}}
    assert read["numbers"]["eval_loss"] != full["stages"]["train"]["validation_loss"]["eval_loss"]


def test_needles_measures_every_head_and_gate(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = quick("needles", runs, monkeypatch, ["full", "moba-64"])
    finding = FIGURES["needles"].find(results)
    lines = {row[0]: row for row in finding.rows}
    assert {"full, 16/12, all", "full, 64/3, all", "moba-64, 16/12, all", "moba-64, 64/3, all"} <= lines.keys()
    assert lines["full, 64/3, all"][1] == "4", "two layers of two heads"
    assert 0 < float(lines["full, 64/3, all"][2]) < 1
    assert lines["full, 64/3, all"][8] == "–"
    assert lines["moba-64, 64/3, all"][8] != "–"


def test_forced_choices_keeps_what_each_head_selects(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = quick("forced", runs, monkeypatch, ["free"])
    rows = {row[0]: row for row in FIGURES["forced"].find(results).rows}
    assert list(rows) == ["", "free"]
    shares = {
        result["name"]: np.array(
            [layer["head_distance_share"] for layer in result["stages"]["train"]["gate_probe"]["gate_probe"]["layers"]]
        )
        for result in results
    }
    assert shares["free"].shape == (2, 2, 16)
    np.testing.assert_allclose(shares["free"].sum(-1), 1)
    assert (shares["free"][:, 0] != shares["free"][:, 1]).any()


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_for_a_gpu_is_a_valid_recipe_that_ends_in_time(name: str, tmp_path: Path) -> None:
    figure: Figure = FIGURES[name]
    arms = figure.arms(0, quick=False)
    assert len({arm.name for arm in arms}) == len(arms)
    texts = made_up_corpus(tmp_path, arms)
    for arm in arms:
        assert modelled_seconds(arm) < 540, arm.name
        recipe = run_arm.complete_recipe(arm, texts, tmp_path, 1, saved=True)
        recipe.pop("init_from", None)  # its parent is not there
        validate(parse_config(yaml.safe_dump(recipe), arm.name))
        shares = [source.get("weight", 1.0) for source in recipe["data"]["train"]]
        assert sum(shares[1:]) / sum(shares) == pytest.approx(sum(arm.added.values()))


def made_up_corpus(folder: Path, arms: Sequence[Arm]) -> Corpus:
    """All corpora that the arms name, of one document."""
    for name in {"train", "valid", *(name for arm in arms for name in arm.added)}:
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            writer.add_document(np.arange(40_000) % BYTES)
    write_byte_tokenizer(folder / "tokenizer.json")
    return Corpus(folder, BYTES, folder / "tokenizer.json", folder)


def test_documents_ask_for_every_number_that_they_hide(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_text_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("Grüße\n ✓") == list("Grüße\n ✓".encode())
    numbers = count()
    text = (ord("a") + next(numbers) % 26 for _ in count())
    for length in (1024, 4096):
        document = needle_document(tokenizer, text, length, random.Random(1))
        wanted = length // 512
        read = tokenizer.decode(document)
        hidden = [line for line in read.splitlines() if line.startswith("One of the special magic numbers for ")]
        assert len(hidden) == wanted
        for line in hidden:
            key, value = line.removeprefix("One of the special magic numbers for ").removesuffix(".").split(" is: ")
            question = f"What is the special magic number for {key} mentioned in the provided text?"
            answer = f"The special magic number for {key} mentioned in the provided text is {value}."
            assert read.count(f"\n{question} {answer}") == 1
            assert read.index(line) < read.index(question)
        assert length <= len(document) <= max(length, 500 + 250 * wanted)


def test_the_taste_of_heads_is_the_divergence_of_their_distances() -> None:
    assert divergence(np.array([[1.0, 0.0], [0.0, 1.0]])) == pytest.approx(1.0)
    assert divergence(np.array([[0.25, 0.75], [0.25, 0.75]])) == pytest.approx(0.0)
    assert divergence(np.array([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]])) == pytest.approx(0.0)
    wanted = 0.5 * (1 + 0) + 0.0
    assert divergence(np.array([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])) == pytest.approx(1.5 - wanted)


def test_the_mean_of_values_has_students_interval() -> None:
    found = mean_of([1.0, 2.0, 3.0])
    half = 4.3027 / 3**0.5
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), abs=1e-3)
    assert found.visible == pytest.approx(half + 1.0607 / 3**0.5, abs=1e-3)
