"""`moba-train lm-eval`: like lm-eval's own class on the exported model; RULER offline; errors that name the task."""

import importlib.machinery
import importlib.util
import itertools
import json
import shutil
import socket
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.train_tokenizer import train_tokenizer
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import UserError
from moba_train.parallel.world import World
from moba_train.tools.cli import app
from moba_train.tools.convert.hf import export_to_hf
from moba_train.tools.inference.corpus_marks import CorpusMarks, corpus_marks
from moba_train.tools.needle.answers import Question, generated_answers
from moba_train.tools.report.chart import Shown
from moba_train.tools.report.evaluation_charts import lm_eval_charts
from moba_train.tools.report.history import read_history
from moba_train.tools.saved_recipe import open_checkpoint
from moba_train.tools.tasks.metrics import found_share
from moba_train.tools.text_tokenizer import load_tokenizer
from moba_train.train import main
from tests.commands import run_app
from tests.noting import noting
from tests.tools.questions import Reader, context, recipe

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
pytest.importorskip("wonderwords")

LENGTH = 1024
RULER = ("niah_single_1", "ruler_vt", "ruler_cwe", "ruler_fwe")
WORDS = [f"{first}{second}{third}" for first, second, third in itertools.product("bdfgkl", "aeiou", ["n", "p", "rs"])]
RECIPE: dict[str, Any] = {
    "name": "test",
    "run_dir": "runs/test",
    "model": {
        "vocab_size": 900,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "init_std": 0.3,
    },
    "attention": {"full_layers": "last:1", "moba": {"block_size": 16, "topk": 2}},
    "data": {"tokenizer": "tok.model", "train": [{"path": "corpus"}]},
    "batch_tokens": LENGTH,
    "stages": [{"name": "only", "seq_len": LENGTH, "tokens": LENGTH}],
    "telemetry": {"console": False, "report": False, "wandb": {"mode": "disabled"}},
}
TEXTS = [
    "The grass is green.",
    "One of the special magic numbers for ban-dan is: 1234567. ",
    "The sky is blue. Here we go.",
]


def ruler_text() -> str:
    """What RULER's samples consist of, so that few tokens of a small vocabulary make up a word of them."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    templates = [module.TEMPLATE for module in (cwe_utils, fwe_utils, vt_utils)]
    needle = "One of the special magic numbers for word-word is: 123. A special magic number is hidden within the text"
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    lists = " ".join(f"{number}. {word}" for number, word in enumerate(WORDS))
    return "\n".join(
        [*templates * 20, *[needle] * 20, *[noise] * 20, *[lists] * 5, "VAR A = VAR B " * 50, lists.upper()]
    )


@pytest.fixture(scope="module", autouse=True)
def few_words() -> Iterator[None]:
    """RULER's tasks with short lists of words: they sort millions of pairs when they are imported."""
    import wonderwords

    kinds = ("noun", "adjective", "verb", "nouns", "adjectives", "verbs")
    parts = itertools.cycle([WORDS[:30], WORDS[30:60], WORDS[60:]])
    words = types.SimpleNamespace(_categories=dict(zip(kinds, parts, strict=False)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", lambda: words)
        yield
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, few_words: None) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "text.txt").write_text(ruler_text())
    train_tokenizer([str(folder / "text.txt")], folder / "tok.model", 900, "text")
    marks = {"tokenizer": "tok.model", "bos_id": None, "eos_id": load_tokenizer(folder / "tok.model").eos_id}
    with IndexedDatasetWriter(folder / "corpus", np.uint16, marks) as writer:
        writer.add_document(np.arange(LENGTH + 1) % 900)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["recipe.yaml"]) == 0
    return folder / "runs" / "test"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that were to be reached; none of them is."""
    wanted: list[Any] = []

    def refuse(*address: Any, **_options: Any) -> Any:
        wanted.append(address)
        raise ConnectionError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return wanted


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of RULER and of the user's own tasks: that of all 14,000 takes 10 seconds."""
    from lm_eval.tasks import TaskManager

    from moba_train.tools.lm_eval import tasks

    ruler = Path(lm_eval.__file__).parent / "tasks" / "ruler"

    def small(include_path: Path | None, **options: Any) -> TaskManager:
        folders = [ruler, *([include_path] if include_path else [])]
        return TaskManager(include_defaults=False, include_path=folders, **options)

    monkeypatch.setattr(tasks, "TaskManager", small)


