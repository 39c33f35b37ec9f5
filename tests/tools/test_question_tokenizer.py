"""The tokens of questions are those that the model was trained on."""

import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.sft import encode_record
from moba_train.config.schema import RunConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.tokenizer import tokenizer_hash
from moba_train.errors import DataError
from moba_train.tools.chat.load import load_chat_template
from moba_train.tools.chat.template import Conversation
from moba_train.tools.needle.answers import Question
from moba_train.tools.needle.haystack import NaturalText, QuestionTokenizer
from moba_train.tools.tasks.ruler import Ruler
from moba_train.tools.text_tokenizer import ChatTokenizer, load_tokenizer
from tests.evals.setting import stage_setting
from tests.tools.questions import VOCAB, recipe, recipe_texts

LENGTH = 3072
BOS, EOS = 1, 2


def with_sidecar(texts: Path, folder: Path, **info: Any) -> Path:
    """A copy of the tokenizer and the corpus whose sidecar says this; its documents begin with `bos_id`."""
    begin = [info["bos_id"]] if "bos_id" in info else []
    shutil.copy(texts / "tok.model", folder)
    corpus = IndexedDataset(texts / "corpus")
    with IndexedDatasetWriter(folder / "corpus", np.uint16) as writer:
        for number in range(corpus.documents):
            writer.add_document([*begin, *corpus.document(number).tolist()])
    path = folder / "corpus.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(written | {"eos_id": EOS} | info))
    return folder


def needles(config: RunConfig) -> list[Question]:
    return recipe_texts(config).questions(LENGTH)


@pytest.mark.parametrize("bos", [{}, {"bos_id": BOS}])
def test_needle_questions_begin_as_the_documents_of_the_corpus(
    texts: Path, tmp_path: Path, bos: dict[str, int]
) -> None:
    folder = with_sidecar(texts, tmp_path, **bos)
    config = recipe(folder, LENGTH, {"needle": {"samples": 1, "depths": [0, 100]}})
    for question in needles(config):
        begin, rest = question.tokens[: len(bos)], question.tokens[len(bos) :]
        assert begin == [*bos.values()]
        assert not {BOS, EOS} & {*rest}
        assert len(question.tokens) == LENGTH


def test_the_end_that_the_corpus_was_made_with_is_no_text_either(texts: Path, tmp_path: Path) -> None:
    """`--eos` may be another token than the tokenizer's."""
    tokenizer = QuestionTokenizer(str(texts / "tok.model"), VOCAB, {"bos_id": 1, "eos_id": 5}, chat=False)
    assert tokenizer.marks == {BOS, EOS, 5}


def test_an_answer_also_ends_where_a_turn_does(texts: Path, tmp_path: Path) -> None:
    """By the corpus, and by the model's generation_config.json, as in `moba-train generate`."""
    shutil.copy(texts / "tok.model", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    tokenizer = QuestionTokenizer(str(tmp_path / "tok.model"), VOCAB, {"end_of_turn_id": 11}, chat=True)
    assert tokenizer.ends == {EOS, 7, 9, 11}


@pytest.mark.parametrize("task", ["vt", "niah_single_2"])
def test_ruler_questions_begin_as_the_documents_of_the_corpus(texts: Path, tmp_path: Path, task: str) -> None:
    config = recipe(with_sidecar(texts, tmp_path, bos_id=BOS), LENGTH, {"ruler": {"tasks": [task], "samples": 2}})
    evaluation: Any = config.evaluation  # its sections are found when it is loaded
    assert evaluation.ruler is not None
    for prompt in Ruler.texts(evaluation.ruler, stage_setting(config)).questions(task, LENGTH):
        first, *rest = prompt.question.tokens
        assert first == BOS
        assert not {BOS, EOS} & {*rest}


def test_a_corpus_of_the_tokenizer_s_other_form_may_be_asked_about(texts: Path, tmp_path: Path) -> None:
    """An export of a sentencepiece model has it as tokenizer.model, and the same as tokenizer.json."""
    folder = with_sidecar(texts, tmp_path, tokenizer_sha256=tokenizer_hash(texts / "tok.model"))
    tokenizer = QuestionTokenizer(str(folder / "tok.model"), VOCAB, {}, chat=False)
    (folder / "tokenizer.json").write_text("{}")
    tokenizer.path = str(folder / "tokenizer.json")
    with pytest.raises(
        DataError, match=r"data.validation: the corpus .* was made with another tokenizer than data\.tok"
    ):
        NaturalText(str(folder / "corpus"), tokenizer)
    shutil.copy(texts / "tok.model", folder / "tokenizer.model")
    assert len(NaturalText(str(folder / "corpus"), tokenizer).tokens(100, random.Random(0))) == 100


def test_a_chat_question_has_the_tokens_of_fine_tuning(texts: Path, tmp_path: Path) -> None:
    """A template spells out control tokens, which sentencepiece would take for text."""
    folder = with_sidecar(texts, tmp_path, bos_id=BOS)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((texts / "text.txt").read_text().split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB,
        byte_fallback=True,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        control_symbols=["[INST]", "[/INST]"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tok.model").write_bytes(model.getvalue())
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": template}))
    section = {"samples": 1, "depths": [0], "chat": True}
    (question,) = needles(recipe(folder, LENGTH, {"needle": section}))
    tokenizer = load_tokenizer(folder / "tok.model")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    (sample,) = load_chat_template(str(folder)).split(Conversation(messages)).samples
    trained = encode_record(sample, ChatTokenizer(tokenizer)).ids.tolist()
    begin, end = tokenizer.processor.piece_to_id("[INST]"), tokenizer.processor.piece_to_id("[/INST]")
    assert question.tokens[:2] == trained[:2] == [BOS, begin]
    assert question.prompt.count(end) == trained.count(end) == 1
    assert question.prompt.count(begin) == question.prompt.count(BOS) == 1


@pytest.mark.parametrize("named", ["train", "validation"])
def test_a_chat_question_is_asked_by_the_template_of_the_runs_conversations(
    texts: Path, tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the one that the tokenizer's folder has from the model that was imported."""
    monkeypatch.chdir(tmp_path)
    folder = with_sidecar(texts, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('imported') }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    definition = {"source": "Q: {{ messages[0].content }} A:", "end_of_turn": "\n", "variables": {}}
    section = {"samples": 1, "depths": [0], "chat": True}
    config = recipe(folder, LENGTH, {"needle": section})
    with pytest.raises(DataError, match="imported"):
        needles(config)
    with_sidecar(texts, tmp_path, chat_template=definition)
    if named == "train":
        config.data.validation[0] = config.data.validation[0].model_copy(update={"path": str(texts / "corpus")})
    (question,) = needles(config)
    text = load_tokenizer(folder / "tok.model").decode(question.tokens)
    assert text.startswith("Q: ")
    assert " A:" in text[-200:]
