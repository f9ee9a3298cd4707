"""Quantities: what is printed can be read, and what cannot be read says so."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.core import (
    InputError,
    format_bytes,
    format_bytes_per_s,
    format_count,
    format_flops,
    format_flops_per_s,
    format_seconds,
    parse_bytes,
    parse_flops_per_s,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (-(2**30), "-1.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (math.inf, "inf"),
    ],
)
def test_format_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (3e-9, "3 ns"),
        (999.96e-6, "1.0 ms"),
        (0.9999, "1.00 s"),
        (119, "119.00 s"),
        (121, "2.0 min"),
        (10800, "3.0 h"),
    ],
)
def test_format_seconds(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9999, "9999"),
        (12345, "12.3k"),
        (999_999, "1.00M"),
        (175e9, "175B"),
        (0.5, "0.50"),
    ],
)
def test_format_count(value, text):
    assert format_count(value) == text


def test_format_speeds():
    assert format_flops(3e15) == "3.0 PFLOP"
    assert format_flops_per_s(999.99e9) == "1.0 TFLOP/s"
    assert format_bytes_per_s(3.125e9) == "3.1 GB/s"


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "16GiB", 16 * 2**30),
        (parse_bytes, "40 gb", 40 * 10**9),
        (parse_bytes, "1.5KiB", 1536),
        (parse_bytes, "7", 7),
        (parse_bytes, 7.0, 7),
        (parse_rate, "25Gbps", 25e9 / 8),
        (parse_rate, "400 Gbit/s", 50e9),
        (parse_rate, "300GB/s", 300e9),
        (parse_rate, "1GiB/s", 2.0**30),
        (parse_rate, 5, 5.0),
        (parse_seconds, "10us", 10e-6),
        (parse_seconds, "10µs", 10e-6),
        (parse_seconds, "0s", 0.0),
        (parse_flops_per_s, "989.4 TFLOPS", 989.4e12),
        (parse_flops_per_s, "67TFLOP/s", 67e12),
    ],
)
def test_parse(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, "16 apples"),
        (parse_bytes, ""),
        (parse_bytes, "-1GB"),
        (parse_bytes, math.nan),
        (parse_rate, "25G"),
        (parse_rate, "-25Gbps"),
        (parse_rate, math.inf),
        (parse_seconds, "10"),
        (parse_seconds, "-3s"),
        (parse_flops_per_s, "5GB/s"),
        (parse_bytes, "1e999GB"),
    ],
)
def test_errors_name_texts_that_are_no_quantity(parse, text):
    with pytest.raises(InputError, match=f"{text!r} is not a .* such as"):
        parse(text)


@given(st.integers(min_value=0, max_value=10**15))
def test_bytes_round_trip_to_the_printed_digit(value):
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=0.06)


@given(st.floats(min_value=1e-8, max_value=1e5))
def test_seconds_round_trip_to_the_printed_digit(value):
    assert parse_seconds(format_seconds(value).replace(" ", "")) == pytest.approx(value, rel=0.06)
