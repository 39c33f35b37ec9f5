"""Agents' trajectories as conversations: turns with weights, thoughts, calls and results, cut where answers end, and
their way into training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.cli import app
from data_tools.conversations import parse_record
from data_tools.sft import SftOptions, encode_record, make_sft_corpus
from moba_train.config.data import SourceConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import byte_of_weight, mask_prefix
from moba_train.data.samples import StageData
from moba_train.errors import DataError
from moba_train.tools.chat.load import load_chat_template
from moba_train.tools.chat.template import ChatTemplate, Conversation
from moba_train.tools.text_tokenizer import ChatTokenizer, load_text_tokenizer
from tests.commands import run_app
from tests.data_tools.test_sft import write_lines
from tests.data_tools.test_sft_messages import FORGETS, TWO_TURNS, assistant, make, user

TOOLS = [{"type": "function", "function": {"name": "run", "description": "Runs a command.", "parameters": {}}}]
THINKS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% if enable_thinking is not defined or enable_thinking %}"
    "<think>{{ m.reasoning_content }}</think>{% else %}<think></think>{% endif %}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<e>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def call(command: str, thought: str = "hm", **others: Any) -> dict[str, Any]:
    function = {"name": "run", "arguments": {"command": command}}
    return {"role": "assistant", "reasoning_content": thought, "tool_calls": [{"function": function}], **others}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


TRAJECTORY = [
    user("Fix it."),
    call("ls", "look first"),
    result("a.py"),
    call("edit a.py", "found"),
    result("done"),
    assistant("Fixed.", reasoning_content="sure"),
    user("Test it."),
    call("pytest", "all of them"),
    result("1 passed"),
    assistant("It passes.", reasoning_content="good"),
]
RECORD = {"messages": TRAJECTORY, "tools": TOOLS}


def with_loss(document: str) -> list[str]:
    return [part.split("]]")[0] for part in document.split("[[")[1:]]


def test_calls_thoughts_and_answers_carry_loss_and_results_none(tmp_path: Path, tokenizer: str) -> None:
    (document,), _ = make(tmp_path, tokenizer, THINKS, [RECORD], "--end-of-turn", "<e>")
    assert len(with_loss(document)) == 5
    assert with_loss(document)[0] == '<think>look first</think>{"name": "run", "arguments": {"command": "ls"}}<e>'
    assert all(text not in "".join(with_loss(document)) for text in ("a.py<e>", "done", "1 passed", "Fix it."))


def test_thinking_is_switched_off_for_all_or_one_conversation(tmp_path: Path, tokenizer: str) -> None:
    own = RECORD | {"chat_template_kwargs": {"enable_thinking": True}}
    kwargs = '{"enable_thinking": false}'
    documents, _ = make(tmp_path, tokenizer, THINKS, [RECORD, own], "--end-of-turn", "<e>", "--template-kwargs", kwargs)
    assert with_loss(documents[0])[2] == "<think></think>Fixed.<e>"
    assert with_loss(documents[1])[2] == "<think>sure</think>Fixed.<e>"
    command = ["sft", "--input", str(tmp_path / "chat.jsonl"), "--tokenizer", tokenizer, "--output", "x"]
    done = run_app(app, *command, "--template-kwargs", '{"tools": []}', code=2)
    assert "--template-kwargs: given" in done.output


def test_thoughts_without_loss_are_left_out_of_the_answers(tmp_path: Path, tokenizer: str) -> None:
    """Those that the template writes; weights multiply, and limits still cut at the ends of answers."""
    (document,), _ = make(tmp_path, tokenizer, THINKS, [RECORD], "--end-of-turn", "<e>", "--thought-weight", "0")
    assert with_loss(document)[-2:] == ["<think>", "</think>It passes.<e>"]
    assert len(with_loss(document)) == 10
    found = ChatTemplate(THINKS, "<e>").split(
        Conversation([user("?"), assistant("!", reasoning_content="hm", weight=0.5, thought_weight=0.5)])
    )
    assert [segment[:2] for segment in found.samples[0]] == [
        ("<user>?<e><assistant>", 0), ("<think>", 0.5), ("hm", 0.25), ("</think>!<e>", 0.5),
    ]  # fmt: skip
    conversation = parse_record(RECORD)
    assert isinstance(conversation, Conversation)
    without_thoughts = SftOptions(thought_weight=0).applied(conversation)
    (sample,) = ChatTemplate(THINKS, "<e>").split(without_thoughts).samples
    reader = ChatTokenizer(load_text_tokenizer(tokenizer))
    whole = encode_record(sample, reader)
    cuts = [encode_record(sample, reader, most) for most in range(200, len(whole.ids))]
    assert {cut.answers_cut for cut in cuts} == {1, 2, 3, 4}
    assert all(reader.decode(cut.ids.tolist()).endswith("<e>") for cut in cuts)


def test_line_breaks_behind_a_thought_are_tokenized_with_it() -> None:
    """As in inference, where a tokenizer joins them to the stop before."""
    lines = "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    lines += "</think>\n\n{% endif %}{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    answer = assistant("!", reasoning_content="So.", thought_weight=0)
    (sample,) = ChatTemplate(lines, "<e>").split(Conversation([user("?"), answer])).samples
    assert [segment.text for segment in sample[1:]] == ["<think>\n", "So.\n", "</think>\n\n!<e>"]


def test_loss_on_the_last_turn_is_on_all_its_calls(tmp_path: Path, tokenizer: str) -> None:
    (document,), _ = make(tmp_path, tokenizer, THINKS, [RECORD], "--end-of-turn", "<e>", "--loss-turns", "last")
    calls, answer = with_loss(document)
    assert "pytest" in calls
    assert answer == "<think>good</think>It passes.<e>"
    assert document.index("[[") > document.index("Test it.")


@pytest.fixture
def lengths(tmp_path: Path, tokenizer: str) -> tuple[int, list[int]]:
    """Tokens of the trajectory in ChatML, and the ends of its answers."""
    make_sft_corpus([write_lines(tmp_path / "whole.jsonl", [RECORD])], str(tmp_path / "whole"), tokenizer, CHATML)
    mask = IndexedDataset(mask_prefix(str(tmp_path / "whole"))).document(0)
    ends = np.flatnonzero(np.diff(mask.astype(int), append=0) == -1) + 1
    return len(mask), ends.tolist()


CHATML = load_chat_template("chatml")


def test_a_long_trajectory_ends_with_the_last_answer_that_fits(
    tmp_path: Path, tokenizer: str, lengths: tuple[int, list[int]]
) -> None:
    """For every limit: no answer is without all of its prompt or its end, and no prompt without its answer."""
    total, ends = lengths
    assert len(ends) == 5
    whole = IndexedDataset(str(tmp_path / "whole")).document(0)
    source = write_lines(tmp_path / "chat.jsonl", [RECORD])
    for most in (ends[0], ends[1] - 1, ends[1], ends[3] + 1, total - 1, total):
        found = make_sft_corpus(
            [source], str(tmp_path / str(most)), tokenizer, CHATML, options=SftOptions(max_tokens=most)
        )
        (corpus,) = found.corpora.values()
        length = total if most == total else max(end for end in ends if end <= most)
        assert np.array_equal(corpus.document(0), whole[:length])
        cut = sum(end > most for end in ends)
        assert found.not_whole.shortened == ({"samples": 1, "answers": cut} if cut else {})
    with pytest.raises(
        DataError, match=f"its first answer ends with token {ends[0]}, --max-tokens allows {ends[0] - 1}"
    ):
        make_sft_corpus([source], str(tmp_path / "no"), tokenizer, CHATML, options=SftOptions(max_tokens=ends[0] - 1))


def test_of_samples_for_each_turn_those_that_fit_remain(tmp_path: Path, tokenizer: str) -> None:
    """A template that drops earlier thoughts makes each turn a sample, of which the second one alone is too long."""
    turns = [*TWO_TURNS, user("And now all of it: " + "3+3? " * 50), assistant("6", reasoning_content="long")]
    documents, _ = make(tmp_path, tokenizer, FORGETS, [{"messages": turns}], "--end-of-turn", "<e>")
    assert len(documents) == 3
    (tmp_path / "cut").mkdir()
    options = ("--end-of-turn", "<e>", "--max-tokens", "120")
    fitting, printed = make(tmp_path / "cut", tokenizer, FORGETS, [{"messages": turns}], *options)
    assert fitting == documents[:2]
    assert "1 answers are left out" in printed


def test_the_command_says_what_it_cut(tmp_path: Path, tokenizer: str, lengths: tuple[int, list[int]]) -> None:
    most = str(lengths[1][2])
    documents, printed = make(tmp_path, tokenizer, THINKS, [RECORD], "--end-of-turn", "<e>", "--max-tokens", most)
    assert "1 conversations are longer than --max-tokens and end with the last answer within" in printed
    assert documents[0].endswith("<e>]]")


def test_an_answers_weight_is_that_of_its_tokens_in_training(tmp_path: Path, tokenizer: str) -> None:
    """Down to the samples, by either norm: an answer of half the weight counts half."""
    weighted = [message | ({"weight": 0.5} if message.get("content") == "Fixed." else {}) for message in TRAJECTORY]
    source = write_lines(tmp_path / "chat.jsonl", [{"messages": weighted, "tools": TOOLS}])
    prefix = str(tmp_path / "c")
    make_sft_corpus([source], prefix, tokenizer, CHATML)
    mask = IndexedDataset(mask_prefix(prefix)).document(0)
    assert {*mask.tolist()} == {0, 1, 51}
    tokens = len(mask)
    for norm in ("token", "sequence"):
        data = StageData([SourceConfig(path=prefix)], tokens, 1, 0, {}, 100_000, "best_fit", norm)
        weights = data.sample(0).loss_weight[: tokens - 1]
        expected = np.select([mask == 1, mask == 51], [1.0, 0.5], 0.0)[1:]
        scale = expected.sum() if norm == "sequence" else 1
        assert weights == pytest.approx(expected / scale, rel=1e-6)


def test_weights_become_bytes_to_the_nearest_percent() -> None:
    found = {weight: byte_of_weight(weight) for weight in (0, 1, 1.0, 0.5, 0.001, 0.999, 0.333)}
    assert found == {0: 0, 1: 1, 0.5: 51, 0.001: 2, 0.999: 100, 0.333: 34}


@pytest.mark.parametrize("weight", [1.5, -0.1, True, "1"])
def test_other_weights_are_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="allowed: 0 \\(no loss on this message\\) to 1"):
        parse_record({"messages": [user("?"), assistant("!", weight=weight)]})
    assert isinstance(parse_record({"messages": [user("?"), assistant("!", weight=0.25)]}), Conversation)
    with pytest.raises(ValueError, match=r"weight 0\.5 on a message of role 'user'"):
        parse_record({"messages": [user("?", weight=0.5), assistant("!")]})
