"""Figures: their arms are valid and fit the time, and what they find in results of a known law is that law."""

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.python_sources import BYTES
from data_tools.corpus_writer import IndexedDatasetWriter
from experiments import comparison, estimate, fits, page, published
from experiments.byte_tokenizer import write_byte_tokenizer
from experiments.corpus import Corpus
from experiments.estimate import OVERLAP, Estimates, modelled_seconds
from experiments.figure import Arm, Figure, Result
from experiments.models import TOKENS_PER_PARAMETER, parameters
from experiments.readings import validation_loss
from experiments.registry import FIGURES
from experiments.run_arm import complete_recipe
from experiments.scaling import Scaling
from experiments.trailing import BOTH, Trailing
from experiments.trained_with import evaluated
from moba_train.config.schema import RunConfig
from tests.guide import ROOT, anchors, links
from tests.resolved import check, spec_of, stages_of

TRAINED = [figure for figure in FIGURES.values() if not figure.source]
DAY = 1e15 * 86400


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    added = {
        name for figure in TRAINED for quick in (True, False) for arm in figure.arms(1, quick) for name in arm.added
    }
    for name in ("train", "valid", *added):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            writer.add_document(np.arange(4096, dtype=np.uint16) % BYTES)
    write_byte_tokenizer(folder / "tokenizer.json")
    return Corpus(folder, BYTES, folder / "tokenizer.json")


@pytest.mark.parametrize("figure", TRAINED, ids=lambda figure: figure.name)
@pytest.mark.parametrize("quick", [True, False])
def test_every_arm_is_a_valid_recipe_of_its_own_name(
    figure: Figure, quick: bool, corpus: Corpus, tmp_path: Path
) -> None:
    corpus = dataclasses.replace(corpus, added=tmp_path)
    figure.prepare(corpus, tmp_path, quick=True)
    arms = figure.arms(1, quick)
    assert len({arm.key for arm in arms}) == len(arms)
    for arm in arms:
        recipe = complete_recipe(arm, corpus, Path("runs"), 1, saved=False)
        config = RunConfig.model_validate(recipe)
        if not arm.problem(sharing=1):
            check(config, 1, device="cpu" if quick else "cuda")
        assert json.loads(json.dumps(arm.recipe)) == arm.recipe


@pytest.mark.parametrize("figure", TRAINED, ids=lambda figure: figure.name)
def test_every_arm_ends_within_nine_minutes_on_two_gpus_but_those_of_two_figures(
    figure: Figure,
) -> None:
    limit = {"scaling": 1200, "equal-time": 1800}.get(figure.name, 540)
    assert {
        arm.key: modelled_seconds(arm, 2) for arm in figure.arms(0, quick=False) if modelled_seconds(arm, 2) > limit
    } == {}


def test_arms_that_share_a_gpu_take_longer_only_where_it_is_full() -> None:
    small = next(arm for arm in Scaling().arms(0, quick=False) if arm.name == "full-4m")
    alone, three, twelve = (modelled_seconds(small, 1, sharing) for sharing in (1, 3, 12))
    assert alone == three
    assert twelve > 2 * alone
    served = modelled_seconds(small, 1, 12, service=True)
    assert served - estimate.START_S == pytest.approx((twelve - estimate.START_S) / OVERLAP)


def test_a_model_that_is_not_compiled_takes_the_host_longer() -> None:
    base, *_ = FIGURES["third-cliff"].arms(0, quick=False)
    compiled = dataclasses.replace(base, recipe={**base.recipe, "compile": True})
    steps = stages_of(estimate.config_of(base))[-1].end_step
    layers = steps * base.recipe["model"]["layers"]
    fixed = estimate.START_S + estimate.EVALUATION_S * len(base.evaluations)
    assert modelled_seconds(base) == pytest.approx(fixed + layers * estimate.UNCOMPILED_LAYER_STEP_S)
    assert modelled_seconds(compiled) == pytest.approx(fixed + layers * estimate.LAYER_STEP_S)


