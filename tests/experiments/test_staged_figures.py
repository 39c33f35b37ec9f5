"""F5, F6 and F7 in their quick form: every kind of arm really trains, and what comes of it is a table and a picture."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from data_tools.corpus_writer import IndexedDatasetWriter
from experiments import __main__ as program
from experiments import estimate, page, recall_documents, work
from experiments.corpus import Corpus, quick_corpus
from experiments.figure import Figure, Result
from experiments.hybrid import Hybrid, armed_scores
from experiments.recall_documents import ASK, STATE, Recall, fine_tuning_documents, pretraining_documents, thinned
from experiments.run_arm import run_arm
from experiments.short_first import EQUAL_FLOPS, SHORT, ShortFirst, flops_per_token
from experiments.third_cliff import VALIDATION, ThirdCliff
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import LossWeights
from tests.experiments.finished_arms import finished_arm

SIZES = Recall(length=120, facts=4, values=3, filler_ids=10, key_ids=16, value_ids=50)
Run = Callable[[Figure, Sequence[str]], list[Result]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.corpus.QUICK_TOKENS", 1 << 16)
        return quick_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run(corpus: Corpus, in_this_process: Path) -> Run:
    """Trains and evaluates arms of a figure."""

    def run(figure: Figure, names: Sequence[str]) -> list[Result]:
        whole = Corpus(corpus.folder, corpus.vocab_size, added=in_this_process / "added")
        figure.prepare(whole, in_this_process / "added", quick=True)
        arms = {arm.name: arm for arm in figure.arms(0, quick=True)}
        parents = {arm.parent for arm in arms.values()}
        return [run_arm(arms[name], whole, in_this_process, [], saved=name in parents) for name in names]

    return run


def drawn(figure: Figure, results: Sequence[Result]) -> list[str]:
    """Labels of the panels."""
    canvas = Canvas()
    figure.draw(results, canvas)
    return [axes.get_ylabel() for axes in canvas.axes]


def test_an_answer_is_what_was_stated_first() -> None:
    tokens, answers = fine_tuning_documents(SIZES, 5, np.random.default_rng(0))
    for row, marked in zip(tokens.tolist(), answers.tolist(), strict=True):
        asked = [place for place, token in enumerate(row) if token == ASK]
        assert len(asked) == SIZES.facts
        assert [place for place in range(SIZES.length) if marked[place]] == [p + 2 + i for p in asked for i in range(3)]
        for place in asked:
            stated = [other for other in range(place) if row[other : other + 2] == [STATE, row[place + 1]]]
            first, second = (row[other + 2 : other + 5] for other in stated)
            assert row[place + 2 : place + 5] == first != second


def test_recalled_tokens_are_those_of_repeated_statements_and_no_other() -> None:
    tokens, recalled = pretraining_documents(SIZES, 5, np.random.default_rng(0))
    for row, marked in zip(tokens.tolist(), recalled.tolist(), strict=True):
        values: dict[int, list[int]] = {}
        for place in (place for place, token in enumerate(row) if token == STATE):
            key, said = row[place + 1], row[place + 2 : place + 5]
            assert marked[place + 2 : place + 5] == [key in values] * 3
            assert values.setdefault(key, said) == said
        assert len(values) == SIZES.facts
        assert sum(marked) == SIZES.facts * (SIZES.statements - 1) * SIZES.values


def test_a_thinner_mask_keeps_whole_answers() -> None:
    rng = np.random.default_rng(0)
    _, answers = fine_tuning_documents(SIZES, 5, rng)
    assert thinned(answers, SIZES.values, 1, rng).all()
    assert np.array_equal(thinned(answers, SIZES.values, SIZES.answer_share, rng), answers)
    one = thinned(answers, SIZES.values, 0.003, rng)
    assert one.sum(1).tolist() == [3] * 5
    assert not (one & ~answers).any()


def test_a_call_that_is_interrupted_while_it_writes_documents_is_completed_by_the_next(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(IndexedDatasetWriter):
        """Ends the call once the first of the last corpus' two parts is written."""

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if VALIDATION in self.prefix:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recall_documents, "IndexedDatasetWriter", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            ThirdCliff().prepare(corpus, tmp_path, quick=True)
    ThirdCliff().prepare(corpus, tmp_path, quick=True)
    assert LossWeights(IndexedDataset(tmp_path / VALIDATION), "token").mask is not None