def command(run: Path, *arguments: object, code: int = 0) -> str:
    done = run_app(app, "lm-eval", run, *arguments, code=code)
    return done.output if code else done.stdout


def newest(run: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in (run / "evaluations").glob("*.json")]
    return max(found, key=lambda result: result["time"])


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, index, ("task", index, 1)) for index, given in enumerate(arguments)]


def native(run: Path, seq_len: int, folder: Path, attention: str = "full", **options: Any) -> Any:
    """The run's model behind lm-eval's interface, with full attention or its own."""
    from moba_train.evals.evaluation import variants
    from moba_train.model.build import build_attention
    from moba_train.tools.evaluate import load_on_this_machine
    from moba_train.tools.evaluated_recipe import open_to_generate
    from moba_train.tools.lm_eval.language_model import NativeLM
    from moba_train.tools.lm_eval.run import open_hf_tokenizer

    saved, roots = open_to_generate(run, None, ())
    model = load_on_this_machine(saved)
    if attention == "full":
        full = variants(saved.stage.attention, saved.stage.attention, "full")["full"]
        model.set_attention(build_attention(full, saved.config.model.head_width))
    folder.mkdir(exist_ok=True)
    marks = corpus_marks(saved, roots)
    tokenizer = open_hf_tokenizer(saved.config.data.tokenizer, marks, seq_len, folder, roots)
    return NativeLM(model, tokenizer, seq_len, **options)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.parents[1])
        export_to_hf(open_checkpoint(run), folder, torch.float32, 2**30)
    return folder


@pytest.fixture(scope="module")
def hf_class() -> Any:
    """lm-eval's class for models of transformers."""
    with pytest.MonkeyPatch.context() as patch:
        if "accelerate" not in sys.modules and importlib.util.find_spec("accelerate") is None:
            # It is for several devices; the class imports it in any case.
            names = ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size", "get_max_memory")
            for name in ("accelerate", "accelerate.utils"):
                stub: Any = types.ModuleType(name)
                stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
                vars(stub).update(dict.fromkeys(names, lambda *_, **__: lambda function: function))
                patch.setitem(sys.modules, name, stub)
        from lm_eval.models.huggingface import HFLM
    return HFLM