def test_arms_that_ended_correct_estimates_of_their_kind_under_the_same_conditions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(estimate, "service_runs", lambda: True)
    arms = {arm.name: arm for arm in Scaling().arms(0, quick=False)}
    arms |= {f"{arm.name}-32k": arm for arm in Trailing().arms(0, quick=False)}

    def took(arm: Arm, factor: float, sharing: int = 6, **other: Any) -> Result:
        seconds = factor * modelled_seconds(arm, 1, sharing, service=True)
        how = {"device": "a GPU", "gpus": 1, "arms_per_gpu": sharing, "multi_process_service": True} | other
        return {
            "name": arm.name,
            "seed": 0,
            "recipe": arm.recipe,
            "seconds": seconds,
            "evaluations": dict(arm.evaluations),
            **how,
        }

    def corrected(name: str, *finished: Result, sharing: int = 6) -> float:
        modelled = modelled_seconds(arms[name], 1, sharing, service=sharing > 1)
        return Estimates(finished).seconds(arms[name], 1, sharing) / modelled

    moba, full = took(arms["moba-4m"], 1.5), took(arms["full-4m"], 0.8)
    assert corrected("moba-10m") == 1.0
    assert corrected("moba-10m", moba, full) == pytest.approx(1.5)
    assert corrected("full-10m", moba, full) == pytest.approx(0.8)
    assert corrected("full-10m", moba) == pytest.approx(1.5), "of another kind, where there is none of its own"
    longer = took(arms["moba-4m-32k"], 0.6)
    assert corrected("moba-10m-32k", moba, full, longer) == pytest.approx(0.6), "of its own length"
    assert corrected("moba-10m", moba, full, longer) == pytest.approx(1.5)
    assert corrected("moba-10m-32k", moba, full) == pytest.approx(1.5), "of its kind, where there is none of its length"
    assert corrected("moba-10m", took(arms["moba-4m"], 1.5, device="another GPU")) == 1.0
    assert corrected("moba-10m", took(arms["moba-4m"], 1.5, multi_process_service=False)) == 1.0
    assert corrected("moba-10m", moba, sharing=1) == 1.0, "arms that shared a GPU say nothing of one alone"
    learning = Estimates([])
    learning.add(moba)
    assert learning.seconds(arms["moba-4m"], 1, 6) == pytest.approx(moba["seconds"])


def test_sizes_are_those_of_the_trainer(corpus: Corpus) -> None:
    for arm in Scaling().arms(0, quick=False):
        recipe = complete_recipe(arm, corpus, Path("runs"), 1, saved=False)
        size = arm.name.rpartition("-")[2]
        counted = spec_of(RunConfig.model_validate(recipe)).counts.without_embeddings
        assert parameters(size) == pytest.approx(counted, rel=2e-3)  # norms
        assert int(size[:-1]) == pytest.approx(counted / 1e6, rel=0.15)


def result(figure: Scaling | Trailing, attention: str, size: str, seed: int, loss: float) -> Result:
    """What an arm would have given whose loss is known."""
    tokens = TOKENS_PER_PARAMETER * parameters(size)
    compute = 6 * parameters(size) * tokens / DAY
    curve = {"mean": [loss + 0.5, loss]}
    run = {name: {"mean": [loss + 0.5, loss + (0.1 if name != attention else 0.0)]} for name in ("full", "moba")}
    position = {"bucket": 2048, "attention": attention, "curves": {attention: curve}}
    return {
        "name": f"{attention}-{size}",
        "seed": seed,
        "tokens": tokens,
        "device": "a GPU",
        "recipe": {},
        "compute": {"6ND": compute, "real": compute * (1.5 if attention == "full" else 1.1)},
        "stages": {
            "train": {
                "validation_loss": {"eval_loss": loss},
                "position_wise": {"trailing_loss": loss, "position_wise": position},
            }
        },
        "evaluations": {
            BOTH: {
                "validation_loss": {name: curves["mean"][-1] for name, curves in run.items()},
                "position_wise": {"curves": run},
            }
        },
    }


