"""`moba-train generate`: prompts from files and stdin, progress while they are read, any folder."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.load import load_config
from moba_train.foreign_files import ROOTS
from moba_train.model.build import build_attention, build_model, initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.tools.cli import app
from moba_train.tools.generate import generate_text
from moba_train.tools.inference.corpus_marks import CorpusMarks
from moba_train.tools.text_tokenizer import load_text_tokenizer, load_tokenizer
from moba_train.train import main
from tests.commands import run_app
from tests.guide import ROOT, blocks
from tests.noting import noting
from tests.resolved import spec_of, stages_of

RECIPE = """
name: test
run_dir: runs/test
model: {vocab_size: 320, hidden_size: 32, intermediate_size: 48, layers: 2, heads: 2, kv_heads: 1}
attention: {full_layers: "last:1", moba: {block_size: 8, topk: 2}}
data: {tokenizer: data/tok.model, train: [{path: corpus}]}
batch_tokens: 64
stages: [{name: only, seq_len: 64, tokens: 64}]
telemetry: {console: false, report: false, wandb: {mode: disabled}}
"""
TEXT = "The quick brown fox jumps over the lazy dog, and naïve café owners watch – 你好 – at 10 o'clock.\n"


def make_tokenizer(path: Path, vocab_size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    source = path.with_suffix(".txt")
    source.write_text(TEXT * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(source),
        model_prefix=str(path.with_suffix("")),
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )


def make_tokenizer_json(folder: Path) -> Path:
    """A tokenizer.json with a token for each letter and byte, and the normalizer and decoder of Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one step, all of whose paths are relative to it."""
    folder = tmp_path_factory.mktemp("project")
    make_tokenizer(folder / "data" / "tok.model", 320)
    with IndexedDatasetWriter(folder / "corpus", np.uint16) as writer:
        writer.add_document(np.arange(300))
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


def generated(run: Path, *arguments: object, code: int = 0, stdin: str | bytes = "") -> tuple[str, str]:
    """(stdout, stderr) of the command, eight tokens long."""
    done = run_app(app, "generate", run, "--max-new-tokens", "8", *arguments, code=code, input=stdin)
    return done.stdout, done.stderr


def test_a_prompt_is_read_from_a_file_and_stdin_exactly(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    shown, _ = generated(run, "--prompt", TEXT)
    assert shown.startswith(TEXT)
    answer = shown.removeprefix(TEXT)
    assert answer.strip()
    assert generated(run, "--prompt-file", "prompt.txt")[0] == answer
    assert generated(run, "--prompt-file", "-", stdin=TEXT)[0] == answer
    assert generated(run, "--prompt-file", "-", stdin=TEXT.rstrip("\n"))[0] != answer


def test_a_prompt_that_cannot_be_used_is_named(run: Path, tmp_path: Path) -> None:
    assert "no.txt: cannot be read: No such file" in generated(run, "--prompt-file", "no.txt", code=2)[1]
    assert "not UTF-8 text, at byte 2" in generated(run, "--prompt-file", "-", stdin=b"ab\xff", code=2)[1]
    assert "is empty" in generated(run, "--prompt-file", "-", code=2)[1]
    for arguments in ((), ("--prompt", "x", "--prompt-file", "-")):
        assert "either --prompt TEXT or --prompt-file" in generated(run, *arguments, code=2)[1]
    assert "--prompt: given an empty text" in generated(run, "--prompt", "", code=2)[1]
    assert (
        "--prompt: not UTF-8 text, at character 0" in generated(run, "--prompt", "\udcff", code=2)[1]
    )  # a byte ff in a shell
    shown, message = generated(run, "--prompt", "x", "--top-p", "2", code=2)
    assert "--top-p: given 2" in message
    assert not shown
    make_tokenizer(tmp_path / "large.model", 360)
    shown, message = generated(run, "--prompt", TEXT, "--tokenizer", "large.model", code=2)
    assert "model.vocab_size is 320" in message
    assert not shown


def test_overrides_change_the_attention_of_the_prompt_and_of_new_tokens(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infllm = ("attention.default=infllm", "attention.infllm.block_size=4", "attention.infllm.topk=1")
    asked = ("--prompt", TEXT, "--temperature", "0", "--decode", "own")
    full, _ = generated(run, "attention.default=full", *asked)
    assert generated(run, *infllm, "attention.infllm.window=200", *asked)[0] == full
    message = generated(run, *infllm, "attention.infllm.representatives=9", *asked, code=2)[1]
    assert "representatives: given 9; allowed: at most block_size 4" in message
    models: list[Transformer] = []
    monkeypatch.setattr(
        "moba_train.tools.generate.generate_text",
        noting(lambda model, *_, **__: models.append(model), lambda *_, **__: iter(())),
    )
    generated(run, *infllm, *asked)
    assert [kind.name for kind in models[0].attention_kinds()] == ["infllm", "full"]


def test_reading_a_long_prompt_says_how_far_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reading" not in generated(run, "--prompt-file", "-", stdin=TEXT)[1]
    monkeypatch.setattr("moba_train.tools.generate.REPORT_EVERY", 0.0)
    monkeypatch.setattr("moba_train.tools.inference.generate.PREFILL_TOKENS", 700)
    warning, *lines = generated(run, "--prompt-file", "-", stdin=TEXT * 20)[1].splitlines()
    assert warning.startswith("warning: ")
    assert len(lines) > 1
    assert "700 of 1," in lines[0]
    assert "(100%)" in lines[-1]
    assert lines[-1].endswith(" tokens/s")


def test_a_text_beyond_the_trained_length_is_warned_of(run: Path, project: Path) -> None:
    """Also where an override gives the stage another length: the weights have not seen it."""
    prompt = TEXT[:50]
    tokens = len(load_tokenizer(project / "data" / "tok.model").encode(prompt))
    longest = 64 - tokens
    asked = ("--prompt", prompt, "--max-new-tokens")
    assert generated(run, *asked, longest)[1] == ""
    for override in ((), ("stages.0.seq_len=128", "batch_tokens=128")):
        (warning,) = generated(run, *override, *asked, longest + 1)[1].splitlines()
        assert warning.startswith(
            f"warning: the prompt has {tokens} tokens and the answer up to {longest + 1}, together "
        )
        assert "more than the 64 tokens that the model was trained with" in warning


def test_the_tokenizer_is_found_where_the_run_was_made_beside_it_or_as_given(
    run: Path, project: Path, tmp_path: Path
) -> None:
    wanted = generated(run, "--prompt", TEXT)[0]
    (tmp_path / "data").mkdir()
    make_tokenizer(tmp_path / "data" / "tok.model", 300)  # of that name, and another one
    assert generated(run, "--prompt", TEXT)[0] == wanted
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    message = generated(moved, "--prompt", TEXT, code=2)[1]
    assert "data.tokenizer 'data/tok.model', was not found; looked for data/tok.model (another one than" in message
    assert f"{moved / 'data/tok.model'}; {moved / 'tok.model'}; give --tokenizer FILE" in message
    assert generated(moved, "--prompt", TEXT, "--tokenizer", project / "data" / "tok.model")[0] == wanted
    shutil.copy(project / "data" / "tok.model", moved)
    assert generated(moved, "--prompt", TEXT)[0] == wanted


@pytest.mark.parametrize("context", [4, 32])
@pytest.mark.parametrize("kind", ["sentencepiece", "json"])
def test_text_is_that_of_all_tokens_decoded_together(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, context: int
) -> None:
    """Also of characters of several tokens, spaces that a token loses where it comes first, and an end within a
    character. A tokenizer.json with byte fallback decodes a run of bytes as a whole, or none of its characters."""
    path = project / "data" / "tok.model" if kind == "sentencepiece" else make_tokenizer_json(tmp_path)
    tokenizer = load_text_tokenizer(path)
    answer = tokenizer.encode(" – 你好 fox, 😀 the naïve 漢字 dog, สวัสดีครับนี่คือข้อความ" * 3 + " dog 😀")[:-1]
    monkeypatch.setattr("moba_train.tools.generate.generate", lambda *_, **__: iter(answer))
    monkeypatch.setattr("moba_train.tools.generate.CONTEXT", context)
    model = Transformer(load_config(project / "recipe.yaml").model)
    for prompt in ("Once", TEXT, "你好"):
        options = {"temperature": 0.0, "top_p": 1.0, "seed": 0, "decode": "full"}
        found = "".join(generate_text(model, tokenizer, prompt, 1000, **options))  # type: ignore[arg-type]  # a dict
        tokens = tokenizer.encode(prompt)
        assert found == tokenizer.decode(tokens + answer)[len(tokenizer.decode(tokens)) :]


def test_only_tokens_of_the_tokenizer_are_drawn(project: Path) -> None:
    """A vocabulary that is padded beyond the tokenizer's has ids without a text."""
    tokenizer = load_tokenizer(project / "data" / "tok.model")
    config = load_config(project / "recipe.yaml", ["model.vocab_size=3200"])
    model = build_model(spec_of(config))
    initialize_weights(model, seed=0)
    model.set_attention(build_attention(stages_of(config)[0].attention, config.model.head_width))
    assert "".join(generate_text(model, tokenizer, "Once", 20, temperature=9.0, top_p=1.0, seed=0, decode="full"))