@pytest.fixture(scope="module")
def theirs(exported: Path, hf_class: Any) -> Any:
    """That class on the exported checkpoint, reading 48 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported)
    return hf_class(model, tokenizer=AutoTokenizer.from_pretrained(exported), max_length=48, batch_size=2, device="cpu")


def test_log_likelihoods_are_those_of_lm_evals_own_class(run: Path, theirs: Any, tmp_path: Path) -> None:
    ours = native(run, 48, tmp_path / "tok", batch_tokens=100)
    pairs = [(text, f" {text[:9]}") for text in TEXTS] + [(" ".join(TEXTS * 4), " back again"), ("", "The sun")]
    pairs += [(TEXTS[0], word) for word in (" a", " b")]
    asked = requests("loglikelihood", *pairs)
    for found, expected in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert found[1] == expected[1]
    assert ours.cut["log-likelihoods"] == 1
    asked = requests("loglikelihood_rolling", *[(text,) for text in (*TEXTS, " ".join(TEXTS * 5))])
    found, expected = ours.loglikelihood_rolling(asked), theirs.loglikelihood_rolling(asked)
    assert found == pytest.approx(expected, rel=1e-4)


def test_generated_texts_are_those_of_lm_evals_own_class(run: Path, theirs: Any, tmp_path: Path) -> None:
    ours = native(run, 48, tmp_path / "tok", batch_size=2)
    prompts = [*TEXTS, " ".join(TEXTS * 4)]
    plain = {"until": [], "max_gen_toks": 12, "do_sample": False}
    asked = requests("generate_until", *[(text, plain) for text in prompts])
    answers = ours.generate_until(asked)
    assert answers == theirs.generate_until(asked)
    assert ours.cut["task"] == 0 or len(ours.tok_encode(prompts[-1])) > 36
    middle = [answer[len(answer) // 2 :][:3] for answer in answers]
    stopped = requests("generate_until", *[(text, {**plain, "until": [middle[0], middle[2]]}) for text in prompts])
    shorter = ours.generate_until(stopped)
    assert shorter == theirs.generate_until(stopped)
    assert len(shorter[0]) < len(answers[0])


def test_an_answer_ends_before_each_stop_token(run: Path, tmp_path: Path) -> None:
    options = {"until": [], "max_gen_toks": 12}
    asked = requests("generate_until", (TEXTS[0], options))
    ours = native(run, 48, tmp_path / "tok")
    (answer,) = ours.generate_until(asked)
    stops = ours.tok_encode(answer)[-3:]
    (shorter,) = native(run, 48, tmp_path / "tok", stop_tokens=stops).generate_until(asked)
    assert len(shorter) < len(answer)
    assert answer.startswith(shorter)


def test_a_stopped_answer_takes_no_further_steps(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moba_train.tools.inference import generate

    ours = native(run, 64, tmp_path / "tok")
    options = {"until": [], "max_gen_toks": 30}
    (answer,) = ours.generate_until(requests("generate_until", (TEXTS[0], options)))
    steps: list[int] = []
    noted_step = noting(lambda *given: steps.append(len(given[2])), generate._next)
    monkeypatch.setattr(generate, "_next", noted_step)
    ours.generate_until(requests("generate_until", (TEXTS[0], {**options, "until": [answer[:5]]})))
    assert len(steps) < 15


def test_samples_depend_on_no_batch_size(run: Path, tmp_path: Path) -> None:
    options = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 0.9, "top_p": 0.9}
    asked = requests("generate_until", *[(TEXTS[0], options)] * 4)
    alone, together = (native(run, 64, tmp_path / "tok", batch_size=size).generate_until(asked) for size in (1, 4))
    assert alone == together
    assert len(set(alone)) > 1


def test_what_a_task_wants_and_we_cannot_do_is_named(run: Path, tmp_path: Path) -> None:
    ours = native(run, 48, tmp_path / "tok")
    with pytest.raises(UserError, match=r"task task: its generation_kwargs have repetition_penalty: 1.5"):
        ours.generate_until(requests("generate_until", ("a", {"until": [], "repetition_penalty": 1.5})))
    with pytest.raises(UserError, match="answers of 48 tokens leave no room for a prompt in the 48"):
        ours.generate_until(requests("generate_until", ("a", {"until": [], "max_gen_toks": 48})))
    with pytest.raises(UserError, match="more than the 48 that the model reads"):
        ours.loglikelihood(requests("loglikelihood", ("a", " b" * 60)))


@pytest.mark.slow
def test_rulers_synthetic_tasks_run_offline(run: Path, tmp_path: Path, offline: list[Any], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    shown = command(run, "--tasks", ",".join(RULER), "--limit", 1, "--attention", "both", "--decode", "own")
    assert offline == []
    found = newest(run)
    assert found["tasks"] == ["lm_eval"]
    assert set(found["numbers"]) == {f"{task}/{LENGTH}" for task in RULER}
    assert found["lm_eval"]["samples"] == dict.fromkeys(RULER, 1)
    assert [*found["lm_eval"]["scores"]] == ["moba", "full"]
    assert (found["seq_len"], found["trained_seq_len"], found["step"]) == (LENGTH, LENGTH, 1)
    assert found["options"]["limit"] == 1
    for task in RULER:
        assert any(line.split()[:2] == [task, str(LENGTH)] for line in shown.splitlines())
    assert "results: " in shown
    (chart,) = lm_eval_charts([Shown(read_history(run), 0, False, np.zeros(0, dtype=np.int64))])
    assert chart.traces[0]["x"] == ["moba", "full"]
    assert chart.traces[0]["y"] == [f"{task}, {LENGTH}" for task in RULER]


@pytest.mark.slow
def test_scores_are_our_own_on_the_same_samples(tmp_path: Path, texts: Path, alone: World) -> None:
    """A model that reads the needle where it is near enough: some answers are right, in both programs the same ones."""
    from lm_eval.evaluator import evaluate

    from moba_train.tools.lm_eval.language_model import NativeLM
    from moba_train.tools.lm_eval.run import open_hf_tokenizer
    from moba_train.tools.lm_eval.tasks import load_tasks

    config = recipe(texts, LENGTH, {})
    marks = CorpusMarks.from_sidecar(IndexedDataset(texts / "corpus").info or {})
    tokenizer = open_hf_tokenizer(config.data.tokenizer, marks, LENGTH, tmp_path, [texts])
    reader = Reader(config, sight=500)
    context(config, reader).restore_attention()
    lm = NativeLM(reader, tokenizer, LENGTH, batch_size=1)
    loaded = load_tasks(["niah_single_1"], None, tokenizer, [LENGTH])
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    answered = evaluate(lm, loaded, limit=6, log_samples=True)
    samples = answered["samples"]["niah_single_1"]
    prompts = [sample["arguments"][0][0] for sample in samples]
    asked = [Question(tokens, len(tokens), [], []) for tokens in map(lm.tok_encode, prompts)]
    own = load_tokenizer(texts / "tok.model")
    answers = generated_answers(context(config, reader), asked, 128, own, "niah")
    scores = [
        found_share(own.decode(answer), sample["doc"]["outputs"])
        for answer, sample in zip(answers, samples, strict=True)
    ]
    assert scores == [sample[str(LENGTH)] for sample in samples]
    assert 0 < sum(scores) < len(scores)
    assert sum(scores) / len(scores) == answered["results"]["niah_single_1"][f"{LENGTH},none"]


def own_task(folder: Path, **keys: Any) -> None:
    """A task with four answers to choose from, whose samples are a file."""
    rows = [
        {"question": f"The {word} is", "answers": [" green.", " blue.", " yellow.", " back."]} for word in WORDS[:6]
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "task": "colours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{answers}}",
        "doc_to_target": 1,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "colours.yaml").write_text(yaml.safe_dump(values | keys))


def test_a_task_of_ones_own_is_scored_by_log_likelihood(
    run: Path, tmp_path: Path, offline: list[Any], monkeypatch: pytest.MonkeyPatch, theirs: Any
) -> None:
    from lm_eval.evaluator import evaluate

    from moba_train.tools.lm_eval.tasks import load_tasks

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    own_task(tmp_path)
    shown = command(
        run, "--tasks", "col*", "--include-path", tmp_path, "--attention", "full", "--output", tmp_path / "out"
    )
    found = newest(run)
    loaded = load_tasks(["colours"], tmp_path, theirs.tokenizer, [LENGTH])
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    expected = evaluate(theirs, loaded)["results"]["colours"]["acc,none"]
    assert found["numbers"] == {"colours/acc": pytest.approx(expected)}
    assert found["attentions"] == {"full": {"full": 2}}
    assert "colours" in shown
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == found
    command(run, "--tasks", "col*", "--include-path", tmp_path, "--attention", "both", "--answer", "full")
    modes = newest(run)["lm_eval"]["scores"]
    assert list(modes) == ["moba", "moba, answers with full", "full"]
    assert modes["full"]["colours"]["acc"] == pytest.approx(expected)


def test_an_export_with_code_scores_and_writes_as_its_checkpoint(
    run: Path, tmp_path: Path, offline: list[Any], monkeypatch: pytest.MonkeyPatch, hf_class: Any
) -> None:
    """Read by moba_train and, in lm-eval's own class, by the code that the export has."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(run.parents[1])
    block = {"block_size": 16, "topk": 2}
    layers = {0: {"kind": "moba", "key_conv": 3, **block}, 1: {"kind": "msa", **block}}
    recipe = RECIPE | {"run_dir": "runs/learnt", "attention": {"default": "moba", "overrides": layers}}
    Path("learnt.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["learnt.yaml"]) == 0
    learnt = Path("runs/learnt").absolute()
    folder = tmp_path / "hf"
    export_to_hf(open_checkpoint(learnt), folder, torch.float32, 2**30, with_code=True)
    own_task(tmp_path)
    scores = []
    texts = []
    for place in (learnt, folder):
        command(place, "--tasks", "col*", "--include-path", tmp_path, "--output", tmp_path / place.name)
        scores.append(json.loads((tmp_path / place.name / "evaluation.json").read_text())["numbers"])
        options = ["--prompt", TEXTS[1], "--max-new-tokens", "12", "--temperature", "0"]
        done = run_app(app, "generate", place, *options)
        texts.append(done.stdout)
    assert scores[0] == scores[1]
    assert texts[0] == texts[1]
    assert len(texts[0]) > len(TEXTS[1]) + 1
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = hf_class(model, tokenizer=tokenizer, batch_size=2, device="cpu")
    assert theirs.max_length == LENGTH
    asked = requests("loglikelihood", *[(" ".join(TEXTS * 4), f" {text[:9]}") for text in TEXTS])
    ours = native(learnt, LENGTH, tmp_path / "tok", attention="own")
    for found, expected in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-4)


