"""`moba-data sft`: what a record says reaches the chat template, or is named; any order of turns is used or refused."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.conversations import parse_record
from data_tools.show import load_decoder, show_documents
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import mask_prefix
from moba_train.tools.chat.template import BUILT_IN, ChatTemplate, Conversation
from tests.commands import run_app
from tests.data_tools.test_sft import spans, write_lines

LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
FORGETS = (
    LAST_USER + "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<e>{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
)
"""It writes the thoughts of the last turn alone, as templates of reasoning models do."""
KEEPS = FORGETS.replace(LAST_USER, "").replace(" and loop.index0 > ns.last", "")
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}<e>{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)


def user(content: str, **others: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **others}


def assistant(content: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


TWO_TURNS = [
    user("1+1?"),
    assistant("2", reasoning_content="add"),
    user("2+2?"),
    assistant("4", reasoning_content="more"),
]


def parsed(messages: list[dict[str, Any]], **others: Any) -> Conversation:
    record = parse_record({"messages": messages, **others})
    assert isinstance(record, Conversation)
    return record


def samples(source: str, messages: list[dict[str, Any]], end: str = "<e>") -> list[str]:
    """Samples of a conversation, with the text that carries loss in double brackets."""
    split = ChatTemplate(source, end).split(parsed(messages))
    return ["".join(f"[[{text}]]" if in_loss else text for text, in_loss, _ in sample) for sample in split.samples]


def make(tmp_path: Path, tokenizer: str, source: str, records: list[Any], *options: str) -> tuple[list[str], str]:
    """Documents of the corpus that the command makes, with the text that carries loss marked, and what it prints."""
    lines = write_lines(tmp_path / "chat.jsonl", records)
    (tmp_path / "template.jinja").write_text(source)
    command = ["sft", "--input", lines, "--tokenizer", tokenizer, "--output", str(tmp_path / "c")]
    done = run_app(app, *command, "--template", tmp_path / "template.jinja", *options)
    prefixes = [file.with_suffix("") for file in sorted(tmp_path.glob("c*.idx")) if ".loss" not in file.name]
    documents = [document for prefix in prefixes for document in documents_of(prefix, tokenizer)]
    return documents, " ".join(done.output.split())


def documents_of(prefix: Path, tokenizer: str) -> list[str]:
    """Documents of a corpus, with the text that carries loss in double brackets."""
    corpus = IndexedDataset(prefix)
    shown = show_documents(corpus, load_decoder(tokenizer), range(corpus.documents), None, ("[[", "]]"))
    return [document.text for document in shown]


def test_thoughts_are_trained_on(tokenizer: str, tmp_path: Path) -> None:
    documents, printed = make(tmp_path, tokenizer, KEEPS, [{"messages": TWO_TURNS}], "--end-of-turn", "<e>")
    assert [spans(document) for document in documents] == [["<think>add</think>2<e>", "<think>more</think>4<e>"]]
    assert "change nothing" not in printed


def test_keys_that_no_template_or_format_reads_are_counted_and_named(tokenizer: str, tmp_path: Path) -> None:
    turns = [user("1+1?", name="Ada"), assistant("2", reasoning="add", refusal=None, weight=1)]
    records: list[Any] = [
        {"messages": turns, "id": 7, "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": turns, "id": 8, "source": None},
        {"prompt": "1+1?", "completion": "2", "thinking": "add"},
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2", "thinking": "add"}]},
    ]
    _, printed = make(tmp_path, tokenizer, KEEPS, records, "--end-of-turn", "<e>")
    found = printed.split("does not read them: ")[1].split("; rename")[0].split(", ")
    expected = {"messages[].name": 2, "messages[].reasoning": 2, "messages[].thinking": 1, "id": 2, "thinking": 1}
    expected |= {"chat_template_kwargs.enable_thinking": 1}
    assert sorted(found) == sorted(f"{key!r} ({count})" for key, count in expected.items())


def test_text_that_the_template_leaves_out_is_named() -> None:
    only_users = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}<e>{% endfor %}"
    messages = [{"role": "system", "content": "Be brief."}, user("1+1?"), assistant("2")]
    assert ChatTemplate(only_users, "<e>").split(parsed(messages)).unread == ["messages[].content"]


def test_chat_template_kwargs_reach_the_template() -> None:
    source = "{{ style }}" + KEEPS
    split = ChatTemplate(source, "<e>", {"style": "plain"}).split(
        parsed(TWO_TURNS, chat_template_kwargs={"style": "loud"})
    )
    assert split.samples[0][0].text.startswith("loud<user>")
    assert split.unread == []
    with pytest.raises(ValueError, match="'chat_template_kwargs' has 'tools', which a template gets from the record"):
        parsed(TWO_TURNS, chat_template_kwargs={"tools": []})


def test_a_key_that_only_a_prompt_has_is_read() -> None:
    """`enable_thinking: false` of reasoning models writes nothing else than the end of the prompt."""
    source = KEEPS.replace("'<assistant>'", "'<assistant>' ~ ('<think>' if style)")
    assert ChatTemplate(source, "<e>").split(parsed(TWO_TURNS, chat_template_kwargs={"style": 1})).unread == []


def test_conversations_whose_thoughts_are_dropped_are_cut_by_turn(tokenizer: str, tmp_path: Path) -> None:
    assert samples(FORGETS, TWO_TURNS) == [
        "<user>1+1?<e><assistant>[[<think>add</think>2<e>]]",
        "<user>1+1?<e><assistant>2<e><user>2+2?<e><assistant>[[<think>more</think>4<e>]]",
    ]
    tool = [
        user("Cold?"),
        assistant("", reasoning_content="ask", tool_calls=[{"name": "now", "arguments": {}}]),
        {"role": "tool", "content": "4 degrees"},
        assistant("Yes.", reasoning_content="four"),
    ]
    calls = FORGETS.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    )
    assert samples(calls, [*tool, *TWO_TURNS[:2]]) == [
        "<user>Cold?<e><assistant>[[<think>ask</think>now<e>]]<tool>4 degrees<e><assistant>"
        "[[<think>four</think>Yes.<e>]]",
        "<user>Cold?<e><assistant>now<e><tool>4 degrees<e><assistant>Yes.<e><user>1+1?<e><assistant>"
        "[[<think>add</think>2<e>]]",
    ]
    records = [{"messages": [user(f"Say {number}"), *TWO_TURNS[1:]]} for number in range(20)]
    documents, printed = make(tmp_path, tokenizer, FORGETS, records, "--end-of-turn", "<e>", "--holdout", "0.4")
    assert len(documents) == 40
    assert "20 conversations were cut into 40 samples" in printed
    held_out = "".join(documents_of(tmp_path / "c-valid", tokenizer))
    assert {held_out.count(f"Say {number}<e>") for number in range(20)} == {0, 2}, "on one side, both samples"


def test_a_template_that_repeats_no_prompt_is_refused() -> None:
    """No part of its text is known to be the answer."""
    template = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}<e>{% endfor %}", "<e>")
    with pytest.raises(ValueError, match="before assistant message 1 differently as a prompt"):
        template.split(parsed(TWO_TURNS))


def test_a_thought_where_the_prompt_says_that_there_is_none_is_refused() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
        "{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
        "<e>",
    )
    conversation = parsed([user("Cold?"), assistant("Yes.", thinking="four")])
    assert "<think>four</think>Yes.<e>" in template.split(conversation).samples[0][-1].text
    conversation = conversation._replace(variables={"enable_thinking": False})
    with pytest.raises(ValueError, match="with enable_thinking: false leave its thinking out"):
        template.split(conversation)


CHATML = BUILT_IN["chatml"][0].replace("<|im_end|>", "<e>")


def test_messages_after_the_last_answer_are_left_out_and_counted(tokenizer: str, tmp_path: Path) -> None:
    records = [
        {"messages": [*TWO_TURNS, user("3+3?")]},
        {"messages": [*TWO_TURNS, user("?"), assistant("6", weight=0)]},
    ]
    documents, printed = make(tmp_path, tokenizer, FORGETS, records, "--end-of-turn", "<e>")
    assert [document.count("<e>") for document in documents] == [2, 4] * 2
    assert all(document.endswith("</think>4<e>]]") or document.endswith("</think>2<e>]]") for document in documents)
    assert "3 messages at the ends of 2 conversations are left out" in printed


def test_unusual_orders_are_trained_on_as_the_template_writes_them() -> None:
    first = [assistant("Hello."), user("Hi."), assistant("Well?")]
    assert [part.split("]]")[0] for part in samples(CHATML, first)[0].split("[[")[1:]] == ["Hello.<e>", "Well?<e>"]
    twice = [user("One."), user("Two."), assistant("Three."), assistant("Four.")]
    assert [part.split("]]")[0] for part in samples(CHATML, twice)[0].split("[[")[1:]] == ["Three.<e>", "Four.<e>"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([assistant("Hello."), user("Hi."), assistant("Well?")], "the conversation begins with an assistant message"),
        ([user("One."), user("Two."), assistant("Three.")], "two messages of role 'user' in a row"),
        ([user("One."), assistant("Two."), assistant("Three.")], "two messages of role 'assistant' in a row"),
    ],
)
def test_unusual_orders_that_the_template_refuses_are_named(messages: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}; the chat template refuses the messages: roles must alternate"):
        samples(STRICT, messages)
    needs_one = "{{ messages[0].content }}" + CHATML
    if messages[0]["role"] == "assistant":
        with pytest.raises(ValueError, match=f"{said}; the chat template refuses the messages"):
            samples(needs_one, messages)


def test_another_end_of_turn_is_named_with_its_option(tokenizer: str, tmp_path: Path) -> None:
    """The `eos_token` of a base model's folder ends documents, not turns."""
    source = BUILT_IN["chatml"][0]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": source}))
    lines = write_lines(tmp_path / "chat.jsonl", [{"messages": TWO_TURNS}])
    command = ["sft", "--input", lines, "--tokenizer", tokenizer, "--output", str(tmp_path / "c")]
    done = run_app(app, *command, "--template", tmp_path, code=2)
    said = "does not end message 1 with '</s>'; it writes '<|im_end|>' there: give the text that ends a turn as"
    assert f"{said} --end-of-turn" in " ".join(done.output.split())
    assert (
        CliRunner().invoke(app, [*command, "--template", str(tmp_path), "--end-of-turn", "<|im_end|>"]).exit_code == 0
    )


