"""`moba-data sft`: assistant messages up to the end of the turn carry loss, in every format and template."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.conversations import parse_record
from data_tools.sft import _single_token, make_sft_corpus
from data_tools.show import load_decoder, show_documents
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError
from moba_train.tools.chat.load import Template, load_chat_template
from moba_train.tools.chat.template import BUILT_IN, ChatTemplate, Conversation
from moba_train.tools.text_tokenizer import ChatTokenizer, load_text_tokenizer, load_tokenizer
from tests.commands import run_app

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
    """Texts between the marks."""
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
    "input_ids must hold whole numbers": {"input_ids": [1, 5, True], "loss_mask": [0, 0, 1]},
    "token id 999": {"input_ids": [1, 999], "loss_mask": [0, 1]},
    "from 'robot' is unknown; allowed: human, user": {"conversations": [{"from": "robot", "value": "x"}]},
    "role 'assistent' is unknown; allowed: system, developer, user, assistant, tool (did you mean 'assistant'?)": {
        "messages": [MESSAGES[1], {"role": "assistent", "content": "A number."}]
    },
    "weight 1.5; allowed: 0": {"messages": [MESSAGES[1], MESSAGES[2] | {"weight": 1.5}]},
    "only the assistant's messages carry loss": {"messages": [MESSAGES[1] | {"weight": 1}, MESSAGES[2]]},
    "nothing carries loss": {"messages": [MESSAGES[1], MESSAGES[2] | {"weight": 0}]},
    "'completion' must be text, not null": {"prompt": "What is two?", "chosen": "A number."},
    "arguments of tool call 'add' is not JSON": {
        "messages": [
            MESSAGES[1],
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
        ]
    },
    "surrogates not allowed": {"messages": [MESSAGES[1] | {"content": "\ud800"}, MESSAGES[2]]},
    "only the assistant calls tools": {"messages": [MESSAGES[1] | {"tool_calls": [{}]}, MESSAGES[2]]},
}


def test_bad_records_are_named_by_line_and_the_rest_is_shown_and_counted(tokenizer: str, tmp_path: Path) -> None:
    raw = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    source = write_lines(tmp_path / "chat.jsonl", [*BAD.values(), raw])
    output = str(tmp_path / "corpus")
    command = ["sft", "--input", source, "--tokenizer", tokenizer, "--output", output]
    done = run_app(app, *command)
    for line, reason in enumerate(BAD, 1):
        assert re.search(rf"chat\.jsonl:{line}: .*{re.escape(reason)}", done.output), reason
    assert "1 conversations, 4 tokens, 2 with loss (50.00%), the longest 4" in done.output
    assert IndexedDataset(f"{output}.loss").document(0).tolist() == [0, 0, 1, 1]
    assert CliRunner().invoke(app, ["verify", output]).exit_code == 0
    Path(f"{output}.loss.bin").write_bytes(bytes([0, 0, 1, 7]))
    damaged = run_app(app, "verify", output, code=2)
    assert "loss.bin is not what was written" in damaged.output
    Path(f"{output}.loss.json").unlink()
    assert "loss: document 0 has token id 7" in CliRunner().invoke(app, ["verify", output]).output
    assert Path(f"{output}.skipped.txt").read_text().count("\n") == len(BAD)
    strict = CliRunner().invoke(app, [*command, "--output", f"{output}-strict", "--on-error", "fail"])
    assert "correct the record, or skip such records" in strict.output
    assert strict.exit_code == 2
    assert not Path(f"{output}-strict.idx").exists()


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL_MESSAGES = [
    {"role": "user", "content": "How cold is Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4 degrees", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Cold."},
]


def texts_with_loss(record: Any, template: Template) -> list[str]:
    conversation = parse_record(record)
    assert isinstance(conversation, Conversation)
    return [segment.text for sample in template.split(conversation).samples for segment in sample if segment.in_loss]


@pytest.mark.parametrize(("name", "arguments"), [("chatml", "arguments"), ("llama3", "parameters")])
def test_tool_calls_carry_loss_and_tool_results_none(name: str, arguments: str) -> None:
    call, answer = texts_with_loss({"messages": TOOL_MESSAGES}, load_chat_template(name))
    end = BUILT_IN[name][1]
    assert json.dumps({"name": "weather", arguments: {"city": "Oslo"}}) in call
    assert call.endswith(end)
    assert "degrees" not in call
    assert answer == f"Cold.{end}"


def test_templates_get_the_tools_of_a_record() -> None:
    template = ChatTemplate(
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}<e>{% endfor %}{{ 'assistant:' if add_generation_prompt }}",
        "<e>",
    )
    record = {"messages": TOOL_MESSAGES, "tools": json.dumps([TOOL])}
    conversation = parse_record(record)
    assert isinstance(conversation, Conversation)
    assert template.render(*conversation[:1], tools=conversation.tools).startswith(json.dumps([TOOL]))
    assert '"arguments": {"city": "Oslo"}' in texts_with_loss(record, template)[0]
    assert "<tools>" in load_chat_template("chatml").split(conversation).samples[0][0].text
    with pytest.raises(ValueError, match="llama3 has no place for a list of tools"):
        load_chat_template("llama3").split(conversation)


@pytest.mark.parametrize(
    "options",
    ["", "(ensure_ascii=True)", "(indent=2)", "(false, 2)", "(separators=(',', ':'))", "(sort_keys=true)"],
)
def test_tojson_takes_the_options_that_it_has_in_transformers(options: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = f"{{{{ tools | tojson{options} }}}}"
    tools: list[Any] = [{"name": "météo", "arguments": {"b": "<", "a": [1, None]}}]
    theirs = render_jinja_template(conversations=[MESSAGES], tools=tools, chat_template=source)[0][0]
    assert ChatTemplate(source, "<e>").render(MESSAGES, tools=tools) == theirs


def test_templates_that_leave_out_tools_are_refused() -> None:
    source = "{% for m in messages %}{{ m.content }}<e>{% endfor %}"
    with pytest.raises(ValueError, match="leaves out the list of tools"):
        texts_with_loss({"messages": MESSAGES, "tools": [TOOL]}, ChatTemplate(source, "<e>"))
    with pytest.raises(ValueError, match="leaves out the tool calls of message 1"):
        texts_with_loss({"messages": TOOL_MESSAGES}, ChatTemplate(source, "<e>"))


def test_a_call_that_ends_in_another_way_does_not_extend_to_the_tools_result() -> None:
    end = "{{ '<m>' if m.tool_calls else '<e>' }}"
    source = f"{{% for m in messages %}}{{{{ m.content or m.tool_calls | tojson }}}}{end}{{% endfor %}}"
    with pytest.raises(ValueError, match="does not end message 1 with '<e>'"):
        texts_with_loss({"messages": TOOL_MESSAGES}, ChatTemplate(source, "<e>"))


def test_a_weight_of_0_and_prompts_carry_no_loss() -> None:
    template = load_chat_template("chatml")
    weighted = [*MESSAGES[:2], MESSAGES[2] | {"weight": 0}, MESSAGES[3], MESSAGES[4] | {"weight": 1}]
    last = ["Another one.<|im_end|>"]
    assert texts_with_loss({"messages": weighted}, template) == last
    assert texts_with_loss({"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}, template) == last
    strings = {"prompt": "What is two?", "completion": "A number."}
    assert texts_with_loss(strings, template) == ["A number.<|im_end|>"]
    conversation = parse_record(strings)
    assert isinstance(conversation, Conversation)
    assert template.render(*conversation[:1]) == template.render(MESSAGES[1:3])


def test_tools_that_are_nested_too_deeply_are_a_bad_record() -> None:
    nested: Any = {}
    for _ in range(200):
        nested = {"a": nested}
    with pytest.raises(ValueError, match="the list of tools is nested more than 64 levels deep"):
        parse_record({"messages": MESSAGES, "tools": [nested]})


def test_a_corpus_of_other_conversations_is_not_overwritten(tokenizer: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chat.jsonl", [{"messages": MESSAGES}])
    command = ["sft", "--input", source, "--tokenizer", tokenizer, "--output", str(tmp_path / "c")]
    assert CliRunner().invoke(app, command).exit_code == 0
    before = (tmp_path / "c.bin").read_bytes()
    again = CliRunner().invoke(app, command)
    assert "already complete" in again.output
    assert "1 conversations" in again.output
    for changed in (["--template", "llama3"], ["--end-of-turn", "<|im_end|>\n"]):
        other = run_app(app, *command, *changed, code=2)
        assert "exists and was made from other input or with other options; delete" in other.output
    write_lines(tmp_path / "chat.jsonl", [{"messages": MESSAGES[:3]}])
    assert CliRunner().invoke(app, command).exit_code == 2
    assert (tmp_path / "c.bin").read_bytes() == before


def test_a_marker_that_is_not_one_token_is_named_with_its_tokens(tokenizer: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chat.jsonl", [{"messages": [MESSAGES[1] | {"content": "<|own|>"}, MESSAGES[2]]}])
    model = load_tokenizer(tokenizer)
    result = make_sft_corpus([source], str(tmp_path / "c"), tokenizer, load_chat_template("chatml"))
    assert result.split_markers == {marker: len(model.encode(marker)) for marker in ("<|im_end|>", "<|im_start|>")}
    command = ["sft", "--input", source, "--tokenizer", tokenizer, "--output", str(tmp_path / "d")]
    printed = CliRunner().invoke(app, command).output
    assert (
        f"<|im_start|>, which the chat template writes, becomes {len(model.encode('<|im_start|>'))} tokens" in printed
    )
    single = ChatTemplate(BUILT_IN["chatml"][0].replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>"), "</s>")
    assert not make_sft_corpus([source], str(tmp_path / "e"), tokenizer, single).split_markers


def test_the_token_that_ends_a_turn_is_recorded(tokenizer: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chat.jsonl", [{"messages": MESSAGES}])
    chatml = BUILT_IN["chatml"][0]
    for end, token in (("<|im_end|>", None), ("</s>", load_tokenizer(tokenizer).eos_id)):
        template = ChatTemplate(chatml.replace("<|im_end|>", end), end)
        corpora = make_sft_corpus([source], str(tmp_path / f"corpus{token}"), tokenizer, template).corpora
        assert [(corpus.info or {})["end_of_turn_id"] for corpus in corpora.values()] == [token]


def test_an_end_of_turn_that_is_joined_to_its_neighbour_is_not_one_token(tmp_path: Path) -> None:
    """`END.` is [END, .] and twice [END, .END, .]: a full stop ends no turn."""
    from tokenizers import Tokenizer, models

    merges = [("E", "N"), ("EN", "D"), (".", "END")]
    pieces = ["E", "N", "D", ".", "END", *map("".join, merges)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    Tokenizer(models.BPE(vocabulary, merges)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer(load_text_tokenizer(tmp_path / "tokenizer.json"))
    assert [_single_token(tokenizer, marker) for marker in ("END.", "END")] == [None, vocabulary["END"]]


def test_a_holdout_splits_conversations_with_their_masks(tokenizer: str, tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": f"Say {n}"}, MESSAGES[2]]} for n in range(40)]
    source = write_lines(tmp_path / "chat.jsonl", records)
    result = make_sft_corpus([source], str(tmp_path / "c"), tokenizer, load_chat_template("chatml"), holdout=0.3)
    counts = {prefix: corpus.documents for prefix, corpus in result.corpora.items()}
    assert list(counts) == [str(tmp_path / "c-train"), str(tmp_path / "c-valid")]
    assert sum(counts.values()) == 40
    assert 3 < counts[str(tmp_path / "c-valid")] < 24
    assert len(set(result.loss_tokens.values())) == 2
    command = ["sft", "--input", source, "--tokenizer", tokenizer, "--output", str(tmp_path / "d")]
    done = run_app(app, *command, "--holdout", "0.00001")
    assert f"{tmp_path / 'd-valid'} is empty" in done.stderr
    assert "has put all 40 conversations into" in done.stderr


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


@pytest.mark.parametrize("name", ["chatml", "file"])
def test_an_empty_end_of_turn_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("{{ messages }}")
    with pytest.raises(DataError, match="--end-of-turn: given ''; allowed: non-empty text"):
        load_chat_template(name, "")
