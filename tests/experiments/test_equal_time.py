"""F13: arms of equal seconds by measured rates, which are refused without rates, and whose settings are not mixed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.train_tokenizer import train_tokenizer
from experiments import corpus, equal_time, page, smollm2_corpus
from experiments.__main__ import main
from experiments.byte_tokenizer import write_byte_tokenizer
from experiments.corpus import Corpus, open_corpus
from experiments.equal_time import LENGTHS, NAMES, NOMINAL_RATES, SECONDS, EqualTime, learning_curve
from experiments.figure import Result
from experiments.registry import FIGURES
from experiments.run_arm import complete_recipe
from experiments.smollm2 import BATCH_TOKENS
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import UserError
from moba_train.tools.text_tokenizer import load_text_tokenizer

LATE = {"full": 1.40, "moba": 1.37, "early": 1.36, "window": 1.385, "short": 1.375}
"""Losses that make all claims about losses at 64K true."""


def finished(
    kind: str, seed: int, loss: float, needles: float = 0.5, own: float | None = None, length: str = "64k"
) -> Result:
    """Result of an arm."""
    (arm,) = (one for one in EqualTime().arms(seed, quick=False) if one.name == f"{kind}-{length}")
    curves = {"full": {"mean": [loss], "trailing_by_sequence": [loss, loss]}}
    maps: dict[str, Any] = {"full": {"score": needles}}
    if own is not None:
        curves[kind] = {"mean": [own], "trailing_by_sequence": [own, own]}
        maps |= {kind: {"score": 0.1}, f"{kind}, answers with full": {"score": 0.2}}
    position = {"position_wise": {"curves": curves, "documents": [0, 1]}}
    ruler = {"scores": {"full": {"teacher_forced": {"vt": [0.5]}}}}
    answers = {**position, "needle": {"maps": maps}, "ruler": ruler}
    tokens = sum(stage["tokens"] for stage in arm.recipe["stages"])
    history = [{"evaluation": "position_wise", "tokens": tokens, "trailing_loss": loss}]
    recipe = json.loads(json.dumps(arm.recipe))
    known = {"name": arm.name, "seed": seed, "tokens": tokens, "recipe": recipe, "history": history}
    return {**known, "evaluations": {"answers": answers, "other": {"position_wise": {"curves": curves}}}}


def test_an_arm_has_the_tokens_of_its_seconds_by_the_rates() -> None:
    known = equal_time._rates(quick=False)
    for seconds in (300, 1200):
        arms = {arm.name: arm for arm in EqualTime(seconds).arms(0, quick=False)}
        for kind in NAMES:
            rates = {"sparse": "moba-64k", "short": "full-8k", "full": "full-64k"}
            stages = arms[f"{kind}-64k"].recipe["stages"]
            took = [stage["tokens"] / known[rates[stage["name"]]] for stage in stages]
            assert sum(took) == pytest.approx(seconds, rel=0.02)
        assert arms["window-64k"].recipe["stages"][0]["tokens"] == arms["moba-64k"].recipe["stages"][0]["tokens"]
        for kind, share in {"moba": 0.88, "early": 0.6}.items():
            (sparse, full) = arms[f"{kind}-64k"].recipe["stages"]
            assert sparse["tokens"] / known["moba-64k"] == pytest.approx(share * seconds, abs=BATCH_TOKENS / 9e4)
            assert full["attention"] == {"default": "full"}
        assert all(arm.parent == "base" for arm in arms.values() if arm.name != "base")


def test_the_claims_are_judged_from_their_arms() -> None:
    rng = np.random.default_rng(0)
    results = [
        finished(kind, seed, loss + rng.normal(0, 5e-4), own=loss + 0.01 if kind in ("moba", "window") else None)
        for seed in range(3)
        for kind, loss in LATE.items()
    ]
    for length, loss in (("32k", 1.5), ("128k", 1.3)):  # ahead at 128K, level at 32K
        results += [finished("full", seed, loss, length=length) for seed in range(2)]
        results += [finished("moba", seed, loss - 0.03 * (length == "128k"), length=length) for seed in range(2)]
    finding = EqualTime().find(results)
    words = {verdict.claim.split(",")[-1].strip(): verdict.word for verdict in finding.verdicts}
    below_full = ["does not agree", "agrees", "agrees"]  # at 32K, 64K and 128K
    assert [verdict.word for verdict in finding.verdicts] == [
        *below_full,
        *["agrees"] * 4,
        "does not agree",
        "agrees",
    ], words
    assert [verdict.claim.partition(",")[0] for verdict in finding.verdicts[:3]] == ["At 32K", "At 64K", "At 128K"]
    rows = {row[0]: dict(zip(finding.rows[0], row, strict=True)) for row in finding.rows[1:]}
    assert float(rows["moba-64k"]["above full"]) == pytest.approx(-0.03, abs=1e-3)
    assert rows["moba-64k"]["text own, answer full"] == "0.2000"
    assert rows["full-64k"]["own"] == "–"


def test_curves_are_over_the_seconds_of_each_stage() -> None:
    ((seconds, _),) = learning_curve(finished("moba", 0, 1.4), "seconds")
    assert seconds == pytest.approx(SECONDS, rel=0.02)
    ((seconds, _),) = learning_curve(finished("window", 0, 1.4), "seconds")
    assert seconds < SECONDS * (0.12 + 0.88 * NOMINAL_RATES["moba-64k"] / NOMINAL_RATES["window-64k"] + 0.02)


def test_it_runs_with_rates_of_this_device_and_with_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_time, "_RATES", tmp_path / "rates.json")
    known = Corpus(tmp_path, 49_152)
    with pytest.raises(UserError, match=r"weights: no weights; experiments/README\.md says how they get there"):
        EqualTime().prepare(known, tmp_path, quick=False)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "other.idx").touch()
    arms = [{"name": name, "tokens_per_s": 100, "device": "another GPU"} for name in NOMINAL_RATES]
    (tmp_path / "rates.json").write_text(json.dumps({"results": {"arms": arms}}))
    with pytest.raises(UserError, match=r"rates\.json: no rates on .*, or some of another device; measure them first"):
        EqualTime().prepare(known, tmp_path, quick=False)


def test_an_arm_waits_for_the_rates_of_its_stages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_time, "_RATES", tmp_path / "rates.json")
    measured = [{"name": name, "tokens_per_s": 1e5} for name in ("full-64k", "moba-64k")]
    (tmp_path / "rates.json").write_text(json.dumps({"results": {"arms": measured}}))
    arms = EqualTime().arms(0, quick=False)
    waiting = {arm.name: problem for arm in arms if (problem := EqualTime().refusal(arm, [], quick=False))}
    assert waiting.keys() == {"short-64k", "full-32k", "moba-32k", "full-128k", "moba-128k"}
    assert waiting["moba-32k"] == "equal-time-rates has no rates of full-32k, moba-32k"
    assert {arm.name: arm for arm in arms}["full-64k"].recipe["stages"][0]["tokens"] == pytest.approx(
        SECONDS * 1e5, rel=0.01
    )


@pytest.mark.usefixtures("in_this_process")
def test_the_smallest_form_trains_and_settings_are_not_mixed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 17)
    quick = ["--quick", "--gpus", "0", "--seconds", "1e6"]
    assert main(["equal-time", *quick, "--arms", "moba-64k", "full-64k"]) == 0
    output = Path("runs/experiments/equal-time-quick.json")
    results = {arm["name"]: arm for arm in json.loads(output.read_text())["results"]["arms"]}
    assert results.keys() == {"base", "full-64k", "moba-64k"}
    maps = results["moba-64k"]["evaluations"]["answers"]["needle"]["maps"]
    assert list(maps) == ["moba", "moba, answers with full", "full"]
    page.draw(FIGURES["equal-time"], output, output.with_suffix(".svg"))
    capsys.readouterr()
    for arguments, said in (
        (["equal-time", *quick, "--seconds-per-arm", "300"], "holds results of other settings; given"),
        (["trailing", *quick, "--seconds-per-arm", "300"], "--seconds-per-arm: the arms of trailing have a fixed"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert said in capsys.readouterr().err


def test_documents_are_the_same_text_in_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "what stands here returns far away\n" * 40
    (tmp_path / "text.txt").write_text(text)
    for folder in ("long", "model"):
        (tmp_path / folder).mkdir()
    train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "long" / "tokenizer.model", 300, "text")
    written = load_text_tokenizer(tmp_path / "long" / "tokenizer.model")
    write_byte_tokenizer(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("long/train", "long/valid", "packages"):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for part in (text, text[:700]):
                writer.add_document(np.array([*written.encode(part), written.eos_id], dtype=np.uint16))
    given = {"corpus": "long", "model": "model", "other": "packages", "output": "again"}
    arguments = [word for key, name in given.items() for word in (f"--{key}", str(tmp_path / name))]
    monkeypatch.setattr("sys.argv", ["smollm2_corpus", *arguments])
    smollm2_corpus.main()
    again = IndexedDataset(tmp_path / "again" / "train")
    tokens = again.document(1, 0, int(again.document_lengths[1]))
    assert bytes(tokens.astype(np.uint8)).decode().strip() == text[:700].strip()
    found = open_corpus(tmp_path / "again")
    assert (found.vocab_size, found.tokenizer) == (256, tmp_path / "again" / "tokenizer.json")
    assert IndexedDataset(found.find("other")).documents == 2
    arms = {arm.name: arm for arm in EqualTime().arms(0, quick=False)}
    recipe = complete_recipe(arms["base"], found, tmp_path / "runs", 1, saved=True)
    assert Path(recipe["init_from"]) == tmp_path / "again" / "weights"
    assert (tmp_path / "again" / "weights" / "config.json").is_file()
    recipe = complete_recipe(arms["moba-64k"], found, tmp_path / "runs", 1, saved=True)
    assert Path(recipe["init_from"]) == tmp_path / "runs" / "base-seed0"
    assert recipe["data"]["train"] == [{"path": str(tmp_path / "again" / "train"), "min_length": 65_536}]


def test_no_needle_is_hidden_where_moba_selects_everything_and_longer_sequences_are_fewer() -> None:
    arms = {arm.name: arm for arm in EqualTime().arms(0, quick=False)}
    for name, length in LENGTHS.items():
        asked = dict(word.split("=", 1) for word in arms[f"moba-{name}"].evaluations["answers"] if "=" in word)
        position, needle, ruler = (
            json.loads(asked[f"evaluation.{task}"]) for task in ("position_wise", "needle", "ruler")
        )
        assert min(needle["lengths"]) > 128 * 16
        assert max(needle["lengths"]) == length
        read = [9 * needle["samples"] * sum(needle["lengths"]), 3 * ruler["samples"] * length]
        assert max(*read, position["sequences"] * length) < 2**22
