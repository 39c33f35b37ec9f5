"""Human-sized numbers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from moba_train.config.base import Length, TokenBudget, format_count, parse_number

length, budget = TypeAdapter(Length), TypeAdapter(TokenBudget)


@pytest.mark.parametrize(
    ("text", "as_length", "as_budget"),
    [
        ("128K", 131072, 128_000),
        ("1m", 2**20, 10**6),
        ("1.5 B", 3 * 2**29, 1_500_000_000),
        ("2T", 2**41, 2 * 10**12),
        ("4096", 4096, 4096),
        ("65_536", 65536, 65536),
        ("1e9", 10**9, 10**9),
        ("1_6.5e3", 16_500, 16_500),
        (8192, 8192, 8192),
        (5e6, 5_000_000, 5_000_000),
    ],
)
def test_lengths_count_in_1024_and_budgets_in_1000(text: str | float, as_length: int, as_budget: int) -> None:
    assert length.validate_python(text) == as_length
    assert budget.validate_python(text) == as_budget


def test_zeros_with_any_exponent_are_zero() -> None:
    assert budget.validate_python("0e999999999") == budget.validate_python("0.0e999999999K") == 0


@pytest.mark.parametrize("value", ["", "K", "12Q", "-1", "1.5", "0.0001K", "1 2", "nan", 1.5, True, None, [1], -1])
def test_everything_else_is_refused(value: Any) -> None:
    for adapter in (length, budget):
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


@pytest.mark.parametrize("value", ["9999999999T", "1e300", "9" * 400, 10**22, 1e300, 2**53 + 1])
def test_more_tokens_than_float64_counts_are_refused(value: str | float) -> None:
    for adapter in (length, budget):
        with pytest.raises(ValidationError, match="allowed: at most 9,007,199,254,740,992 tokens"):
            adapter.validate_python(value)


def test_zero_is_a_budget_but_no_length() -> None:
    assert budget.validate_python(0) == 0
    with pytest.raises(ValidationError):
        length.validate_python(0)


@given(st.integers(0, 2**53))
def test_whole_numbers_survive_as_text(number: int) -> None:
    assert parse_number(str(number), 1000) == parse_number(number, 1000) == number


@pytest.mark.parametrize(
    ("number", "base", "text"),
    [
        (0, 1000, "0"),
        (0.125, 1000, "0.125"),
        (999, 1000, "999"),
        (999.7, 1000, "1K"),
        (1_235_814_400, 1000, "1.24B"),
        (999_999_999, 1000, "1B"),
        (131072, 1024, "128K"),
        (1000, 1024, "1000"),
        (1018 * 1024, 1024, "1018K"),
        (2**20 - 1, 1024, "1M"),
        (5e12, 1000, "5T"),
        (-16_100, 1000, "-16.1K"),
        (5e15, 1000, "5000T"),
    ],
)
def test_counts_are_shown_with_three_digits(number: float, base: int, text: str) -> None:
    assert format_count(number, base) == text


@given(st.integers(0, 99_999), st.sampled_from("KMBT"))
def test_decimals_are_exact(hundredths: int, suffix: str) -> None:
    """16.1 * 1000 is 16100.000000000002 in float64."""
    text = f"{hundredths // 100}.{hundredths % 100:02}{suffix}"
    assert parse_number(text, 1000) == hundredths * 1000 ** " KMBT".index(suffix) // 100
