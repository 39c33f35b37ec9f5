"""F8, F10, F11 and F12: their quick forms train, and their sentences follow from the arms."""

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.python_sources import BYTES
from data_tools.corpus_writer import IndexedDatasetWriter
from experiments import __main__ as program
from experiments import corpus, needles, page, run_arm
from experiments.__main__ import main
from experiments.byte_tokenizer import write_byte_tokenizer
from experiments.comparison import mean_of, t_quantile
from experiments.corpus import Corpus
from experiments.figure import Result, key_of
from experiments.forced_choices import divergence
from experiments.needle_documents import needle_document
from experiments.readings import Losses, trailing_by_sequence, trailing_loss, validation_by_sequence, validation_loss
from experiments.registry import FIGURES
from experiments.results import read_results
from experiments.versions import insertion_costs
from experiments.with_experts import DENSE
from moba_train.data.indexed import IndexedDataset
from moba_train.tools.text_tokenizer import load_text_tokenizer
from tests.experiments.finished_arms import finished_arm

F14 = Path("experiments/results/why-behind.json")


def quick(name: str, monkeypatch: pytest.MonkeyPatch, arms: Sequence[str]) -> list[Result]:
    """Run these arms of a figure's quick form, draw it, and return the arms."""
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    assert main([name, "--quick", "--gpus", "0", "--seconds", "1e6", "--arms", *arms]) == 0
    output = Path(f"runs/experiments/{name}-quick.json")
    page.draw(FIGURES[name], output, output.with_suffix(".svg"))
    assert output.with_suffix(".svg").stat().st_size > 5000
    results: list[Result] = json.loads(output.read_text())["results"]["arms"]
    assert sorted(result["name"] for result in results) == sorted(arms)
    return results


def paired_error(losses: Losses, others: Losses) -> float:
    """Half the interval of 95 % of the mean difference, with numpy alone."""
    differences = np.array(losses, dtype=float) - np.array(others, dtype=float)
    return float(t_quantile(0.975, len(differences) - 1) * differences.std(ddof=1) / len(differences) ** 0.5)


