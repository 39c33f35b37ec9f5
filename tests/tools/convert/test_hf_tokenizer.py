"""The tokenizer of an export: transformers loads it from the folder alone, and gives the ids of our tokenizer."""

import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from data_tools.sft import make_sft_corpus
from moba_train.data.indexed import IndexedDataset
from moba_train.tools.chat.load import load_chat_template
from moba_train.tools.chat.template import BUILT_IN
from moba_train.tools.cli import app
from moba_train.tools.convert.sentencepiece_json import convert_sentencepiece
from moba_train.tools.text_tokenizer import load_text_tokenizer, load_tokenizer
from tests.commands import run_app
from tests.tools.convert.hf_models import make_hf_model, save_as_checkpoint

ROOT = Path(__file__).parents[3]
VOCAB = 600
SEED = 0
SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
MARKS = [".", "!", "?", ":", " <", ">", " =", "'", ' "', " #", ")", " (", "-", "_", "/", " 0", "1", "23"]
TEXTS = [
    "Attention is all you need.\n\n  Two  spaces, a\ttab and  a trailing one ",
    " leading\n\n\n    indented = {'a': x ** 2, \"b\": [1, 2, 3]}  # comment\r\n",
    "Größe, naïve café, příliš žluťoučký kůň, Ελληνικά, русский, עברית, हिन्दी, 日本語、中文。한국어",
    "emoji 😀 👍🏽 👩‍👩‍👧‍👦 🇩🇪, ∑ ∞ ≠, ﬁne ½, no\u00a0break, zero\u200bwidth, e\u0301",
    "spelt out: <s> </s> <unk> <pad> <0x0A> <|end|>",
    "<s>at the start, and at the end</s>",
    "   ",
    "\n",
]
LOSSLESS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
"""Options of `moba-data train-tokenizer`. The defaults of sentencepiece change texts and put a space first."""


def training_lines() -> list[str]:
    """Made-up sentences, the same for ever: whether a unigram model can be a tokenizer.json depends on its text, as
    sentencepiece and tokenizers break ties differently."""
    rng = random.Random(SEED)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(500)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    sentences = (" ".join(rng.choices(words, weights, k=rng.randint(3, 15))) for _ in range(2000))
    return [sentence.capitalize() + rng.choice(MARKS) for sentence in sentences]


