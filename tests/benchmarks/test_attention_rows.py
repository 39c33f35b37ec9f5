"""A row of the attention benchmark says what it means, and its inputs make the gate select the promised blocks."""

import pytest
import torch

from benchmarks.attention import PLAIN, QUICK, ROWS
from benchmarks.attention_check import LIMITS, errors, wrong
from benchmarks.attention_routing import routed_fraction
from benchmarks.attention_rows import Case, Row, backends, short
from benchmarks.attention_table import BARS


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("8K:512/3", Case(8192, 512, 3)),
        ("1M:4K/12", Case(2**20, 4096, 12)),
        ("300:64/2,heads=8,kv=8,d=64", Case(300, 64, 2, heads=8, kv_heads=8, head_dim=64)),
        ("128K:128/8,routing=sink", Case(2**17, 128, 8, routing="sink")),
        ("64K:4096/12,documents=7", Case(2**16, 4096, 12, documents="7")),
        ("32K:128/8,documents=32x1K", Case(2**15, 128, 8, documents="32x1K")),
    ],
)
def test_a_row_is_read_and_written(text: str, case: Case) -> None:
    assert Case.parse(text) == case
    assert Case.parse(case.name) == case


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8K", "TOKENS:BLOCK/TOPK"),
        ("8K:512", "TOKENS:BLOCK/TOPK"),
        ("8K:512/3,width=3", "'width=3' given, allowed: heads, kv, d, routing, documents, inputs"),
        ("8K:512/3,routing=bad", "'bad' given, allowed: random, sink, local, uniform"),
        ("8K:512/3,heads=x", "heads 'x' given, a whole number"),
        ("8K:512/3,heads=6,kv=4", "4 key/value heads do not divide 6"),
        ("8K:512/3,documents=3x1K", "do not sum to 8192"),
        ("8K:512/3,documents=some", "a seed or COUNTxTOKENS"),
    ],
)
def test_a_wrong_row_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case.parse(text)


def test_the_default_rows_are_those_with_a_bar_and_their_variants() -> None:
    assert set(BARS) <= set(PLAIN.split()) <= set(ROWS)
    assert set(QUICK) <= set(ROWS)
    cases = [Case.parse(text) for text in ROWS]
    assert [case.name for case in cases] == ROWS
    assert {case.block_size for case in cases if len(case.lengths()) > 1} == {128, 4096}
    assert all(max(case.lengths()) > case.topk * case.block_size for case in cases), "nothing to select"
    for tokens in (2**17, 2**16):
        varied = [case for case in cases if case.tokens == tokens and not case.is_plain]
        assert {case.routing for case in varied} == {"random", "sink", "local", "uniform"}
        assert any(case.heads == case.kv_heads for case in varied)
        assert any(case.head_dim == 64 for case in varied)


def test_packed_documents_fill_the_row_with_the_same_lengths_each_time() -> None:
    case = Case.parse("128K:128/8,documents=1")
    lengths = case.lengths()
    assert lengths == case.lengths() != Case.parse("128K:128/8,documents=2").lengths()
    assert sum(lengths) == 2**17
    assert min(lengths) >= 1
    assert max(lengths) <= 2**15
    assert len(lengths) > 8


def test_lengths_are_named_as_they_are_written() -> None:
    assert [short(n) for n in (2**20, 3 * 2**20, 2**17, 1536, 1500)] == ["1M", "3M", "128K", "1536", "1500"]


def test_our_kernels_come_first_among_the_backends() -> None:
    assert set(backends()) == {"triton", "composed"}
    assert not {"auto", "reference"} & set(backends())


SMALL = [
    "1K:64/4,heads=4,kv=2,d=64",
    "1K:64/4,heads=4,kv=2,d=64,routing=sink",
    "1K:64/4,heads=4,kv=2,d=64,routing=local",
    "1K:64/4,heads=4,kv=2,d=64,routing=uniform",
    "1K:32/3,heads=2,kv=2,d=64,routing=sink,documents=3",
    "1K:32/3,heads=2,kv=2,d=64,routing=local,documents=4x256",
]


@pytest.mark.parametrize("text", SMALL)
def test_the_gate_chooses_what_the_routing_wants_and_the_reference_passes_the_check(text: str) -> None:
    row = Row(Case.parse(text), "cpu", "reference")
    outcome = row.both()
    fraction = routed_fraction(row.case.routing, row.layout(), outcome[2][0], row.block_size)
    assert fraction > (0.95 if row.case.routing in ("random", "uniform") else 0.99)
    assert wrong(errors(row, outcome)) == {}


def test_a_choice_that_misses_its_routing_is_told() -> None:
    """The fraction of random inputs under each other routing is far from one."""
    row = Row(Case.parse(SMALL[0]), "cpu", "reference")
    *_, layout, (selected,) = row.forward()
    assert routed_fraction("sink", layout, selected, 64) < 0.7
    assert routed_fraction("local", layout, selected, 64) < 0.7
    sink = Row(Case.parse(SMALL[1]), "cpu", "reference").forward()[3][0]
    assert routed_fraction("uniform", layout, sink, 64) < 0.9


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_check_sees_a_wrong_result(name: str) -> None:
    row = Row(Case.parse("1K:64/4,heads=4,kv=2,d=64,documents=5"), "cpu", "reference")
    out, lse, (selected,), dq, dk, dv = row.both()
    if name == "selection":
        last = selected[:, :, 0].clone()
        selected[:, :, 0] = torch.where(last >= 0, last + 1, last)
    else:
        tensor = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}[name]
        tensor *= 1.05
    assert name in wrong(errors(row, (out, lse, (selected,), dq, dk, dv)))


def test_a_result_that_is_no_number_is_wrong() -> None:
    assert set(wrong(dict.fromkeys(LIMITS, float("nan")))) == set(LIMITS)
