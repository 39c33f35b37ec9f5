"""Self-distillation: the loss and gradients of its definition, on any grid of dp, cp, tp, accumulation and packing; a
run with it, resumed; what refuses it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.layout import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.load import load_config
from moba_train.config.mesh import mesh_sizes
from moba_train.config.schema import RunConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.errors import ConfigError
from moba_train.evals.evaluation import with_full
from moba_train.mechanisms import distillation
from moba_train.mechanisms.by_group import ByGroupKind
from moba_train.mechanisms.distillation import Distillation, DistillOptions
from moba_train.mechanisms.gates.msa import MsaKind
from moba_train.model import loss
from moba_train.model.block import Block
from moba_train.model.build import build_attention, build_model, initialize_weights
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.forward import accumulate_gradients
from moba_train.parallel.world import World, joined_world, sum_over_ranks
from moba_train.resolve.run import resolve_unchecked
from moba_train.run.step import StepLosses
from tests.attention.helpers import labelled
from tests.gradients import full_gradient, gradient
from tests.resolved import check, shard_of, sharded_of, stages_of
from tests.run.test_sft_grid import GRID, LOSS_AT, VOCAB, config_of, write_conversations
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "logits": {"weight": 0.7},
    "attention": {"on": "attention", "weight": 0.7},
    "gate": {},
}
"""Options of the objective; `gate`: none, but a gate learns in its warm-up, by the auxiliary loss."""
UNEVEN = [GRID[1], GRID[3], GRID[5]]
CASES: list[tuple[str, dict[str, int]]] = [
    *(("logits", case) for case in [GRID[0], *UNEVEN, {"cp": 1, "seq_len": 64, "micro": 1, "tp": 2}]),
    *(("attention", case) for case in UNEVEN),
    *(("gate", case) for case in UNEVEN),
]
"""On four ranks; the documents with loss are few, so that ranks and micro-batches have unequal numbers of loss tokens,
and some have none."""


def distilling(on: str, case: dict[str, int]) -> RunConfig:
    config = config_of(case).model_dump(mode="json")
    config["model"]["init_std"] = 0.3  # so that full and sparse attention differ
    if OPTIONS[on]:
        config["stages"][0]["distill"] = OPTIONS[on]
    else:
        config["attention"] |= {"default": "msa", "msa": {"block_size": 8, "topk": 2, "mode": "warmup"}}
    if "tp" in case:
        config["parallel"] |= {"tp": case["tp"]}
    return RunConfig.model_validate(config)


def one_step(on: str, case: dict[str, int], prefix: str, world: World, **options: Any) -> dict[str, Tensor]:
    """One step's losses and gradients, from the files on, as the trainer forms them."""
    config = distilling(on, case)
    (stage,) = stages_of(config)
    dims = ParallelDims(mesh_sizes(config.parallel.model_copy(update={"cp": case["cp"]}), world.size), world)
    model = sharded_of(config, dims)
    model.set_attention(build_attention(stage.attention, config.model.head_width))
    if stage.objective is not None:
        assert isinstance(stage.objective[1], DistillOptions)
        model.objective = Distillation(stage.objective[1].model_copy(update=options))
    own = model.attention_kinds()
    shard = shard_of(config, stage, dims)
    if shard.engine:
        model.set_engines([shard.engine] * 2)
    sources = [config.data.train[0].model_copy(update={"path": prefix})]
    data = StageData(sources, stage.seq_len, stage.batch_sequences, 0, {}, VOCAB, "best_fit", "token")
    loaded = step_batches(data, 0, stage.batch_sequences, stage.micro_batch_size, shard.dp_rank, shard.dp_size)
    batches = [shard.shard_batch(batch) for batch in loaded]
    (weight,) = sum_over_ranks([sum(batch.loss_weight_sum for batch in batches)])
    losses = StepLosses(world.device)
    if model.objective is not None:
        model.objective.begin_step(2)
    for sums in accumulate_gradients(model, batches, weight):
        losses.add(sums)
    losses.all_reduce()
    gradients = {name: full_gradient(parameter) for name, parameter in model.named_parameters()}
    measured = {} if model.objective is None else model.objective.measured()
    assert model.attention_kinds() == own
    auxiliary = {} if losses.auxiliary is None else {"auxiliary": losses.auxiliary.sum()}
    return {"loss": losses.loss, **measured, **auxiliary, **gradients}


