"""F17, F18 and F21: their smallest forms train, and their claims are judged from losses and needles by length."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from experiments import corpus, page, third_cliff_lengths
from experiments.__main__ import main
from experiments.byte_tokenizer import write_byte_tokenizer
from experiments.corpus import Corpus, write_joined, write_short
from experiments.extrapolation import Extrapolation, curve
from experiments.figure import Result
from experiments.long_stage import AT_SHORT_LENGTH, SETTINGS, LongStage, short_loss
from experiments.readings import trailing_loss
from experiments.recall_documents import ASK
from experiments.registry import FIGURES
from experiments.third_cliff_lengths import LENGTHS, QUICK_SIZES, ThirdCliffLengths
from moba_train.data.indexed import IndexedDataset
from moba_train.tools.text_tokenizer import load_text_tokenizer
from tests.experiments.finished_arms import finished_arm


def test_text_is_cut_into_short_documents_and_joined_in_another_order(tmp_path: Path) -> None:
    lengths = [10, 3, 25, 1]
    with IndexedDatasetWriter(tmp_path / "train", np.uint16) as writer:
        for number, length in enumerate(lengths):
            writer.add_document(np.full(length, 65 + number, dtype=np.uint16))
    write_byte_tokenizer(tmp_path / "tokenizer.json")
    text = Corpus(tmp_path, 256, tmp_path / "tokenizer.json")
    eos = load_text_tokenizer(str(text.tokenizer)).eos_id
    write_short(text, "train", tmp_path / "plain", 8)
    write_short(text, "train", tmp_path / "ended", 8, ends=True)
    write_joined(tmp_path / "plain", tmp_path / "joined", 12)
    plain, ended, joined = (IndexedDataset(tmp_path / name) for name in ("plain", "ended", "joined"))
    assert plain.document_lengths.tolist() == [8, 2, 3, 8, 8, 8, 1, 1]
    assert max(ended.document_lengths) == 8
    assert eos is None or all(ended.document(one)[-1] == eos for one in range(ended.documents))
    assert all(length >= 12 for length in joined.document_lengths[:-1])
    found = np.concatenate([joined.document(one) for one in range(joined.documents)])
    before = np.concatenate([plain.document(one) for one in range(plain.documents)])
    assert sorted(found) == sorted(before)
    assert found.tolist() != before.tolist()


def long_arm(name: str, seed: int, loss: float) -> Result:
    (arm,) = (one for one in LongStage().arms(seed, quick=False) if one.name == name)
    recipe = json.loads(json.dumps(arm.recipe))
    evaluation = {"numbers": {"eval_loss": loss + 0.1}, "validation_loss": {"by_sequence": {"window": []}}}
    return finished_arm(name, seed, loss, recipe=recipe, evaluations={AT_SHORT_LENGTH: evaluation})


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ({"full": 1.5, "moba": 1.505, "kept": 1.501, "masks-late": 1.499, "masks-never": 1.52}, "agrees"),
        ({"full": 1.5, "moba": 1.53, "kept": 1.48, "masks-late": 1.52, "masks-never": 1.5}, "does not agree"),
    ],
)
def test_the_long_stage_is_judged_by_its_last_tokens(losses: Mapping[str, float], word: str) -> None:
    results = [
        long_arm(name, seed, loss + 0.1 * seed + 1e-4 * (place * seed % 3))
        for seed in range(3)
        for place, (name, loss) in enumerate(losses.items())
    ]
    finding = LongStage().find(results)
    assert [verdict.word for verdict in finding.verdicts] == [word] * 4
    assert [row[0] for row in finding.rows[1:]] == [*SETTINGS]
    assert float(finding.rows[2][3]) == pytest.approx(losses["moba"] - losses["full"], abs=2e-4)


def test_the_arms_of_the_long_stage_differ_in_what_they_are_about() -> None:
    arms = {arm.name: arm for arm in LongStage().arms(0, quick=False)}
    long = {name: arms[name].recipe["stages"][-1] for name in SETTINGS}
    assert long["full"] == long["moba"] == long["kept"] == long["masks-late"] != long["masks-never"]
    assert arms["kept"].recipe["stages"][0] == arms["base"].recipe["stages"][0]
    assert [arms[name].parent for name in SETTINGS] == ["base", "base", None, "base-joined", "base-joined"]
    assert arms["moba"].recipe["attention"] != arms["full"].recipe["attention"] == arms["kept"].recipe["attention"]


def far_arm(name: str, seed: int, losses: Mapping[str, Sequence[float]], needles: Mapping[str, float]) -> Result:
    """An arm whose loss is the first number up to the trained length and the second one behind it."""
    (arm,) = (one for one in Extrapolation().arms(seed, quick=False) if one.name == name)
    ways = {"far": name} | ({"yarn": "full, YaRN"} if name == "full" else {})
    lengths = [8192 << step for step in range(5)]
    found = {}
    for evaluation, way in ways.items():
        near, far = losses[way]
        mean = [near + 1e-3 * seed] * 4 + [far + 1e-3 * math.sin(seed)] * 60
        passed = [[needles[way]] * 5] * 5
        found[evaluation] = {
            "position_wise": {"bucket": 2048, "curves": {"own": {"mean": mean}}},
            "needle": {"lengths": lengths, "maps": {"own": {"passed": passed}}},
        }
    return {"name": name, "seed": seed, "recipe": json.loads(json.dumps(arm.recipe)), "evaluations": found}


@pytest.mark.parametrize(
    ("far", "word"),
    [
        ({"full": 3.0, "full, YaRN": 1.6, "moba-nope": 1.5, "full-nope": 1.505, "moba-rope": 1.7}, "agrees"),
        ({"full": 1.6, "full, YaRN": 1.5, "moba-nope": 1.6, "full-nope": 1.5, "moba-rope": 1.5}, "does not agree"),
    ],
)
def test_reading_further_is_judged_at_the_furthest_length(far: Mapping[str, float], word: str) -> None:
    losses = {way: (1.5, loss) for way, loss in far.items()}
    needles = dict.fromkeys(far, 0.1) | {"moba-nope": 0.9 if word == "agrees" else 0.2}
    names = [name for name in far if "," not in name]
    results = [far_arm(name, seed, losses, needles) for seed in range(3) for name in names]
    finding = Extrapolation().find(results)
    assert [verdict.word for verdict in finding.verdicts] == [word] * 6
    assert [row[0] for row in finding.rows[1:]] == [*far]
    assert finding.rows[1][2] == "1.501"
    assert float(finding.rows[1][6]) == pytest.approx(far["full"], abs=2e-3)


@pytest.mark.usefixtures("in_this_process")
def test_smallest_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    found: dict[str, dict[str, Any]] = {}
    for name, arms in (("long-stage", ["moba", "kept"]), ("extrapolation", ["full"])):
        quick = ["--quick", "--gpus", "0", "--seconds", "1e6", "--arms", *arms]
        assert main([name, *quick]) == 0
        output = Path(f"runs/experiments/{name}-quick.json")
        page.draw(FIGURES[name], output, output.with_suffix(".svg"))
        assert output.with_suffix(".svg").stat().st_size > 5000
        found[name] = {one["name"]: one for one in json.loads(output.read_text())["results"]["arms"]}
    base, moba, kept = (found["long-stage"][name] for name in ("base", "moba", "kept"))
    assert kept["losses"][: len(base["losses"])] == base["losses"], "the same weights, bit by bit"
    assert trailing_loss(moba) != short_loss(moba)
    full = found["extrapolation"]["full"]
    plain, scaled = (curve(full, way) for way in ("full", "full, YaRN"))
    assert len(plain) == len(scaled) == 8
    assert (plain != scaled).all()


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ({"none-128k": 0.9, "last2-128k": 0.1, "none-32k": 0.3, "last2-32k": 0.08, "all-32k": 0.05}, "agrees"),
        ({"none-128k": 0.1, "last2-128k": 0.4, "none-32k": 0.6, "last2-32k": 0.3, "all-32k": 0.05}, "does not agree"),
    ],
)
def test_sparse_masks_are_judged_by_the_answers_of_each_length(losses: Mapping[str, float], word: str) -> None:
    start = {"history": [{"evaluation": "validation_loss", "eval_loss": 9.0}]}
    results = [
        finished_arm(name, seed, loss + 0.1 * seed + 1e-4 * (place * seed % 3), **start)
        for seed in range(3)
        for place, (name, loss) in enumerate(losses.items())
    ]
    bases = [finished_arm("base", seed, loss) for seed, loss in enumerate((0.02, 0.2))]
    figure = ThirdCliffLengths()
    finding = figure.find([*bases, *results])
    assert [verdict.word for verdict in finding.verdicts] == [word] * 3
    assert [row[:3] for row in finding.rows[1:3]] == [["MoBA", "32K", "1.2 %"], ["last 2 of 8 full", "32K", "1.2 %"]]
    assert [figure.refuses(base, quick=False) != "" for base in bases] == [False, True]


def test_trajectories_carry_loss_on_their_answers_alone_and_answers_are_as_many_at_each_length() -> None:
    found = {name: (tokens, mask) for name, tokens, mask in third_cliff_lengths._corpora(QUICK_SIZES, quick=True)}
    for length, tokens in LENGTHS.items():
        documents, answers = found[f"trajectories-{length}"]
        assert documents.shape[1] == tokens // 128
        assert (answers.sum(1) == QUICK_SIZES.facts * QUICK_SIZES.values).all()
        asked = [list(np.flatnonzero(one == ASK)) for one in documents]
        assert [[int(place) for place in np.flatnonzero(mask)[:: QUICK_SIZES.values] - 2] for mask in answers] == asked