def test_the_detector_is_armed_where_the_attention_changes(run: Run) -> None:
    figure = Hybrid()
    (result,) = run(figure, ["hybrid"])
    short, switch = result["switches"]
    assert (short["stage"], switch["stage"]) == ("first", "last")
    assert (len(switch["before"]["loss"]), len(switch["after"]["grad_norm"])) == (23, 2)
    assert result["boundaries"][-1]["loss_before"] == pytest.approx(np.mean(switch["before"]["loss"][-10:]), abs=1e-4)
    assert armed_scores(result)["flagged"] == 0
    switch["after"]["loss"][1] *= 10  # the text is that of this environment, and so is the spread before
    assert armed_scores(result) == {**armed_scores(result), "flagged": 1}
    assert figure.find([result, result | {"name": "full"}]).verdicts
    assert len(drawn(figure, [result, result | {"name": "full"}])) == 2


def test_beginning_short_has_the_tokens_or_the_flops_of_beginning_long(run: Run) -> None:
    figure = ShortFirst()
    (result,) = run(figure, [SHORT])
    assert list(result["stages"]) == ["short", "train"]
    found = figure.find([result, result | {"name": "full"}])
    assert [verdict.claim.partition(",")[0] for verdict in found.verdicts] == ["At 32K and equal tokens"]
    shorter = [result | {"name": f"4k-{name}"} for name in (SHORT, "moba")]
    found = figure.find([result, *shorter])
    assert [verdict.claim.partition(",")[0] for verdict in found.verdicts] == ["At 4K and equal tokens"]
    assert len(drawn(figure, [result, *shorter])) == 2

    arms = {arm.name: arm.recipe for arm in figure.arms(0, quick=False)}
    tokens = {name: sum(stage["tokens"] for stage in recipe["stages"]) for name, recipe in arms.items()}
    flops = {name: tokens[name] * flops_per_token(dict(recipe)) for name, recipe in arms.items()}
    for length, seq_len in (("", 32 * 1024), ("4k-", 4096)):
        assert tokens[length + "full"] == tokens[length + "moba"] == tokens[length + SHORT]
        lengths = {name: [stage["seq_len"] for stage in arms[length + name]["stages"]] for name in ("moba", SHORT)}
        assert lengths == {"moba": [seq_len], SHORT: [2048, seq_len]}
    assert arms["4k-moba"]["attention"]["moba"] == {"block_size": 256, "topk": 3}
    for name in ("moba", SHORT):
        assert flops[name] < flops["full"] == pytest.approx(flops[name + EQUAL_FLOPS], rel=1e-3)


def test_beginning_short_is_judged_within_a_length() -> None:
    """A second seed of one arm at 4K says nothing of the arms at 32K, and the reverse."""

    def arm(name: str, seed: int, loss: float) -> Result:
        return finished_arm(name, seed, loss, tokens=1, compute={"real": 1.0})

    results = [arm("full", 0, 3.0), arm("full", 1, 3.2), arm(SHORT, 0, 2.0), arm(SHORT, 1, 2.201)]
    results += [arm("4k-full", 0, 2.0), arm("4k-full", 1, 9.0), arm(f"4k-{SHORT}", 0, 1.9)]
    verdicts = {verdict.claim[:5]: verdict for verdict in ShortFirst().find(results).verdicts}
    assert verdicts["At 32"].word == "agrees"
    assert verdicts["At 32"].estimate.value == pytest.approx(-0.9995)
    assert verdicts["At 32"].estimate.half < 0.02
    assert verdicts["At 4K"].word == "inconclusive"
    assert verdicts["At 4K"].estimate.value == pytest.approx(-0.1)