def test_a_prompt_begins_as_the_documents_of_training_did(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token of `--bos`, once; sentencepiece makes none from text."""
    tokenizer = load_tokenizer(project / "data" / "tok.model")
    read: list[list[int]] = []
    says_nothing = noting(lambda _, tokens, *__, **___: read.append(tokens), lambda *_, **__: [])
    monkeypatch.setattr("moba_train.tools.generate.generate", says_nothing)
    model = Transformer(load_config(project / "recipe.yaml").model)
    options = {"temperature": 0.0, "top_p": 1.0, "seed": 0, "decode": "full"}
    assert not [*generate_text(model, tokenizer, "Once", 10, marks=CorpusMarks(bos_id=1), **options)]  # type: ignore[arg-type]  # a dict
    assert read == [[1, *tokenizer.encode("Once")]]
    assert CorpusMarks(bos_id=1).begin(read[0]) == read[0]


@pytest.mark.parametrize(
    ("sidecar", "template", "spelt_out"),
    [
        ({"loss_mask": True}, False, True),
        ({"tokenizer": "tok.model", "eos_id": 2}, True, False),
        (None, True, True),
        (None, False, False),
    ],
    ids=["conversations", "text, and a template", "a template", "neither"],
)
def test_special_tokens_of_a_prompt_are_those_of_training(
    run: Path,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sidecar: dict[str, Any] | None,
    template: bool,
    spelt_out: bool,
) -> None:
    """In a prompt and an answer: text of pretraining has none, conversations have those that a chat template writes."""
    read: list[list[int]] = []

    def echo(_: Any, tokens: list[int], *__: Any, **___: Any) -> Iterator[int]:
        read.append(tokens)
        return iter([1, tokens[-1]])

    monkeypatch.setattr("moba_train.tools.generate.generate", echo)
    tokenizer = load_tokenizer(shutil.copy(project / "data" / "tok.model", tmp_path))
    if template:
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    if sidecar:
        (project / "corpus.json").write_text(json.dumps(sidecar))
    shown = generated(run, "--prompt", "</s>quick", "--tokenizer", tmp_path / "tok.model")[0]
    (project / "corpus.json").unlink(missing_ok=True)
    assert read == [[2, *tokenizer.encode("quick")] if spelt_out else tokenizer.encode("</s>quick")]
    assert ("<s>" in shown.removeprefix("</s>quick")) is spelt_out


def test_an_answer_ends_with_a_document_or_a_turn_by_tokenizer_generation_config_or_corpora(
    run: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[set[int]] = []
    monkeypatch.setattr("moba_train.tools.generate.generate", lambda *_, **given: stops.append(given["stop_tokens"]))
    monkeypatch.setattr("moba_train.tools.generate._added_text", lambda *_: [])
    asked = ("--prompt", "once", "--tokenizer", make_tokenizer_json(tmp_path))
    generated(run, *asked)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "a"}}')
    generated(run, *asked)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<unk>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    sidecar = project / "corpus.json"
    sidecar.write_text('{"eos_id": 8, "end_of_turn_id": 9}')
    generated(run, *asked)
    sidecar.unlink()
    assert stops == [set(), {258}, {0, 5, 7, 8, 9}]


def test_the_example_in_python_runs_and_agrees_with_the_command(run: Path) -> None:
    (example,) = blocks(ROOT / "docs" / "how-to" / "evaluate.md", "python")
    found: dict[str, Any] = {}
    exec(example.replace("runs/quickstart", str(run)).replace('import "', 'The quick"').replace(", 20,", ", 8,"), found)
    assert found["logits"].shape == (len(found["prompt"]), 320)
    assert found["logits"][-1].argmax() == found["answer"][0]
    text = generated(run, "--prompt", "The quick", "--temperature", "0")[0]
    assert text.strip("\n") == found["tokenizer"].decode(found["prompt"] + found["answer"]).strip("\n")