def train_sentencepiece(path: Path, **options: Any) -> Path:
    """A small sentencepiece model with byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_lines()),
        model_writer=model,
        vocab_size=VOCAB,
        minloglevel=2,
        **{"byte_fallback": True, "pad_id": 3} | options,
    )
    path.write_bytes(model.getvalue())
    return path


def train_json(folder: Path) -> Path:
    """A tokenizer.json of byte-level BPE with special tokens, without a tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(training_lines(), trainer)
    tokenizer.save(str(folder / "my-tokenizer.json"))
    return folder / "my-tokenizer.json"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers by name, each alone in a folder."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in ("bpe", "unigram", "default", "json", "symbols"):
        (folder / name).mkdir()
    return {
        "bpe": train_sentencepiece(folder / "bpe/tok.model", model_type="bpe", **LOSSLESS),
        "unigram": train_sentencepiece(folder / "unigram/tok.model", model_type="unigram", **LOSSLESS),
        "default": train_sentencepiece(folder / "default/tok.model", model_type="unigram"),
        "symbols": train_sentencepiece(
            folder / "symbols/tok.model", model_type="bpe", user_defined_symbols=["<|end|>"]
        ),
        "json": train_json(folder / "json"),
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family, as a Hugging Face folder without tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama2", "qwen2", "qwen3"):
        make_hf_model(family, folder / family, vocab_size=VOCAB + 8)
    return {family: folder / family for family in ("llama2", "qwen2", "qwen3")}


def export(model: Path, tokenizer: Path | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """What `moba-train convert moba-to-hf` makes of a run with this model and tokenizer, and what it says."""
    monkeypatch.setenv("MOBA_TRAIN_DATA_ROOTS", "/")
    monkeypatch.chdir(folder)
    save_as_checkpoint(model, folder / "run", {"block_size": 16, "topk": 2}, tokenizer)
    result = run_app(app, "convert", "moba-to-hf", folder / "run", folder / "out")
    return folder / "out", result.output


def auto_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of an exported folder."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def assert_same_ids(theirs: Any, tokenizer: Path) -> None:
    """transformers gives our ids for every text, and decodes them to our text."""
    ours = load_text_tokenizer(tokenizer)
    for text in [*TEXTS, "".join(TEXTS), (ROOT / "docs" / "how-to" / "import-export.md").read_text()]:
        expected = ours.encode(text)
        assert theirs(text).input_ids == expected, text
        assert theirs.decode(expected) == ours.decode(expected), text


@pytest.mark.parametrize("family", ["llama2", "qwen3"])
@pytest.mark.parametrize("kind", ["bpe", "unigram", "default", "json"])
def test_auto_tokenizer_gives_the_ids_of_training(
    family: str,
    kind: str,
    models: dict[str, Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, said = export(models[family], tokenizers[kind], tmp_path, monkeypatch)
    theirs = auto_tokenizer(out)
    assert_same_ids(theirs, tokenizers[kind])
    assert "warning" not in said
    ids = [None, None, None] if kind == "json" else [1, 2, 3]
    assert [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id] == ids
    config, generation = (json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json"))
    for key, expected in zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True):
        assert config[key] == expected
        assert generation.get(key) == expected
    assert {file.name for file in out.iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    assert not (out / "tok.model").exists()


@pytest.mark.parametrize(("kind", "bos", "eos"), [("bpe", 1, 2), ("json", 0, 1)])
def test_marks_of_the_corpora_and_a_chat_template_are_exported(
    kind: str,
    bos: int,
    eos: int,
    models: dict[str, Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a corpus made with --bos and --eos, and a template beside the tokenizer."""
    tokenizer = Path(shutil.copy(tokenizers[kind], tmp_path))
    (tmp_path / "none.json").write_text(json.dumps({"tokenizer": tokenizer.name, "bos_id": bos, "eos_id": eos}))
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    out, _ = export(models["llama2"], tokenizer, tmp_path, monkeypatch)
    theirs = auto_tokenizer(out)
    ours = load_text_tokenizer(tokenizer)
    assert [theirs.bos_token_id, theirs.eos_token_id] == [bos, eos]
    assert theirs("a text").input_ids == [bos, *ours.encode("a text")]
    messages = [{"role": "user", "content": "What is attention?"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "[user] What is attention?\n"
    assert list(theirs.apply_chat_template(messages)["input_ids"]) == ours.encode("[user] What is attention?\n")


@pytest.mark.parametrize(("kind", "bos", "text"), [("bpe", 1, "<s>"), ("json", 0, "<|begin|>")])
@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("trained", [True, False, None])
def test_texts_begin_as_documents_did_whatever_the_tokenizers_files_say(
    kind: str,
    bos: int,
    text: str,
    published: bool,
    trained: bool | None,
    models: dict[str, Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """published, trained: whether the files and the corpora begin with `bos`; None: no corpora, the files decide."""
    tokenizer = Path(shutil.copy(tokenizers[kind], tmp_path))
    if kind == "json":
        from tokenizers import Tokenizer, processors

        loaded = Tokenizer.from_file(str(tokenizer))
        begin = processors.TemplateProcessing(f"{text} $A", special_tokens=[(text, bos)])
        nothing = processors.TemplateProcessing("$A")  # as transformers 5 saves it
        loaded.post_processor = processors.Sequence([processors.ByteLevel(), begin if published else nothing])
        loaded.save(str(tokenizer))
    own = {"tokenizer_class": "LlamaTokenizer", "bos_token": text, "eos_token": text, "add_bos_token": published}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    if trained is not None:
        marks = {"tokenizer": tokenizer.name, "bos_id": bos if trained else None, "eos_id": None}
        (tmp_path / "none.json").write_text(json.dumps(marks))
    out, said = export(models["llama2"], tokenizer, tmp_path, monkeypatch)
    assert "warning" not in said
    begins = published if trained is None else trained
    ids = load_text_tokenizer(tokenizer).encode("a text")
    assert auto_tokenizer(out)("a text").input_ids == [*([bos] if begins else []), *ids]
    assert json.loads((out / "tokenizer_config.json").read_text())["add_bos_token"] is begins
    if kind == "json" and begins is published:
        assert (out / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
        assert (out / "tokenizer_config.json").read_text() == json.dumps(own)


def test_nothing_is_added_behind_a_text(
    models: dict[str, Path], tokenizers: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's files add the end of a document to every text; documents of training only began with a token."""
    from tokenizers import Tokenizer, processors

    tokenizer, mark = Path(shutil.copy(tokenizers["json"], tmp_path)), "<|begin|>"
    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.post_processor = processors.TemplateProcessing(f"{mark} $A {mark}", special_tokens=[(mark, 0)])
    loaded.save(str(tokenizer))
    own = {"tokenizer_class": "LlamaTokenizer", "bos_token": mark, "add_bos_token": True, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "none.json").write_text(json.dumps({"tokenizer": tokenizer.name, "bos_id": 0, "eos_id": None}))
    out, _ = export(models["llama2"], tokenizer, tmp_path, monkeypatch)
    assert auto_tokenizer(out)("a text").input_ids == [0, *load_text_tokenizer(tokenizer).encode("a text")]
    assert json.loads((out / "tokenizer_config.json").read_text())["add_eos_token"] is False


@pytest.mark.parametrize(
    ("key", "own", "ends"),
    [
        ("end_of_turn_id", {}, [2, 9]),
        ("end_of_turn_id", {"eos_token_id": [2, 7], "top_p": 0.9}, [2, 7, 9]),
        ("eos_id", {"eos_token_id": [2, 7], "top_p": 0.9}, [2, 7, 9]),
    ],
)
def test_answers_of_an_export_end_as_documents_and_turns_did_in_training(
    key: str,
    own: dict[str, Any],
    ends: list[int],
    models: dict[str, Path],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Path(shutil.copy(tokenizers["bpe"], tmp_path))
    if own:
        (tmp_path / "generation_config.json").write_text(json.dumps(own))
    (tmp_path / "none.json").write_text(json.dumps({"tokenizer": tokenizer.name, key: 9}))
    out, _ = export(models["llama2"], tokenizer, tmp_path, monkeypatch)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ends
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == ends
    assert own.keys() <= generation.keys()


@pytest.mark.parametrize("own", [{}, {"split_special_tokens": True}])
def test_a_chat_template_gives_the_ids_of_fine_tuning(
    own: dict[str, Any], models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was fine-tuned on conversations is prompted with the tokens that it was trained on. The tokenizer is
    a sentencepiece model with control symbols for the marks of turns, then the tokenizer.json that is made of it, whose
    config says that such marks in a text are plain text."""
    symbols = ["<|im_start|>", "<|im_end|>"]
    messages = [{"role": "user", "content": "ba du?"}, {"role": "assistant", "content": " ki. </s>"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    (tmp_path / "chat_template.jinja").write_text(BUILT_IN["chatml"][0])
    tokenizer = train_sentencepiece(tmp_path / "tok.model", model_type="bpe", control_symbols=symbols, **LOSSLESS)
    if own:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
        (tmp_path / "tokenizer.json").write_text(convert_sentencepiece(load_tokenizer(tokenizer)))
        tokenizer = tmp_path / "tokenizer.json"
    make_sft_corpus(
        [str(tmp_path / "chat.jsonl")], str(tmp_path / "none"), str(tokenizer), load_chat_template("chatml")
    )
    out, said = export(models["llama2"], tokenizer, tmp_path, monkeypatch)
    assert "warning" not in said
    found = list(auto_tokenizer(out).apply_chat_template(messages)["input_ids"])
    assert found == IndexedDataset(tmp_path / "none").document(0).tolist()
    assert found.count(load_tokenizer(tmp_path / "tok.model").processor.piece_to_id("<|im_end|>")) == 2


@pytest.mark.parametrize("made_with", ["tok.model", "tiktoken:o200k_base"])
def test_a_run_without_tokenizer_says_so(
    made_with: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids that end documents are known from the corpora all the same."""
    (tmp_path / "none.json").write_text(json.dumps({"tokenizer": made_with, "bos_id": None, "eos_id": 7}))
    out, said = export(models["qwen3"], None, tmp_path, monkeypatch)
    assert (
        f"warning: no tokenizer is exported: the recipe has no data.tokenizer; its corpora were made with {made_with}"
        in said
    )
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 7
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 7}


def test_qwen2_says_how_to_load_its_tokenizer(
    models: dict[str, Path], tokenizers: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoTokenizer takes its own class for every Qwen2 model, whatever the folder says."""
    out, said = export(models["qwen2"], tokenizers["bpe"], tmp_path, monkeypatch)
    assert "warning: AutoTokenizer of transformers 5 takes Qwen2Tokenizer" in said
    transformers = pytest.importorskip("transformers")
    assert_same_ids(transformers.PreTrainedTokenizerFast.from_pretrained(out), tokenizers["bpe"])


def test_a_model_that_tokenizer_json_cannot_hold_is_left_out_with_a_warning(
    models: dict[str, Path], tokenizers: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symbols of the user that may follow the space which sentencepiece puts before a text."""
    out, said = export(models["llama2"], tokenizers["symbols"], tmp_path, monkeypatch)
    assert "warning: tokenizer.json is left out" in said
    assert "for instance for '<|end|>'" in said
    assert (out / "sentencepiece.model").read_bytes() == tokenizers["symbols"].read_bytes()
    assert not (out / "tokenizer.model").exists()
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="backend tokenizer"):
        auto_tokenizer(out)


def test_a_published_tokenizer_keeps_its_files_and_an_old_one_gets_a_tokenizer_json(
    models: dict[str, Path], tokenizers: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a Hugging Face folder with a sentencepiece model alone, through a checkpoint, and back."""
    shutil.copytree(models["llama2"], tmp_path / "hf")
    shutil.copy(tokenizers["default"], tmp_path / "hf/tokenizer.model")
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    }
    generation = {"bos_token_id": 1, "eos_token_id": [2, 7], "temperature": 0.6}
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(generation))
    monkeypatch.chdir(tmp_path)
    said = run_app(app, "convert", "hf-to-moba", "hf", "imported").output
    assert said == "hf is now a checkpoint in imported; imported/recipe.yaml is a recipe to extend\n"
    run_app(app, "convert", "moba-to-hf", "imported", "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == generation
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [2, 7]
    theirs = auto_tokenizer(tmp_path / "out")
    ours = load_text_tokenizer(tokenizers["default"])
    for text in TEXTS[:4]:
        assert theirs(text).input_ids == [1, *ours.encode(text)]
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi</s>"