def test_variants_of_a_base_are_evaluated_as_they_are_and_as_moba_and_as_full(run: Run) -> None:
    figure = ThirdCliff()
    base, tuned = run(figure, ["base", "none-1"])
    assert set(base["evaluations"]["recall"]["validation_loss"]) == {"moba", "full", "by_sequence"}
    entry = tuned["stages"]["sft"]["gradient_reach"]["gradient_reach_layers"]
    assert [len(layers) for layers in entry["layers"].values()] == [2]
    own = tuned["stages"]["sft"]["validation_loss"]["eval_loss"]
    assert tuned["evaluations"]["as-moba"]["validation_loss"]["moba"] == pytest.approx(own, abs=1e-5)
    other = copy.deepcopy(tuned) | {"name": "none-10"}
    full = copy.deepcopy(tuned) | {"name": "all-1"}
    finding = figure.find([base, tuned, other, full])
    assert "FAILS" in " ".join(cell for row in finding.rows for cell in row)
    assert [verdict.estimate.value for verdict in finding.verdicts] == pytest.approx([0.0] * 3, abs=1e-12)
    assert {verdict.word for verdict in finding.verdicts} == {"inconclusive"}, "one seed, whatever the number of masks"
    assert len(drawn(figure, [base, tuned, other, full])) == 3


def tuned(name: str, first: float) -> Result:
    """A fine-tuned arm that began with this loss."""
    history = [{"evaluation": "validation_loss", "eval_loss": first}]
    attention = {"layers": {"own": [{"reach": 0.5, "context_norm": 1.0, "mass": [1.0]}]}, "attention": "own"}
    stage = {"gradient_reach": {"gradient_reach_layers": {**attention, "distances": ["near"]}}}
    after = {"as-moba": {"validation_loss": {"moba": 1.0, "full": 1.0}}}
    arm = finished_arm(name, 0, 0.5, stage=stage, history=history, evaluations=after)
    return arm | {"stages": {"sft": arm["stages"]["train"]}}


def test_a_variant_that_began_with_other_weights_is_named_and_left_out(tmp_path: Path) -> None:
    results = [tuned("none-1", 13.0), tuned("none-10", 13.0001), tuned("none-100", 13.4), tuned("all-1", 13.1)]
    finding = ThirdCliff().find(results)
    named = "none-100 of seed 0 began with a loss of 13.4000, none-1 with 13.0000: not with the same weights"
    assert finding.left_out == [named]
    assert [row[:2] for row in finding.rows[1:]] == [["MoBA", "1 %"], ["MoBA", "10 %"], ["full", "1 %"]]
    assert f"Left out: {named}." in page.summary_lines(ThirdCliff(), results)
    file = tmp_path / "third-cliff.json"
    file.write_text(json.dumps({"results": {"arms": results}}))
    page.draw(ThirdCliff(), file, tmp_path / "drawn.svg")
    two = ThirdCliff().find([tuned("none-1", 13.0), tuned("none-10", 13.4)])
    assert len(two.left_out) == 2, "of two nothing says which began with the weights of the base"
    assert len(two.rows) == 1


def test_nothing_is_fine_tuned_from_a_base_that_cannot_recall(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def pretend(arm: Any, *_: Any, **__: Any) -> Result:
        ran.append(arm.name)
        (tmp_path / "third-cliff" / arm.key).mkdir()
        recalled = {"recall": {"validation_loss": {"moba": 0.5, "full": 0.01}}}
        known: Result = {"name": arm.name, "seed": 0, "evaluations": recalled, "seconds": 1.0, "tokens_per_s": 1}
        known |= {"recipe": dict(arm.recipe), "parent": None, "losses": []}
        return known | {"device": None, "gpus": 0, "arms_per_gpu": 1}

    monkeypatch.setattr(work, "run_arm", pretend)
    monkeypatch.setattr(ThirdCliff, "prepare", lambda *_: None)
    monkeypatch.setattr(estimate, "modelled_seconds", lambda *_: 1.0)
    output = ["--output", str(tmp_path / "result.json"), "--runs", str(tmp_path), "--seeds", "0"]
    monkeypatch.setattr(program, "open_corpus", lambda *_: corpus)
    assert program.main(["third-cliff", "--corpus", str(corpus.folder), "--gpus", "0", *output]) == 0
    assert ran == ["base"]
    printed = capsys.readouterr().out
    assert "left out: 20 arms of third-cliff: the base of seed 0 FAILS: 0.5000 nats" in printed
    assert "failed" not in printed
    assert "not finished" not in printed
    assert program.main(["third-cliff", "--corpus", str(corpus.folder), "--gpus", "0", *output]) == 0
    assert ran == ["base"], "nothing of this seed is left to do"
    assert "1 arms held, 0 to run" in capsys.readouterr().out
