"""A chat template from elsewhere cannot take the time, the memory or the disk of the machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from moba_train.errors import DataError
from moba_train.tools.chat.confined_template import LIMITS, ConfinedTemplate
from moba_train.tools.chat.load import TEMPLATE_BYTES, load_chat_template
from moba_train.tools.chat.template import BUILT_IN, ChatTemplate, Conversation, SplitConversation
from tests.data_tools.test_sft_messages import FORGETS, assistant, user

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "A number."},
]
SMALL = LIMITS._replace(seconds=1, memory=64 << 20)

ENDLESS = "takes more than 1 s of processor time"
HUGE = "takes more than 64 MiB of memory"
ATTACKS = {
    "nested loops": ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", ENDLESS),
    "large ranges": ("{% for i in range(10**6) %}{% for j in range(10**6) %}{% endfor %}{% endfor %}", "Range too big"),
    "doubling": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        HUGE,
    ),
    "center": ("{{ messages[0].role | center(10**10) }}", HUGE),
    "center, a constant that the compiler evaluates": ("{{ 'x' | center(10**10) }}", HUGE),
    "repeated": ("{{ messages[0].role * 10**10 }}", HUGE),
    "repeated, a constant": ("{{ 'x' * 10**10 }}", HUGE),
    "width of %": ("{{ '%10000000000d' % 1 }}", HUGE),
    "width of format": ("{{ '{:10000000000d}'.format(1) }}", HUGE),
    "method": ("{{ messages[0].role.ljust(10**10) }}", HUGE),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "macros that call twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        ENDLESS,
    ),
    "much text": ("{{ 'x' * 10**7 }}", "writes more than"),
    "nested too deeply": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "not valid Jinja"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_that_exceeds_a_limit_ends_with_its_name(attack: str) -> None:
    source, said = ATTACKS[attack]
    with pytest.raises((ValueError, DataError), match=said):
        ConfinedTemplate(source, "<e>", limits=SMALL).render(MESSAGES)


def test_only_the_conversation_that_exceeds_a_limit_is_refused() -> None:
    """Not those that travelled with it."""
    source = "{% for m in messages %}{{ m.content }}{{ 'x' * 10**10 if m.content == 'huge' }}<e>{% endfor %}"
    template = ConfinedTemplate(source, "<e>", limits=SMALL)
    answers = ["one", "two", "huge", "three", "four"]
    found = list(template.split_all(Conversation([{"role": "assistant", "content": text}]) for text in answers))
    assert isinstance(found[2], ValueError)
    del found[2], answers[2]
    written = [split.samples[0][0].text for split in found if not isinstance(split, ValueError)]
    assert written == [f"{text}<e>" for text in answers]


def test_a_conversation_of_many_turns_has_room_for_a_sample_of_each() -> None:
    """A template that drops thoughts of earlier turns."""
    turns = [user("x" * 4000), assistant("x" * 4000, reasoning_content="y")] * 50
    limits = SMALL._replace(reply=1 << 10, memory=1 << 30)
    assert len(ConfinedTemplate(FORGETS, "<e>", limits=limits).split(Conversation(turns)).samples) == 50


def test_a_template_that_keeps_exceeding_them_ends_the_job() -> None:
    template = ConfinedTemplate("{{ messages[0].role * 10**10 }}", "<e>", limits=SMALL)
    with pytest.raises(DataError, match="memory, as in 4 conversations before; give another"):
        list(template.split_all([Conversation(MESSAGES)] * 5))


def test_a_template_of_its_own_process_gives_what_it_gives_here(tmp_path: Path) -> None:
    """Conversations of a few bytes and of a megabyte, good and bad, in order."""
    source, end = BUILT_IN["chatml"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, "eos_token": end}))
    confined = load_chat_template(str(tmp_path))
    assert isinstance(confined, ConfinedTemplate)
    here = ChatTemplate(source, end)
    assert confined.render(MESSAGES, add_generation_prompt=True) == here.render(MESSAGES, add_generation_prompt=True)
    call = {"function": {"name": "add", "arguments": {"to": 2}}}
    calling: list[dict[str, Any]] = [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    long: list[dict[str, Any]] = [{"role": "user", "content": "é\ud800" * 500_000}, MESSAGES[1]]
    conversations = [
        Conversation(messages) for messages in (MESSAGES, MESSAGES[:1], calling, *[long] * 3, *[MESSAGES] * 200, long)
    ]
    conversations.append(Conversation(MESSAGES, [{"name": "add"}]))
    named: list[dict[str, Any]] = [MESSAGES[0] | {"name": "Ada"}, *MESSAGES[1:], MESSAGES[0]]
    conversations.append(Conversation(named, None, {"thinking": False}, ["id"]))
    found = [str(result) if isinstance(result, ValueError) else result for result in confined.split_all(conversations)]
    assert found == [
        str(result) if isinstance(result, ValueError) else result for result in here.split_all(conversations)
    ]
    unread = ["id", "messages[].name", "chat_template_kwargs.thinking"]
    assert isinstance(found[-1], SplitConversation)
    assert found[-1][1:] == (unread, 1)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[1]", b'{"chat_template": 3}', b"\xff"])
def test_a_folder_without_a_readable_template_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(DataError, match="tokenizer_config"):
        load_chat_template(str(tmp_path), "<e>")


def test_a_template_file_is_limited_and_does_not_lead_out_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOBA_TRAIN_DATA_ROOTS", raising=False)
    (tmp_path / "long.jinja").write_text("x" * (TEMPLATE_BYTES + 1))
    with pytest.raises(DataError, match="has 1,048,577 bytes; allowed: 1,048,576"):
        load_chat_template(str(tmp_path / "long.jinja"), "<e>")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"leads to .*secret, outside of"):
        load_chat_template(str(tmp_path / "model"), "<e>")
