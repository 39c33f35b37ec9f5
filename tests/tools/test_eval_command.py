"""`moba-train eval`: other data, lengths, tasks and overrides, imported models, any folder, results that stay."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.checkpoint.manifest import FORMAT_VERSION, MANIFEST, META, hash_file, write_json
from moba_train.config.load import load_config
from moba_train.data.tokenizer import TOKENIZERS, tokenizer_hash, tokenizer_hashes
from moba_train.errors import ConfigError, DataError
from moba_train.foreign_files import ROOTS
from moba_train.mechanisms.probes.gate_probe import GateProbe, GateProbeConfig
from moba_train.tools.cli import app
from moba_train.tools.convert.hf import export_to_hf, import_from_hf
from moba_train.tools.evaluated_recipe import check_tokenizer, evaluated_setting
from moba_train.tools.saved_recipe import Training, open_checkpoint, saved_training
from moba_train.train import main
from tests.commands import run_app
from tests.evals.setting import stage_setting
from tests.resolved import check
from tests.run import test_pipeline_training, test_tensor_training
from tests.run.test_pipeline_training import pipeline
from tests.run.test_tensor_training import shared
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks, run_command

__all__ = ["pipeline", "shared"]

RECIPE = """
name: test
run_dir: runs/test
model: {vocab_size: 64, hidden_size: 32, intermediate_size: 48, layers: 2, heads: 2, kv_heads: 1}
attention: {full_layers: "last:1", moba: {block_size: 8, topk: 2}}
data: {train: [{path: corpus}], validation: [{path: corpus}]}
batch_tokens: 64
stages:
  - {name: short, seq_len: 16, tokens: 64, attention: {default: full}}
  - {name: long, seq_len: 32, tokens: 128}
evaluation: {every: 2, sequences: 3}
telemetry: {console: false, report: false, wandb: {mode: disabled}}
"""


def write_corpus(prefix: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(20):
            writer.add_document(rng.integers(64, size=70))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps, all of whose paths are relative to it."""
    folder = tmp_path_factory.mktemp("project")
    write_corpus(folder / "corpus", 0)
    write_corpus(folder / "other", 1)
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["recipe.yaml"]) == 0
    return folder