def all_steps(prefix: str, output: str) -> None:
    """Work of one rank: all cases."""
    with joined_world(timedelta(seconds=60)) as world:
        found = [one_step(on, case, prefix, world) for on, case in CASES]
        if world.is_main:
            torch.save(found, output)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    name = str(tmp_path_factory.mktemp("distilled") / "conversations")
    write_conversations(name)
    return name


@pytest.fixture(scope="module")
def results(prefix: str, ranks: Ranks) -> list[dict[str, Tensor]]:
    ranks.work(all_steps, (prefix, f"{prefix}.pt"), 4)
    found: list[dict[str, Tensor]] = torch.load(f"{prefix}.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def expected(prefix: str) -> dict[str, dict[str, Tensor]]:
    """By definition: each conversation alone through the model, with both attentions; all logits at once."""
    return {on: by_definition(on, prefix) for on in OPTIONS}


def by_definition(on: str, prefix: str) -> dict[str, Tensor]:
    config = distilling(on, GRID[0])
    run = resolve_unchecked(config)
    model = build_model(run.setup.spec)
    initialize_weights(model, config.seed)
    full = [LayerAttention("full", FullAttention.Options())] * 2
    corpus = IndexedDataset(prefix)
    entropies = []
    others = []
    outputs: list[Tensor] = []
    first = model.blocks[0]
    assert isinstance(first, Block)
    first.attention.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    for document, places in LOSS_AT.items():
        rows = torch.tensor([place for place in places if place > 0], dtype=torch.int64)
        if not len(rows):
            continue
        tokens = torch.from_numpy(corpus.document(document).astype(np.int64))
        inputs = tokens, torch.arange(len(tokens)), packed_layout([len(tokens)])
        model.set_attention(build_attention(full, config.model.head_width))
        with torch.no_grad():
            teacher = model(*inputs)[rows - 1].softmax(-1)
        model.set_attention(build_attention(run.stages[0].attention, config.model.head_width))
        hidden, auxiliary = model.hidden(*inputs)
        logits = model.logits(hidden)[rows - 1]
        entropies.append(F.cross_entropy(logits, tokens[rows], reduction="none"))
        if on == "logits":
            others.append((teacher * (teacher.log() - logits.log_softmax(-1))).sum(-1))
        elif on == "attention":  # of the first layer, whose input is the same; the second one is full
            target, own = (one[rows - 1] for one in outputs[-2:])
            others.append((own - target).square().sum(-1) / target.square().sum(-1))
        else:
            assert auxiliary[0] is not None
            others.append(auxiliary[0][rows - 1])
    entropy = torch.cat(entropies).mean()
    other = torch.cat(others).mean()
    total = {"logits": 0.3 * entropy + 0.7 * other, "attention": entropy + 0.7 * other, "gate": entropy + other}[on]
    total.backward()
    gradients = {name: gradient(parameter) for name, parameter in model.named_parameters()}
    if on == "logits":
        told = {"loss": total, "cross_entropy": entropy, "distillation": other}
    else:
        told = {"loss": entropy, "auxiliary": 0.7 * other if on == "attention" else other}
    return {name: value.detach() for name, value in told.items()} | gradients


@pytest.mark.parametrize(
    "number",
    range(len(CASES)),
    ids=lambda n: "-".join([CASES[n][0], *(f"{key}{value}" for key, value in CASES[n][1].items())]),
)
def test_loss_and_gradients_are_those_of_the_definition(
    number: int, results: list[dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]
) -> None:
    wanted = expected[CASES[number][0]]
    assert wanted.get("distillation", wanted.get("auxiliary", torch.zeros(()))) > 1e-3
    assert results[number].keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(results[number][name], value, rtol=1e-4, atol=1e-6, msg=labelled(name))


def gradients_of(config: RunConfig, prefix: str) -> dict[str, Tensor]:
    """Gradients of the cross entropy with the recipe's attention, each conversation alone."""
    run = resolve_unchecked(config)
    model = build_model(run.setup.spec)
    initialize_weights(model, config.seed)
    model.set_attention(build_attention(run.stages[0].attention, config.model.head_width))
    corpus = IndexedDataset(prefix)
    losses = []
    for document, places in LOSS_AT.items():
        tokens = torch.from_numpy(corpus.document(document).astype(np.int64))
        rows = torch.tensor([place for place in places if place > 0], dtype=torch.int64)
        logits = model(tokens, torch.arange(len(tokens)), packed_layout([len(tokens)]))[rows - 1]
        losses.append(F.cross_entropy(logits, tokens[rows], reduction="none"))
    torch.cat(losses).mean().backward()
    return {name: gradient(parameter) for name, parameter in model.named_parameters()}


def test_a_share_of_the_steps_trains_with_full_attention(alone: World, prefix: str) -> None:
    """The gradients are those of full attention's cross entropy, and differ from the sparse ones."""
    case = {"cp": 1, "seq_len": 64, "micro": 4}
    full_step = one_step("logits", case, prefix, alone, full_every=2)
    assert "distillation" not in full_step
    config = distilling("logits", case).model_dump(mode="json")
    config["attention"] = {"default": "full"}
    plain = gradients_of(RunConfig.model_validate(config), prefix)
    sparse = one_step("logits", case, prefix, alone)
    for name, value in plain.items():
        torch.testing.assert_close(full_step[name], value, rtol=1e-4, atol=1e-6, msg=labelled(name))
    name = "blocks.0.attention.k_proj.weight"
    assert not torch.allclose(full_step[name], sparse[name], rtol=1e-2)


def test_a_gate_learns_in_a_step_with_full_attention() -> None:
    objective = Distillation(DistillOptions(full_every=2))
    options = MsaKind.Options(block_size=8, topk=2)
    parts = [{"groups": [0], "kind": "msa", "options": options}, {"groups": [1], "kind": "moba"}]
    some = ByGroupKind.Options.model_validate({"parts": parts})
    layers = [LayerAttention("msa", options), LayerAttention("by_group", some)]
    warm, warm_groups = map(objective._full_step, build_attention(layers, 4))
    assert isinstance(warm, MsaKind)
    assert warm.options.mode == "warmup"
    assert isinstance(warm_groups, ByGroupKind)
    assert warm.facts.learns
    assert [*warm_groups._kinds] == ["msa", "full"]
    assert warm_groups._kinds["msa"].options == warm.options


def test_windows_of_the_model_are_the_teachers_where_it_is_asked_for() -> None:
    window = build_attention([LayerAttention("window", KINDS["window"].Options())], 4)[0]
    assert Distillation(DistillOptions(teacher="full_and_windows"))._teacher(window) is window
    assert Distillation(DistillOptions())._teacher(window).name == "full"


@pytest.mark.parametrize("name", ["lightning", "kda"])
def test_layers_without_softmax_stay_where_others_get_full_attention(name: str) -> None:
    """In the teacher and in evaluations: full attention of their queries and keys is nothing that was trained."""
    linear = LayerAttention(name, KINDS[name].Options())
    (kind,) = build_attention([linear], 4)
    assert Distillation(DistillOptions())._teacher(kind) is kind
    moba, full = (LayerAttention(one, KINDS[one].Options()) for one in ("moba", "full"))
    assert with_full((linear, moba, full)) == {
        "+".join(sorted((name, "moba"))): (linear, moba, full),
        "full": (linear, full, full),
    }


def test_logits_exist_for_a_chunk_of_tokens_at_a_time(
    alone: World, prefix: str, expected: dict[str, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    of_chunk = Distillation.of_chunk

    def counted(self: Distillation, hidden_nD: Tensor, *rest: Tensor) -> Tensor:
        rows.append(len(hidden_nD))
        return of_chunk(self, hidden_nD, *rest)

    monkeypatch.setattr(loss, "chunk_tokens", lambda vocab_size: 2)
    monkeypatch.setattr(Distillation, "of_chunk", counted)
    found = one_step("logits", {"cp": 1, "seq_len": 64, "micro": 4}, prefix, alone)
    assert max(rows) == 2
    assert len(rows) > 3
    for name, value in expected["logits"].items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=labelled(name))


def test_experts_count_the_students_choices_alone(alone: World, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted while the teacher computes, and the micro-batch's loss tokens again afterwards."""
    counted: list[Any] = []
    monkeypatch.setattr(distillation, "count_tokens", lambda model, loss_tokens: counted.append(loss_tokens))
    one_step("logits", {"cp": 1, "seq_len": 64, "micro": 4}, prefix, alone)
    before, (_, rows, _) = counted
    assert before is None
    assert len(rows) > 3


def distilled_run(run: Run, **options: Any) -> Run:
    run.recipe["stages"][1] |= {"distill": {"weight": 0.5, "every": 2, "full_every": 3, **options}}
    run.recipe["checkpoint"] = {"every": 3, "keep_last": 10}
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """Not to be changed."""
    run = distilled_run(Run(tmp_path_factory.mktemp("distilled") / "run", corpora))
    run.folder.mkdir()
    assert run.train_here() == 0
    return run


def test_the_log_has_both_losses_of_the_steps_that_distil(finished: Run) -> None:
    records = finished.records()
    assert ["distillation" in record for record in records] == [False] * 7 + [True, False, True, False, False]
    for record in (records[7], records[9]):
        mixed = 0.5 * record["cross_entropy"] + 0.5 * record["distillation"]
        assert record["loss"] == pytest.approx(mixed, rel=1e-5)
        assert record["distillation"] > 0
    assert any("objective distill" in record["message"] for record in finished.records("stage"))


def test_it_resumes_bitwise_inside_the_stage(finished: Run, run: Run) -> None:
    """After step 9, so that the next one distils."""
    distilled_run(run).take_over(finished, 9)
    assert run.train_here() == 0
    assert run.losses() == finished.losses()
    assert_same_tensors(run.newest_checkpoint, finished.newest_checkpoint)


def test_a_recipe_says_it_back(finished: Run) -> None:
    assert load_config(finished.run_dir / "config.yaml").stages[1].given_members["distill"].model_dump() == {
        "teacher": "full",
        "on": "logits",
        "weight": 0.5,
        "every": 2,
        "full_every": 3,
    }


@pytest.mark.parametrize(
    ("on", "ranks", "problem"),
    [
        ("logits", {"pp": 2}, r"stages\[0\]\.distill: given with parallel\.pp 2; allowed: .* pp 1"),
        (
            "attention",
            {"tp": 2},
            r"stages\[0\]\.distill\.on: given 'attention' with parallel\.tp 2; allowed: with tp 1",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_name(on: str, ranks: dict[str, int], problem: str) -> None:
    config = distilling(on, GRID[0]).model_dump(mode="json")
    config["parallel"] |= ranks
    with pytest.raises(ConfigError, match=problem):
        check(RunConfig.model_validate(config))


def test_layers_that_have_no_full_attention_are_refused() -> None:
    config = distilling("logits", GRID[0]).model_dump(mode="json")
    config["attention"] |= {"overrides": {1: {"kind": "moba_v1", "block_size": 8}}}
    problem = r"stages\[0\]\.distill: given, but layers of moba_v1 have no full attention on the same weights"
    with pytest.raises(ConfigError, match=problem):
        check(RunConfig.model_validate(config))
    # A base has one, whatever learns from it.
    config["stages"][0]["distill"] = {"teacher": "base"}
    check(RunConfig.model_validate(config | {"init_from": "base", "adapters": {"lora": {}}}))
    (_, layer, *_) = stages_of(RunConfig.model_validate(config))[0].attention
    assert DistillOptions(teacher="base").teacher_of(layer).kind == "full"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [({"weight": 0}, "given 0"), ({"teacher": "frozen"}, "full"), ({"wait": 1}, "wait")],
)
def test_keys_that_are_not_are_named(run: Run, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)stages\[1\]\.distill.*{problem}"):
        load_config(distilled_run(run, **keys).write_recipe())