def byte_tokenizer(folder: Path, special: list[str]) -> Path:
    """A tokenizer.json with a token for each byte, for some pairs of letters, and for each of `special`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(one, other) for one in "taeo" for other in "hnrs"]
    pieces = [*letters, *(one + other for one, other in merges)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


MARKED = (
    "{{ bos_token }}{{ mode }}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>{% endgeneration %}"
    "{% else %}{{ m.name ~ ': ' if m.name }}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
"""A template that marks for transformers what the assistant writes."""
TOKENS = ["<s>", "<|end|>", *(f"<|{role}|>" for role in ("system", "user", "assistant", "tool"))]


def random_conversation(draw: random.Random) -> dict[str, Any]:
    """A record with any order of turns, and an answer last."""

    def text() -> str:
        return "".join(draw.choices("tahe rnos\n.é😀{", k=draw.randrange(1, 30)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
    for _ in range(draw.randrange(6)):
        kind = draw.choice(["user", "named", "assistant", "thought", "call"])
        if kind in ("user", "named"):
            messages.append(user(text(), **({"name": text()} if kind == "named" else {})))
        elif kind == "call":
            call = {"id": text(), "type": "function", "function": {"name": "now", "arguments": {"where": text()}}}
            messages.append({"role": "assistant", "content": draw.choice([None, text()]), "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(), "tool_call_id": call["id"]})
        else:
            messages.append(assistant(text(), **({"reasoning_content": text()} if kind == "thought" else {})))
    record: dict[str, Any] = {"messages": [*messages, assistant(text())]}
    if draw.random() < 0.3:
        record["tools"] = [{"type": "function", "function": {"name": "now", "description": text()}}]
    if draw.random() < 0.3:
        record["chat_template_kwargs"] = {"mode": text()}
    return record


def test_ids_and_masks_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_tokenizer(tmp_path, TOKENS)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), bos_token="<s>", eos_token="<|end|>")
    config = {"bos_token": "<s>", "eos_token": "<|end|>", "chat_template": MARKED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    draw = random.Random(0)
    records = [random_conversation(draw) for _ in range(200)]
    lines = write_lines(tmp_path / "chat.jsonl", records)
    command = ["sft", "--input", lines, "--tokenizer", str(tmp_path), "--output", str(tmp_path / "c")]
    run_app(app, *command, "--template", tmp_path, "--on-error", "fail")
    corpus, masks = IndexedDataset(tmp_path / "c"), IndexedDataset(mask_prefix(str(tmp_path / "c")))
    assert corpus.documents == len(records)
    for number, record in enumerate(records):
        want: Any = theirs.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            chat_template=MARKED,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **record.get("chat_template_kwargs", {}),
        )
        np.testing.assert_array_equal(corpus.document(number), want["input_ids"], f"ids of {record}")
        np.testing.assert_array_equal(masks.document(number), want["assistant_masks"], f"mask of {record}")