@pytest.fixture
def run(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder, seen from another folder, from which nothing else may be read."""
    monkeypatch.delenv(ROOTS, raising=False)
    monkeypatch.chdir(tmp_path)
    return project / "runs" / "test"


def evaluate(*arguments: object, code: int = 0) -> str:
    return run_app(app, "eval", *arguments, code=code).output


def results(run: Path) -> dict[str, dict[str, Any]]:
    """The files of results, by name."""
    return {path.name: json.loads(path.read_text()) for path in (run / "evaluations").glob("*.json")}


def newest(run: Path) -> dict[str, Any]:
    return max(results(run).values(), key=lambda result: result["time"])


def test_a_run_is_evaluated_from_any_folder_and_no_result_is_overwritten(run: Path) -> None:
    evaluate(run)
    before = results(run)
    assert "results: " in evaluate(run)
    after = results(run)
    assert len(after) == len(before) + 1
    assert all(after[name] == result for name, result in before.items())
    found = newest(run)
    assert (found["step"], found["tokens"], found["stage"], found["seq_len"]) == (3, 192, "long", 32)
    assert found["attentions"] == {"moba": {"moba": 1, "full": 1}, "full": {"full": 2}}
    assert found["tasks"] == ["validation_loss"]
    assert found["numbers"] == {"eval_loss": found["validation_loss"]["moba"]}


def test_tasks_that_the_recipe_lacks_run_alone_with_overrides_of_their_sections(run: Path) -> None:
    evaluate(run, "--tasks", "position_wise", "evaluation.position_wise.sequences=3")
    found = newest(run)
    assert found["tasks"] == ["position_wise"]
    assert (found["position_wise"]["bucket"], found["position_wise"]["sequences"]) == (8, 3)
    assert found["options"]["overrides"] == ["evaluation.position_wise.sequences=3"]
    evaluate(run, "evaluation.position_wise.sequences=4")
    assert newest(run)["tasks"] == ["validation_loss", "position_wise"]
    assert newest(run)["position_wise"]["sequences"] == 4


def test_an_evaluation_that_fails_takes_no_numbers_of_those_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DataError("no sample fits")

    monkeypatch.setattr(GateProbe, "run", fail)
    before = len(results(run))
    text = evaluate(run, "--tasks", "validation_loss,gate_probe", code=2)
    assert "results: " in text
    assert "no sample fits" in text
    assert len(results(run)) == before + 1
    assert newest(run)["tasks"] == ["validation_loss"]
    evaluate(run, "--tasks", "gate_probe", code=2)
    assert len(results(run)) == before + 1, "no file without a number"


def test_overrides_change_the_attention_on_the_same_weights(run: Path) -> None:
    evaluate(run)
    before = newest(run)["validation_loss"]
    evaluate(run, "attention.moba.topk=4")  # all four blocks: MoBA is full attention
    after = newest(run)["validation_loss"]
    assert before["moba"] != pytest.approx(before["full"], abs=1e-9)
    assert after["moba"] == pytest.approx(after["full"], abs=1e-6)
    assert after["full"] == before["full"]


def test_own_attention_of_a_model_with_full_layers_is_full(run: Path) -> None:
    """As of every plain Hugging Face model, with the default of `lm-eval`."""
    evaluate(run, "--attention", "own", "attention.default=full")
    assert newest(run)["attentions"] == {"full": {"full": 2}}


def test_an_attention_without_training_is_evaluated_and_never_trained(run: Path, project: Path) -> None:
    """infllm is full attention up to its window, for a model that was trained with anything."""
    memory = ["attention.default=infllm", "attention.infllm.block_size=4", "attention.infllm.topk=1"]
    found = {}
    for window in (32, 8):
        evaluate(run, *memory, f"attention.infllm.window={window}")
        found[window] = newest(run)["validation_loss"]
    assert newest(run)["attentions"] == {"infllm": {"infllm": 1, "full": 1}, "full": {"full": 2}}
    assert found[32]["infllm"] == pytest.approx(found[32]["full"], abs=1e-6)
    assert found[8]["infllm"] != pytest.approx(found[8]["full"], abs=1e-9)
    with pytest.raises(ConfigError, match="has no gradient and cannot be trained with; train with another kind"):
        check(load_config(project / "recipe.yaml", memory))


def test_what_only_training_needs_is_no_problem(run: Path) -> None:
    training = (
        "optim.schedule.warmup_tokens=160",  # of 192; the last stage has 128
        "checkpoint={every: 2, keep_best: 1}",
        "stages.0.evaluate=false",
    )
    assert "validation loss" in evaluate(run, *training)


def test_another_corpus_and_length_warn_beyond_what_was_trained(
    run: Path, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate(run, "--data", project / "other", "--seq-len", "64")
    found = newest(run)
    assert (found["seq_len"], found["trained_seq_len"]) == (64, 32)
    assert found["validation"] == [{"path": str(project / "other")}]
    assert "64 tokens are longer than the 32 tokens that the model was trained with" in caplog.text


def test_weights_have_been_through_the_stages_up_to_theirs_as_long_as_these_were(tmp_path: Path) -> None:
    """The first stage has ended after four steps, and the third, of the longest sequences, has not begun."""
    recipe = """
name: test
run_dir: unused
model: {vocab_size: 64, hidden_size: 32, intermediate_size: 48, layers: 2, heads: 2, kv_heads: 1}
data: {train: [{path: unused}]}
batch_tokens: 128
stages:
  - {name: long, seq_len: 64, tokens: 384, until: {metric: eval_loss, at_most: 1, max_tokens: 1152}}
  - {name: short, seq_len: 32, tokens: 2048, batch_tokens: 256}
  - {name: longest, seq_len: 128, tokens: 2048}
"""
    write_json(tmp_path / META, {"config": recipe, "progress": {"step": 5, "stage": 1, "exited_steps": {"long": 4}}})
    write_json(tmp_path / MANIFEST, {"format_version": FORMAT_VERSION, "files": {META: hash_file(tmp_path / META)}})
    assert saved_training(tmp_path) == Training(step=5, tokens=4 * 128 + 256, seq_len=64)


def test_every_problem_names_its_option(run: Path, project: Path, tmp_path: Path) -> None:
    unknown = evaluate(run, "--tasks", "position_wies", code=2)
    assert "no evaluation 'position_wies' (did you mean 'position_wise'?); allowed: validation_loss," in unknown
    assert "did you mean 'sequences'" in evaluate(run, "evaluation.sequencse=3", code=2)
    assert "nope.idx" in evaluate(run, "--data", "nope", code=2)
    bucket = evaluate(run, "--seq-len", "48", "evaluation.position_wise.bucket=32", code=2)
    assert "bucket: given 32, which does not divide stages[1].seq_len 48; nearest: 24" in bucket
    foreign = tmp_path / "foreign"
    write_corpus(foreign, 2)
    evaluate(run, "--data", foreign)
    with IndexedDatasetWriter(foreign, np.uint16, {"tokenizer": "tok", "tokenizer_sha256": "0" * 64}) as writer:
        writer.add_document(np.arange(40))
    (project / "tok.model").write_text("a tokenizer")
    refused = evaluate(run, "--data", foreign, f"data.tokenizer={project / 'tok.model'}", code=2)
    assert "was made with the tokenizer tok (SHA-256 000000000000" in refused


def test_sequences_over_more_ranks_than_there_are_are_refused(run: Path) -> None:
    refused = evaluate(run, "--cp", "2", code=2)
    assert "--cp: given 2, which does not divide the 1 ranks of --gpus; allowed: 1, or more --gpus" in refused


def test_a_corpus_that_the_recipe_names_and_is_nowhere_is_named_with_all_places(
    run: Path, project: Path, tmp_path: Path
) -> None:
    files = [project / f"corpus.{end}" for end in ("bin", "idx")]
    try:
        for file in files:
            file.rename(tmp_path / file.name.replace("corpus", "away"))
        message = evaluate(run, code=2)
        assert "data.validation[0].path: given 'corpus', which was not found; looked for corpus.idx" in message
        assert f"{project / 'corpus.idx'}; {run / 'corpus.idx'}; give --data CORPUS" in message
        evaluate(run, "--data", tmp_path / "away")
    finally:
        for file in files:
            (tmp_path / file.name.replace("corpus", "away")).rename(file)


def test_output_keeps_the_result_before(run: Path, tmp_path: Path) -> None:
    evaluate(run, "--output", tmp_path / "out")
    evaluate(run, "--output", tmp_path / "out", "--seq-len", "16")
    lengths = {path.name: json.loads(path.read_text())["seq_len"] for path in (tmp_path / "out").glob("*.json")}
    assert lengths == {"evaluation.json": 16, "evaluation-1.json": 32}


def test_imported_models_and_hugging_face_folders_give_the_run_s_loss(run: Path, project: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROOTS, "/")
        export_to_hf(open_checkpoint(run), tmp_path / "hf", torch.float32, shard_bytes=1 << 30)
    import_from_hf(tmp_path / "hf", tmp_path / "imported")
    evaluate(run, "evaluation.sequences=5")
    wanted = newest(run)["validation_loss"]
    options = ("--data", project / "corpus", "evaluation.sequences=5")
    evaluate(tmp_path / "imported", *options)
    imported = newest(tmp_path / "imported")
    assert (imported["step"], imported["tokens"], imported["trained_seq_len"]) == (0, None, 32)
    found = imported["validation_loss"]
    assert found.keys() == wanted.keys() == {"moba", "full", "by_sequence"}
    for name in ("moba", "full"):
        assert found[name] == pytest.approx(wanted[name], abs=1e-6)
        assert found["by_sequence"][name] == pytest.approx(wanted["by_sequence"][name], abs=2e-5)  # rounded to 1e-5
    evaluate(tmp_path / "hf", *options, "--output", tmp_path / "out")
    direct = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert direct["validation_loss"] == imported["validation_loss"]
    assert not (tmp_path / "hf" / "evaluations").exists()
    assert "give --data or --tasks" in evaluate(tmp_path / "imported", code=2)


def test_a_corpus_is_of_either_form_of_an_export_s_tokenizer(project: Path, tmp_path: Path) -> None:
    """An export of a run with a sentencepiece model has that, and the same tokenizer as tokenizer.json."""
    for name in TOKENIZERS:
        (tmp_path / name).write_text(name)
    changes = [f"data.tokenizer={tmp_path / 'tokenizer.json'}", f"data.validation=[{{path: {tmp_path / 'one'}}}]"]
    config = load_config(project / "recipe.yaml", changes)
    for trained in ([], tokenizer_hashes(tmp_path)):
        for made_with in (*TOKENIZERS, "recipe.yaml"):
            (tmp_path / "recipe.yaml").touch()
            info = {"tokenizer": made_with, "tokenizer_sha256": tokenizer_hash(tmp_path / made_with)}
            with IndexedDatasetWriter(tmp_path / "one", np.uint16, info) as writer:
                writer.add_document([1, 2, 3])
            if made_with in TOKENIZERS:
                check_tokenizer(config.data, trained)
            else:
                with pytest.raises(DataError, match=r"was made with the tokenizer recipe.yaml"):
                    check_tokenizer(config.data, trained)


def test_a_model_that_was_trained_with_tensor_parallelism_is_probed_by_head(project: Path) -> None:
    """`eval` uses no tensor parallelism, which keeps training from it."""
    config = load_config(project / "recipe.yaml", ["parallel.tp=2"])
    by_head = GateProbeConfig(by_head=True)
    assert list(GateProbe.problems(by_head, evaluated_setting(config, 1))) == []
    (trained,) = GateProbe.problems(by_head, stage_setting(config))
    assert trained.startswith("evaluation.gate_probe.by_head: given true, which parallel.tp 2 cannot do")


def test_the_checkpoint_of_a_pipeline_is_evaluated_on_one_rank(pipeline: Run, ranks: Ranks, tmp_path: Path) -> None:
    ranks.work(run_command, ("eval", str(pipeline.run_dir), "--output", str(tmp_path)), 1)
    found, want = json.loads((tmp_path / "evaluation.json").read_text()), test_pipeline_training.curves(pipeline)
    assert found["validation_loss"]["moba"] == pytest.approx(want["eval_loss"][-1], rel=1e-4)


def test_the_checkpoint_of_ranks_that_share_layers_is_evaluated_on_ranks_that_share_sequences(
    shared: Run, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.work(run_command, ("eval", str(shared.run_dir), "--output", str(tmp_path), "--cp", "2"), 2)
    found, want = json.loads((tmp_path / "evaluation.json").read_text()), test_tensor_training.curves(shared)
    assert found["validation_loss"]["moba"] == pytest.approx(want["eval_loss"][-1], rel=1e-4)
    for name, curve in found["position_wise"]["curves"].items():
        assert curve["mean"] == pytest.approx(want[f"by position, stage 1, {name}"], rel=1e-4)