@pytest.mark.usefixtures("in_this_process")
def test_versions_compares_and_inserts(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ["full-tiny-x1", "moba_v1-sum-tiny-x1", "inserted-moba_v1-sum"]
    results = quick("versions", monkeypatch, arms)
    finding = FIGURES["versions"].find(results)
    by_name = {result["name"]: result for result in results}
    row = next(row for row in finding.rows if row[0] == "v1, sum, tiny")
    changed = by_name["moba_v1-sum-tiny-x1"]["evaluations"]["full-in-place"]["validation_loss"]["full"]
    own = by_name["moba_v1-sum-tiny-x1"]["stages"]["train"]["validation_loss"]["eval_loss"]
    full, sums = (by_name[name] for name in ("full-tiny-x1", "moba_v1-sum-tiny-x1"))
    error = paired_error(validation_by_sequence(sums), validation_by_sequence(full))
    above = f"{own - validation_loss(full):+.4f}"
    assert row[1:6] == [f"{own:.4f}", above, f"±{error:.4f}", "x1", f"{changed - own:+.4f}"]
    at_once, after, curve = insertion_costs(results)["moba_v1-sum"]
    before = by_name["full-tiny-x1"]["stages"]["train"]["validation_loss"]["eval_loss"]
    steps = [(one["step"], one["eval_loss"]) for one in by_name["inserted-moba_v1-sum"]["history"]]
    assert steps[0] == (0, before + at_once)
    assert steps[-1] == (curve[-1][0], before + after)
    assert abs(at_once) > 1e-4, "MoBA's first version is not full attention"


@pytest.mark.usefixtures("in_this_process")
def test_moba_trains_in_a_mixture_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = quick("with-experts", monkeypatch, ["experts-moba"])
    assert result["recipe"]["model"]["moe"]["experts"] == 4
    finding = FIGURES["with-experts"].find([result])
    assert [row[:2] for row in finding.rows[1:]] == [["experts", "moba"]]
    assert not finding.verdicts, "no dense model of this size is known"


@pytest.mark.parametrize(
    ("gained", "words"),
    [
        ({"full": 0.05, "moba": 0.06, "blocks128": 0.05}, ["agrees"] * 5),
        ({"full": -0.05, "moba": 0.15}, ["does not agree", "agrees", "does not agree", "does not agree"]),
    ],
)
def test_mixtures_are_judged_beside_the_dense_models_of_f14(gained: Mapping[str, float], words: list[str]) -> None:
    recipes = {arm.name: dict(arm.recipe) for arm in FIGURES["with-experts"].arms(0, quick=False)}
    dense = {key_of(one): trailing_loss(one) for one in read_results(F14) if one["name"] in DENSE}
    results = [
        finished_arm(f"experts-{arm}", seed, dense[f"long-{arm}-seed{seed}"] - less, recipe=recipes[f"experts-{arm}"])
        for seed in range(3)
        for arm, less in gained.items()
    ]
    finding = FIGURES["with-experts"].find(results)
    assert [verdict.word for verdict in finding.verdicts] == words
    dense_rows = [["long", arm] for arm in ("blocks128", "full", "moba")]
    assert [row[:2] for row in finding.rows[1:]] == [*dense_rows, *(["experts", arm] for arm in gained)]


def trained_version(kind: str, size: str, rate: str, loss: float, seed: int = 0) -> Result:
    """An arm of F8 whose validation loss is known."""
    run: dict[str, Any] = {"spikes": [], "gradient_norms": [[1, 1.0]], "evaluations": {}, "parent": None}
    return finished_arm(f"{kind}-{size}-{rate}", seed, loss, parameters=int(size[:-1]), **run)


def test_versions_are_judged_at_their_best_rates_two_at_a_time() -> None:
    results = []
    for size, base, noise in (("25m", 1.4, -0.001), ("10m", 1.5, 0.0), ("4m", 2.0, 0.001)):
        results += [trained_version("full", size, "x1", base), trained_version("full", size, "x4", base + 1)]
        results += [trained_version("moba", size, "x0.5", base + 0.07 + noise)]
        results += [trained_version("moba", size, "x1", base + 0.5)]
        results += [trained_version("moba_v1-sum", size, "x1", base + 0.3 + 300 * noise)]
    finding = FIGURES["versions"].find(results)
    assert [row[0] for row in finding.rows[1:4]] == ["full, 4m", "v1, sum, 4m", "v2, 4m"]
    near, behind, _ = finding.verdicts
    assert near.estimate.value == pytest.approx(0.07), "at the best rate of each"
    assert near.word == "does not agree", "that v1 scatters from size to size says nothing of v2"
    assert behind.word == "inconclusive"


def test_the_best_rate_is_that_of_all_seeds() -> None:
    """At x1 MoBA's mean is 2.10, at half of it 2.12, though its lowest loss, 1.94, is there; x4 lacks a seed."""
    losses = {("full", "x1"): (1.9, 2.0), ("moba", "x1"): (2.0, 2.2), ("moba", "x0.5"): (2.3, 1.94)}
    results = [
        trained_version(kind, "10m", rate, loss, seed)
        for (kind, rate), both in losses.items()
        for seed, loss in enumerate(both)
    ]
    finding = FIGURES["versions"].find([*results, trained_version("moba", "10m", "x4", 1.5)])
    assert [row[:5] for row in finding.rows[1:]] == [
        ["full, 10m", "1.9500", "–", "–", "x1"],
        ["v2, 10m", "2.1000", "+0.1500", "–", "x1"],
    ]
    (near,) = finding.verdicts[:1]
    assert near.estimate.value == pytest.approx(0.15)


def test_mechanisms_are_judged_within_a_length_that_has_two_seeds() -> None:
    def arm(name: str, seed: int, loss: float) -> Result:
        how = {"arms_per_gpu": 2, "tokens_per_s": 1, "parameters": 1, "evaluations": {}}
        needle = {"attention": "own", "depths": [0.0], "maps": {"own": {"passed": [[0.5]]}}}
        stage = {"needle": {"needle": 0.5, "needle_map": needle}}
        return finished_arm(name, seed, loss, stage=stage, recipe=recipes[name], **how)

    recipes = {one.name: one.recipe for one in FIGURES["mechanisms"].arms(0, quick=False)}

    results = [arm("full-32k", 0, 1.0), arm("moba-32k", 0, 9.0)]
    results += [arm("full-8k", 0, 2.0), arm("moba-8k", 0, 2.101), arm("full-8k", 1, 2.1), arm("moba-8k", 1, 2.199)]
    (verdict,) = FIGURES["mechanisms"].find(results).verdicts
    assert verdict.claim.startswith("At 8K `moba`")
    assert verdict.estimate.value == pytest.approx(0.1)


@pytest.mark.usefixtures("in_this_process")
def test_mechanisms_trains_kinds_with_stages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    results = quick("mechanisms", monkeypatch, ["full-1k", "seer-1k", "time-full-1k"])
    of_one_document = {row[0]: row for row in FIGURES["mechanisms"].find(results).rows}
    assert of_one_document["seer-1k"][5] == "–", "both sequences are parts of one document"
    (full,) = (result for result in results if result["name"] == "full-1k")
    for data in (*(one["stages"][list(one["stages"])[-1]] for one in results[:2]), full["evaluations"]["infllm"]):
        found = data["position_wise"]
        found.get("position_wise", found)["documents"] = [0, 1]
    rows = {row[0]: row for row in FIGURES["mechanisms"].find(results).rows}
    assert list(rows) == ["", "full-1k", "infllm-1k, weights of full", "seer-1k"]
    assert rows["full-1k"][9] == "0"
    timed = next(result for result in results if result["name"] == "time-full-1k")
    assert rows["full-1k"][8] == f"{timed['tokens_per_s']:,}" != "0"
    assert rows["seer-1k"][8] == "–", "its own arm has not run"
    # Two layers: a matrix of each of 2 query heads (16 x 16) and of one key head (48 x 16).
    assert rows["seer-1k"][9] == f"{2 * (2 * 16 * 16 + 3 * 16 * 16):,}"
    seer = next(result for result in results if result["name"] == "seer-1k")
    assert list(seer["stages"]) == ["short", "train", "warmup", "sparse"]
    frozen = [seer["stages"][stage]["validation_loss"]["eval_loss"] for stage in ("train", "warmup")]
    assert frozen[0] == frozen[1], "the gate alone learns in its warm-up, under full attention"
    full = next(result for result in results if result["name"] == "full-1k")
    read = full["evaluations"]["infllm"]
    assert read["attentions"] == {"infllm": {"infllm": 2}}
    own, seers = (trailing_by_sequence(result) for result in (full, seer))
    known = [loss for loss in own if loss is not None]
    assert len(known) == len(own)
    assert statistics.mean(known) == pytest.approx(trailing_loss(full), abs=1e-5)
    assert rows["seer-1k"][5] == f"±{paired_error(seers, own):.4f}"
    infllm = read["position_wise"]["curves"]["infllm"]["trailing_by_sequence"]
    assert rows["infllm-1k, weights of full"][5] == f"±{paired_error(infllm, own):.4f}"
    assert read["numbers"]["eval_loss"] != full["stages"]["train"]["validation_loss"]["eval_loss"]


@pytest.mark.usefixtures("in_this_process")
def test_needles_measures_every_head_and_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    results = quick("needles", monkeypatch, ["full", "moba-64"])
    finding = FIGURES["needles"].find(results)
    lines = {row[0]: row for row in finding.rows}
    assert {"full, 16/12, all", "full, 64/3, all", "moba-64, 16/12, all", "moba-64, 64/3, all"} <= lines.keys()
    assert lines["full, 64/3, all"][1] == "4", "two layers of two heads"
    assert 0 < float(lines["full, 64/3, all"][3]) < 1
    assert lines["full, 64/3, all"][10] == "–"
    assert lines["moba-64, 64/3, all"][10] != "–"


@pytest.mark.usefixtures("in_this_process")
def test_forced_choices_keeps_what_each_head_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    results = quick("forced", monkeypatch, ["free"])
    finding = FIGURES["forced"].find(results)
    assert [row[0] for row in finding.rows] == ["", "free"]
    assert finding.verdicts == [], "two layers of one seed are one value"
    (verdict,) = FIGURES["forced"].find([*results, *({**result, "seed": 1} for result in results)]).verdicts
    assert verdict.estimate.low == verdict.estimate.high, "equal seeds have no spread"
    shares = {
        result["name"]: np.array(
            [layer["head_distance_share"] for layer in result["stages"]["train"]["gate_probe"]["gate_probe"]["layers"]]
        )
        for result in results
    }
    assert shares["free"].shape == (2, 2, 16)
    np.testing.assert_allclose(shares["free"].sum(-1), 1)
    assert (shares["free"][:, 0] != shares["free"][:, 1]).any()


def test_added_corpora_have_their_share_of_the_blend(tmp_path: Path) -> None:
    (arm,) = (arm for arm in FIGURES["mechanisms"].arms(0, quick=False) if arm.name == "moba-32k")
    assert arm.added == {"needles-32768": 0.2}
    for name in ("train", "valid", *arm.added):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document(np.zeros(64, np.uint16))
    recipe = run_arm.complete_recipe(arm, Corpus(tmp_path, BYTES), tmp_path, 1, saved=True)
    text, needles = recipe["data"]["train"]
    assert needles["path"] == str(tmp_path / "needles-32768")
    assert needles["weight"] / (needles["weight"] + text.get("weight", 1.0)) == pytest.approx(0.2)


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


def test_a_corpus_has_documents_with_hidden_numbers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(needles, "SEQ_LEN", 1024)
    monkeypatch.setattr(needles, "TOKENS", 1 << 14)
    monkeypatch.setattr(program, "open_corpus", lambda folder: Corpus(folder, BYTES, Path("tokenizer.json")))
    write_byte_tokenizer(Path("tokenizer.json"))
    for letter in "ab":
        for part in ("train", "valid"):
            with IndexedDatasetWriter(f"{letter}/{part}", np.uint16) as writer:
                writer.add_document(np.full(1024, ord(letter)))
        arguments = ["--corpus", letter, "--runs", "runs", "--output", f"{letter}.json", "--seconds", "0"]
        assert main(["needles", "--gpus", "0", *arguments]) == 0
    made = [IndexedDataset(file.with_suffix("")) for file in Path("runs").rglob("needles-1024.idx")]
    assert len({one.fingerprint.name for one in made}) == 2


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
