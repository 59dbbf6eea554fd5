"""Printing counts, bytes and durations."""

import pytest

from toolkit.units import divisors, format_bytes, format_count, format_duration, three_digits, with_article


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (0.5, "0.5"),
        (1_000, "1k"),
        (1_234, "1.23k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (124_439_808, "124M"),
        (7e9, "7B"),
        (1.5e12, "1.5T"),
        (2e18, "2e+03P"),
        (-1_234, "-1.23k"),
    ],
)
def test_a_count_prints_with_three_digits(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (21.66, "21.7"), (999.4, "999"), (999.6, "1,000"), (2_684.2, "2,684")],
)
def test_a_number_prints_with_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (80 * 2**30, "80.00 GiB"),
        (2**50, "1.00 PiB"),
    ],
)
def test_bytes_print_in_powers_of_1024(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (75, "1m15s"),
        (3_599.6, "1h00m"),
        (3_720, "1h02m"),
        (90_000, "1d01h"),
    ],
)
def test_a_duration_prints_in_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("noun", "text"), [("int", "an int"), ("list", "a list"), ("Identity", "an Identity")])
def test_an_article_fits_its_noun(noun: str, text: str) -> None:
    assert with_article(noun) == text


@pytest.mark.parametrize("number", [1, 2, 12, 49, 97, 360, 2**31 - 1, 2**30])
def test_divisors_are_those_that_division_finds(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % size == 0 for size in found)
    if number < 1000:
        assert found == [size for size in range(1, number + 1) if number % size == 0]
    assert divisors(number, 6) == [size for size in range(1, 7) if number % size == 0]