def results_of(figure: Any, laws: dict[str, published.Law], noise: float) -> list[Result]:
    """Results of all arms with three seeds: losses by `laws`, with noise of which a seed has most in common."""
    rng = np.random.default_rng(0)
    found = []
    for seed in range(3):
        for size in figure.sizes:
            compute = 6 * TOKENS_PER_PARAMETER * parameters(size) ** 2 / DAY
            common = rng.normal(0, 5 * noise)
            for attention in ("full", "moba"):
                loss = laws[attention](compute) + common + rng.normal(0, noise)
                found.append(result(figure, attention, size, seed, loss))
    return found


def test_scaling_finds_the_published_laws_again_where_they_hold() -> None:
    finding = Scaling().find(results_of(Scaling(), published.VALIDATION_8K, 3e-4))
    assert [verdict.word for verdict in finding.verdicts] == ["agrees", "agrees"]
    for attention, law in published.VALIDATION_8K.items():
        a, low, high = finding.numbers["6ND"][attention]["a"]
        assert low < law.a < high
        assert a == pytest.approx(law.a, rel=0.02)
        b, *_ = finding.numbers["6ND"][attention]["b"]
        assert b == pytest.approx(law.b, abs=2e-3)
    assert len(finding.rows) == 1 + len(Scaling.sizes) + (1 + 4) + (1 + 3)
    gaps = {row[0]: float(row[1].split()[0]) for row in finding.rows[-3:]}
    assert gaps["at equal tokens"] == pytest.approx(0.1, abs=0.1)
    assert gaps["at equal time, 0.86 times the tokens"] - gaps["at equal tokens"] == pytest.approx(1.0, abs=0.1)
    assert gaps["at equal real FLOPs"] == pytest.approx(100 * ((1.1 / 1.5) ** 0.063 - 1), abs=0.2)


def test_fits_of_pairs_do_not_take_what_both_have_in_common_for_a_difference() -> None:
    results = results_of(Scaling(), published.VALIDATION_8K, 1e-3)
    paired = fits.fit(results, validation_loss, "6ND")
    apart = fits.fit(results[:-1], validation_loss, "6ND")  # the last arm's partner stays
    assert paired is not None
    assert apart is not None
    assert paired.slopes().half < apart.slopes().half / 3
    shuffled = fits.fit([*results[7:], *results[:7]], validation_loss, "6ND")
    assert shuffled is not None
    assert shuffled.slopes() == paired.slopes()


def test_scaling_does_not_agree_where_moba_is_worse_and_cannot_tell_from_noise() -> None:
    worse = {"full": published.Law(2.6, -0.06), "moba": published.Law(2.65, -0.06)}
    assert Scaling().find(results_of(Scaling(), worse, 3e-4)).verdicts[0].word == "does not agree"
    noisy = Scaling().find(results_of(Scaling(), published.VALIDATION_8K, 0.05))
    assert noisy.verdicts[0].word == "inconclusive"
    assert noisy.verdicts[0].estimate.visible > 0.01


def test_a_trend_is_a_line_through_the_gaps_of_pairs_with_students_interval() -> None:
    """Gaps of 0, 0.02 and 0.01 at 1, 10 and 100: slope 0.005 a decade, squares of deviations 1.5e-4, one degree of
    freedom, so that the standard error is sqrt(1.5e-4 / 2); Student's t is 12.706."""

    def arms(*gaps: tuple[float, float], seed: int = 0) -> list[Result]:
        return [
            {"name": f"{name}-{compute:g}m", "seed": seed, "compute": {"6ND": compute}, "loss": 2.0 + more}
            for compute, gap in gaps
            for name, more in (("full", 0.0), ("moba", gap))
        ]

    def found(results: list[Result]) -> comparison.Estimate | None:
        return fits.trend(results, lambda result: float(result["loss"]))

    pairs = arms((1, 0.0), (10, 0.02), (100, 0.01))
    slope = found([*pairs, *arms((1000, 5.0))[:1]])  # an arm without its pair
    assert slope is not None
    assert slope.value == pytest.approx(0.005)
    assert slope.half == pytest.approx(12.706 * (1.5e-4 / 2) ** 0.5, rel=1e-3)
    assert found(pairs[:4]) is None, "a line through two pairs has no error"
    assert found([arm for seed in range(3) for arm in arms((1, 0.01), seed=seed)]) is None, "one size has no slope"