def test_a_hugging_face_folder_names_no_code_and_its_chat_template_is_applied(
    exported: Path, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moba_train.tools.lm_eval import language_model
    from moba_train.tools.lm_eval import run as tokenizer

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(exported, tmp_path / "hf")
    own = json.loads((folder / "tokenizer_config.json").read_text())
    template = (
        "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    own |= {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    opened: list[dict[str, Any]] = []
    scored: list[Any] = []
    stops: list[Any] = []
    open_ours, ours = tokenizer.open_hf_tokenizer, language_model.NativeLM
    loglikelihood = ours.loglikelihood
    run_module = importlib.import_module("moba_train.tools.lm_eval.run")

    def noted(path: str, marks: Any, seq_len: int, written: Path, roots: Any) -> Any:
        found = open_ours(path, marks, seq_len, written, roots)
        opened.append(json.loads((written / "tokenizer_config.json").read_text()))
        return found

    monkeypatch.setattr(run_module, "open_hf_tokenizer", noted)
    monkeypatch.setattr(ours, "loglikelihood", noting(lambda _, asked: scored.extend(asked), loglikelihood))
    monkeypatch.setattr(
        run_module,
        "NativeLM",
        noting(lambda *_, **options: stops.append(options["stop_tokens"]), ours),
    )
    own_task(tmp_path)
    common = ("--tasks", "colours", "--include-path", tmp_path, "--limit", 1, "--attention", "full")
    assert "not written into a Hugging Face folder" in command(folder, *common, "--apply-chat-template")
    assert "auto_map" not in opened[0]
    assert opened[0]["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert scored[0].args == ("[The ban is]>", " green.")
    assert stops == [[2, 7]]


def test_every_problem_names_its_option_or_task(
    run: Path, tmp_path: Path, offline: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert "tag 'niah_singel_1' (did you mean 'niah_single_1'?)" in command(run, "--tasks", "niah_singel_1", code=2)
    short = command(run, "--tasks", "ruler_vt", "--lengths", "4K", code=2)
    assert "--lengths: given 4096; allowed: 1024 to 1024" in short
    too_short = command(run, "--tasks", "ruler_vt", "--lengths", "512", "--seq-len", "512", code=2)
    assert "RULER's samples have at least 1024 tokens, and the model reads 512; allowed: with --seq-len" in too_short
    assert "--include-path nowhere: is not a folder" in command(
        run, "--tasks", "a", "--include-path", "nowhere", code=2
    )
    assert "--apply-chat-template: the tokenizer has none" in command(
        run, "--tasks", "ruler_vt", "--apply-chat-template", code=2
    )
    own_task(tmp_path, dataset_path="nobody/colours", dataset_kwargs={})
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)  # between attempts to reach it
    away = command(run, "--tasks", "colours", "--include-path", tmp_path, code=2)
    assert "task colours needs data from the network that is not on this machine" in away
    assert offline
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    missing = command(run, "--tasks", "ruler_vt", code=2)
    assert "needs the package lm-eval (" in missing
    assert "run `pip install 'lm-eval[ruler]>=0.4.13' 'transformers>=5' tokenizers`" in missing
