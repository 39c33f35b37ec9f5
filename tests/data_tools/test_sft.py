"""`moba-data sft`: assistant messages up to the end of the turn carry loss, in every format and template."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.conversations import parse_record
from data_tools.sft import make_sft_corpus
from data_tools.show import load_decoder, show_documents
from moba_train.data.chat_template import BUILT_IN, ChatTemplate, Conversation
from moba_train.data.indexed import IndexedDataset
from moba_train.data.load_template import load_chat_template
from moba_train.errors import DataError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "A number."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Another one."},
]


def write_lines(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def show(prefix: Path, tokenizer: str) -> str:
    """The first document of a corpus as text, decoded from the files that training reads."""
    (shown,) = show_documents(IndexedDataset(prefix), load_decoder(tokenizer), [0], None, ("[[", "]]"))
    return shown.text


def spans(text: str) -> list[str]:
    """Texts between the marks of `--show`."""
    return re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)


@pytest.mark.parametrize("name", BUILT_IN)
def test_exactly_the_answers_and_the_ends_of_their_turns_carry_loss(name: str, tokenizer: str, tmp_path: Path) -> None:
    """Decoded from the files that training reads."""
    source = write_lines(tmp_path / "chat.jsonl", [{"messages": MESSAGES}])
    make_sft_corpus([source], str(tmp_path / "corpus"), tokenizer, load_chat_template(name))
    shown = show(tmp_path / "corpus", tokenizer)
    end = BUILT_IN[name][1]
    assert spans(shown) == [f"A number.{end}", f"Another one.{end}"]
    assert shown.replace("[[", "").replace("]]", "") == load_chat_template(name).render(MESSAGES)


def test_built_in_templates_write_what_the_models_were_trained_on() -> None:
    messages = MESSAGES[1:3]
    assert load_chat_template("llama3").render(messages, add_generation_prompt=True) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is two?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA number.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    chatml = "<|im_start|>user\nWhat is two?<|im_end|>\n<|im_start|>assistant\nA number.<|im_end|>\n"
    assert load_chat_template("chatml").render(messages) == chatml
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    assert load_chat_template("qwen").render(messages) == system + chatml


def test_a_models_own_template_is_taken_with_its_special_tokens(tokenizer: str, tmp_path: Path) -> None:
    """Its end of turn is a control token of the tokenizer: a single id, which carries loss."""
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}[{{ m.role }}] {{ m.content }}{% endif %}{% endfor %}"
    )
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    source = write_lines(tmp_path / "chat.jsonl", [{"messages": MESSAGES}])
    make_sft_corpus([source], str(tmp_path / "corpus"), tokenizer, load_chat_template(str(tmp_path)))
    shown = show(tmp_path / "corpus", tokenizer)
    assert spans(shown) == [" A number.</s>", " Another one.</s>"]
    ids = IndexedDataset(tmp_path / "corpus").document(0).tolist()
    assert ids[0] == 1
    assert ids.count(2) == 2


def test_all_formats_of_one_conversation_are_the_same() -> None:
    turns = [("human", "What is two?"), ("gpt", "A number."), ("human", "And three?"), ("gpt", "Another one.")]
    sharegpt = {"system": "Be brief.", "conversations": [{"from": who, "value": text} for who, text in turns]}
    alpaca = {
        "instruction": "And",
        "input": "three?",
        "output": "Another one.",
        "system": "Be brief.",
        "history": [["What is two?", "A number."]],
    }
    assert parse_record({"messages": MESSAGES}) == parse_record(sharegpt) == Conversation(MESSAGES)
    alpaca_messages = [*MESSAGES[:3], {"role": "user", "content": "And\n\nthree?"}, MESSAGES[4]]
    assert parse_record(alpaca) == Conversation(alpaca_messages)


BAD = {
    "no key messages": {"text": "plain"},
    "no assistant message": {"messages": MESSAGES[:2]},
    "which ends a turn": {"messages": [{"role": "user", "content": "<|im_end|>"}, MESSAGES[2]]},
    "must be text": {"messages": [{"role": "user", "content": None}]},
    "entries in loss_mask": {"input_ids": [1, 2], "loss_mask": [1]},
    "carries loss": {"input_ids": [1, 2], "loss_mask": [1, 0]},
    "token id 999": {"input_ids": [1, 999], "loss_mask": [0, 1]},
    "from 'robot' is unknown; allowed: human": {"conversations": [{"from": "robot", "value": "x"}]},
    "role 'assistent' is unknown; did you mean 'assistant'?; allowed: system": {
        "messages": [MESSAGES[1], {"role": "assistent", "content": "A number."}]
    },
    "weight 0.5; allowed: 0": {"messages": [MESSAGES[1], MESSAGES[2] | {"weight": 0.5}]},
    "only the assistant's messages carry loss": {"messages": [MESSAGES[1] | {"weight": 1}, MESSAGES[2]]},
    "nothing carries loss": {"messages": [MESSAGES[1], MESSAGES[2] | {"weight": 0}]},
    "'completion' must be text, not null": {"prompt": "What is two?", "chosen": "A number."},
    "arguments of tool call 'add' is not JSON": {
        "messages": [
            MESSAGES[1],
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
        ]
    },
    "only the assistant calls tools": {"messages": [MESSAGES[1] | {"tool_calls": [{}]}, MESSAGES[2]]},
}


def test_bad_records_are_named_by_line_and_the_rest_is_shown_and_counted(tokenizer: str, tmp_path: Path) -> None:
    raw = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    source = write_lines(tmp_path / "chat.jsonl", [*BAD.values(), raw])
    output = str(tmp_path / "corpus")
    command = ["sft", "--input", source, "--tokenizer", tokenizer, "--output", output, "--show", "3"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for line, reason in enumerate(BAD, 1):
        assert re.search(rf"chat\.jsonl:{line}: .*{re.escape(reason)}", done.output), reason
    assert "1 conversations, 4 tokens, 2 with loss (50.00%)" in done.output
    assert len(spans(done.output)) == 1
    assert IndexedDataset(f"{output}.loss").document(0).tolist() == [0, 0, 1, 1]
    assert CliRunner().invoke(app, ["verify", output]).exit_code == 0
    Path(f"{output}.loss.bin").write_bytes(bytes([0, 0, 1, 7]))
    damaged = CliRunner().invoke(app, ["verify", output])
    assert damaged.exit_code == 2
    assert "loss.bin is not what was written" in damaged.output
    Path(f"{output}.loss.json").unlink()
    assert "loss: document 0 has token id 7" in CliRunner().invoke(app, ["verify", output]).output
    assert CliRunner().invoke(app, [*command, "--on-error", "fail"]).exit_code == 2


def test_a_holdout_splits_conversations_with_their_masks(tokenizer: str, tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": f"Say {n}"}, MESSAGES[2]]} for n in range(40)]
    source = write_lines(tmp_path / "chat.jsonl", records)
    result = make_sft_corpus([source], str(tmp_path / "c"), tokenizer, load_chat_template("chatml"), holdout=0.3)
    counts = {prefix: corpus.documents for prefix, corpus in result.corpora.items()}
    assert list(counts) == [str(tmp_path / "c-train"), str(tmp_path / "c-valid")]
    assert sum(counts.values()) == 40
    assert 3 < counts[str(tmp_path / "c-valid")] < 24
    assert len(set(result.loss_tokens.values())) == 2


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    """For example a template that drops the reasoning of earlier turns: text with loss would be missing."""
    template = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}<e>{% endfor %}", "<e>")
    with pytest.raises(ValueError, match="before assistant message 2 differently as a prompt"):
        template.segments(MESSAGES)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(attack: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        ChatTemplate(attack, "<e>").render(MESSAGES)


@pytest.mark.parametrize(("name", "said"), [("nowhere", "llama3"), ("file", "--end-of-turn"), ("broken", "not valid")])
def test_templates_that_cannot_be_used_are_refused(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{{ messages }}")
    (tmp_path / "broken").write_text("{% if %}")
    with pytest.raises(DataError, match=said):
        load_chat_template(str(tmp_path / name), "<e>" if name == "broken" else None)