def test_trailing_and_what_is_drawn_from_its_arms(tmp_path: Path) -> None:
    results = results_of(Trailing(), published.TRAILING_32K, 3e-4)
    # The published laws cross within these computes: the gap is wide where they end, not at these sizes.
    gap, trend = Trailing().find(results).verdicts
    computes = [6 * TOKENS_PER_PARAMETER * parameters(size) ** 2 / DAY for size in Trailing.sizes]
    known = np.mean([published.TRAILING_32K["moba"](c) - published.TRAILING_32K["full"](c) for c in computes])
    assert gap.estimate.low < known < gap.estimate.high
    assert trend.word == "agrees"
    crossed = FIGURES["trained-with"].find(results).verdicts
    assert len(crossed) == 4
    grown = FIGURES["position"].find(results)
    assert grown.verdicts[0].estimate.value == pytest.approx(0.0, abs=1e-9)  # these curves keep their distance
    file = tmp_path / "trailing.json"
    content = {"command": "python -m experiments trailing", "settings": {"corpus": {"training_tokens": 10**8}}}
    file.write_text(json.dumps({**content, "results": {"arms": results}}))
    for name in ("trailing", "position", "trained-with"):
        page.draw(FIGURES[name], file, tmp_path / f"{name}.svg")
        text = page.section(FIGURES[name], file)
        assert all(str(verdict) in text for verdict in FIGURES[name].find(results).verdicts)
        assert f"plots/{name}.svg" in text
        assert "corpus of 100M tokens, which the longest arm reads 2.9 times" in text
        assert text.endswith("; last call: `python -m experiments trailing`")
    again = tmp_path / "again.svg"
    page.draw(FIGURES["position"], file, again)
    assert again.read_bytes() == (tmp_path / "position.svg").read_bytes()
    file.write_text(json.dumps({**content, "results": {"arms": results[:1]}}))
    alone = page.section(FIGURES["position"], file)
    assert "position.svg" not in alone, "one arm has nothing to be compared with"
    own = results[0] | {"recipe": {"data": {"train": [], "validation": []}}}
    file.write_text(json.dumps({**content, "results": {"arms": [own]}}))
    without_the_corpus = page.section(FIGURES["position"], file)
    assert "1 of 16 arms on a GPU, documents of their own; last call" in without_the_corpus


def test_both_runs_of_a_model_do_not_count_as_two_models() -> None:
    """Models deviate, alike in both of their runs: intervals are those of the mean difference of pairs of models."""
    results = results_of(Trailing(), dict.fromkeys(("full", "moba"), published.Law(2.0, 0.0)), 0.1)
    verdicts = FIGURES["trained-with"].find(results).verdicts
    for verdict, loss, run in zip(verdicts, ["validation"] * 2 + ["trailing"] * 2, ["moba", "full"] * 2, strict=True):
        values = {(one["name"], one["seed"]): evaluated(one, loss, run) for one in results}
        pairs = [(f"moba-{size}", f"full-{size}", seed) for size in Trailing.sizes for seed in range(3)]
        known = comparison.mean_of([values[moba, seed] - values[full, seed] for moba, full, seed in pairs])
        found = verdict.estimate
        assert (found.value, found.low, found.high) == pytest.approx((known.value, known.low, known.high))
        assert found.visible == pytest.approx(known.visible)


@pytest.mark.parametrize("figure", TRAINED, ids=lambda figure: figure.name)
def test_whatever_arms_a_call_has_finished_can_be_shown(figure: Figure) -> None:
    """Two seeds of which each lacks some arms: a call ends at any of them."""
    names = {arm.name for arm in figure.arms(0, quick=False)}
    held = [{result["name"]: result for result in page.read_results(page.result_file(one))} for one in FIGURES.values()]
    like = {result["name"]: result for result in page.read_results(page.result_file(figure))}
    if not like:  # no result yet: those of a figure whose arms have the same names
        like = next((arms for arms in held if names <= arms.keys()), {})
    if not like:  # or numbers of another figure's arm, under the names of this one's
        (some,) = (
            arm for arm in page.read_results(page.result_file(FIGURES["mechanisms"])) if arm["name"] == "moba-8k"
        )
        like = {arm.name: some | {"parent": arm.parent, "evaluations": {}} for arm in figure.arms(0, quick=False)}
    known = [result | {"name": name, "seed": seed} for name, result in like.items() for seed in (0, 1)]
    rng = np.random.default_rng(0)
    shown = [one for one in FIGURES.values() if figure.name in (one.name, one.source)]
    for count in (1, 2, 2, 2, 2, 3, 3, 3, 4, 5, len(known) // 2, len(known) - 1):
        finished = [known[index] for index in sorted(rng.choice(len(known), min(count, len(known)), replace=False))]
        for one in shown:
            page.summary_lines(one, finished)


def test_finer_blocks_and_convolutions_are_judged_from_their_arms() -> None:
    losses = {"full-32k": 2.0, "blocks-8": 2.03, "blocks-128": 2.001, "keys-512-conv-0": 2.1, "keys-128-conv-0": 2.08}
    losses |= {"keys-512-conv-3": 2.09, "keys-128-conv-3": 2.07}
    rng = np.random.default_rng(0)
    recipes = {arm.name: arm.recipe for arm in FIGURES["granularity"].arms(0, quick=False)}
    results = [
        {
            "name": name,
            "seed": seed,
            "recipe": recipes[name],
            "stages": {"train": {"validation_loss": {"eval_loss": loss + rng.normal(0, 4e-4)}}},
        }
        for seed in range(3)
        for name, loss in losses.items()
    ]
    verdicts = FIGURES["granularity"].find(results).verdicts
    assert [verdict.word for verdict in verdicts] == ["agrees"] * 4
    assert verdicts[0].claim == "8 blocks lose 0.005 or more to 128, at equal sparsity"
    assert verdicts[3].estimate.value == pytest.approx(-0.01, abs=1e-3)
    assert FIGURES["granularity"].find([]).verdicts == []


@pytest.mark.parametrize("figure", FIGURES.values(), ids=lambda figure: figure.name)
def test_the_page_says_what_the_result_files_say(figure: Figure) -> None:
    text = page.PAGE.read_text()
    _, found, rest = text.partition(page.marker(figure))
    assert found
    assert rest.startswith(f"\n\n{page.section(figure, page.result_file(figure))}\n\n<!-- end of table -->")
    readme = (page.FOLDER / "README.md").read_text()
    assert f"`{figure.name}`" in readme


def test_a_section_counts_the_arms_that_make_a_figure_complete() -> None:
    losses = {0: 0.05, 1: 0.2}  # the base of seed 1 does not pass, and 20 arms are refused
    bases = [
        {"name": "base", "seed": seed, "evaluations": {"recall": {"validation_loss": {"moba": loss, "full": 0.0}}}}
        for seed, loss in losses.items()
    ]
    assert page.progress(FIGURES["third-cliff"], bases) == "2 of 106 arms"


def test_the_summary_links_to_every_section_of_the_report() -> None:
    linked = {
        link.partition("#")[2] for link in links(ROOT / "docs" / "explanation" / "quality.md") if "REPORT.md#" in link
    }
    assert len(linked) == len(FIGURES)
    assert linked < anchors(page.PAGE)


@pytest.mark.parametrize("path", sorted(page.FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_results_and_discussion_stand_on_pages_and_not_in_programs(path: Path) -> None:
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            assert len(node.value) < 200, node.value
