"""Formatters and parsers of quantities: bytes, seconds, FLOP, counts and rates as people write
them.

Memory is binary (KiB, MiB, GiB), links are decimal (GB/s, Gbps), as data sheets have them.
"""

from __future__ import annotations

import math
import re

from ._errors import InputError

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BINARY_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_SI_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
}

_NUMBER = r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
_BYTES_RE = re.compile(_NUMBER + r"(?:([kmgtp]i?)?b)?\s*", re.IGNORECASE)
_RATE_RE = re.compile(
    _NUMBER + r"([kKMGTP]i?)?(?:(B|byte|bytes)(?:/s|ps)|(b|bit|bits)(?:/s|ps))\s*"
)
_FLOPS_RE = re.compile(_NUMBER + r"([kKMGTPE])?(?:FLOPs?/s|FLOPS|flops?/s)\s*")
_SECONDS_RE = re.compile(_NUMBER + r"(ns|us|µs|μs|ms|s|min|h)\s*")


def _scaled(value: float, base: float, prefixes: tuple[str, ...], unit: str) -> str:
    size = abs(value)
    for power in range(len(prefixes) - 1, -1, -1):
        # Rounding up must not print "1024.0 MiB" or "1000.0 MFLOP".
        if size >= base**power * (1 - 5e-5) or power == 0:
            scaled = value / base**power
            digits = f"{scaled:.0f}" if power == 0 and scaled == int(scaled) else f"{scaled:.1f}"
            return f"{digits} {prefixes[power]}{unit}".rstrip()
    raise AssertionError("unreachable: the smallest prefix always matches")


def format_bytes(value_bytes: float) -> str:
    """A size of memory in binary units.

    >>> format_bytes(512), format_bytes(1536), format_bytes(80 * 2**30)
    ('512 B', '1.5 KiB', '80.0 GiB')
    """
    return (
        str(value_bytes)
        if not math.isfinite(value_bytes)
        else _scaled(value_bytes, 1024.0, _BINARY_PREFIXES, "B")
    )


def format_share_of_limit(value: float, limit: float) -> str:
    """A share of a limit in percent. Only the limit itself is 100%.

    >>> [format_share_of_limit(x, 1000) for x in (436, 997, 1000, 1002)]
    ['44%', '99%', '100%', '101%']
    """
    share = value / limit
    percent = round(100 * share)
    return f"{min(percent, 99) if share < 1 else max(percent, 101) if share > 1 else 100}%"


def format_flops(value_flops: float) -> str:
    """A number of floating-point operations: an amount of work, not a speed.

    >>> format_flops(2.5e12)
    '2.5 TFLOP'
    """
    return (
        str(value_flops)
        if not math.isfinite(value_flops)
        else _scaled(value_flops, 1e3, _SI_PREFIXES, "FLOP")
    )


def format_flops_per_s(value_flops_per_s: float) -> str:
    """A speed of computation.

    >>> format_flops_per_s(989.4e12)
    '989.4 TFLOP/s'
    """
    return f"{format_flops(value_flops_per_s)}/s"


def format_bytes_per_s(value_bytes_per_s: float) -> str:
    """A bandwidth in decimal units, as data sheets state it.

    >>> format_bytes_per_s(450e9)
    '450.0 GB/s'
    """
    if not math.isfinite(value_bytes_per_s):
        return f"{value_bytes_per_s} B/s"
    return _scaled(value_bytes_per_s, 1e3, _SI_PREFIXES, "B/s")


def format_count(value: float) -> str:
    """A number of things (parameters, tokens): exact below 10,000, then with three digits and k, M,
    B or T.

    >>> format_count(9984), format_count(124_439_808), format_count(1.3e9)
    ('9984', '124M', '1.30B')
    """
    if not math.isfinite(value) or (abs(value) < 10_000 and value == int(value)):
        return str(int(value)) if math.isfinite(value) else str(value)
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale * 0.9995:
            scaled = abs(value) / scale
            decimals = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{value / scale:.{decimals}f}{letter}"
    return f"{value:.2f}"


def format_seconds(value_s: float) -> str:
    """A time, from nanoseconds to hours.

    >>> format_seconds(12e-6), format_seconds(0.0345), format_seconds(2.5), format_seconds(150)
    ('12.0 us', '34.5 ms', '2.50 s', '2.5 min')
    """
    size = abs(value_s)
    if not math.isfinite(value_s) or size == 0:
        return f"{value_s:.0f} s"
    for limit, scale, unit, decimals in (
        (0.9995e-6, 1e-9, "ns", 0),
        (0.9995e-3, 1e-6, "us", 1),
        (0.9995, 1e-3, "ms", 1),
        (120.0, 1.0, "s", 2),
        (7200.0, 60.0, "min", 1),
    ):
        if size < limit:
            return f"{value_s / scale:.{decimals}f} {unit}"
    return f"{value_s / 3600:.1f} h"


def parse_bytes(text: str | float) -> int:
    """Bytes from `"16GiB"` (binary), `"40GB"` (decimal) or a plain number of bytes. Case does not
    count.

    Raises:
        InputError: Not a size, negative, or not finite.

    >>> parse_bytes("16GiB"), parse_bytes("40GB"), parse_bytes(4096)
    (17179869184, 40000000000, 4096)
    """
    wanted = 'a size such as "16GiB" (2**30) or "40GB" (10**9)'
    if not isinstance(text, str):
        return round(_checked(float(text), text, wanted))
    match = _BYTES_RE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not {wanted}.")
    prefix = (match[2] or "").lower()
    scale = _BINARY[prefix[0].upper() + "i"] if prefix.endswith("i") else _decimal(prefix)
    return round(_checked(float(match[1]) * scale, text, wanted))


def parse_rate(text: str | float) -> float:
    """Bytes per second from `"25Gbps"`, `"25Gbit/s"` (bits), `"300GB/s"` (bytes), or a plain number
    of bytes/s.

    Small `b` is a bit and capital `B` a byte, so case counts here.

    Raises:
        InputError: Not a rate, negative, or not finite.

    >>> parse_rate("25Gbps"), parse_rate("300GB/s")
    (3125000000.0, 300000000000.0)
    """
    wanted = 'a bandwidth such as "25Gbps" (bits) or "300GB/s" (bytes)'
    if not isinstance(text, str):
        return _checked(float(text), text, wanted)
    match = _RATE_RE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not {wanted}.")
    prefix = match[2] or ""
    scale = _BINARY[prefix[0].upper() + "i"] if prefix.endswith("i") else _decimal(prefix)
    return _checked(float(match[1]) * scale / (8.0 if match[4] else 1.0), text, wanted)


def parse_flops_per_s(text: str | float) -> float:
    """FLOP per second from `"312TFLOP/s"`, `"312 TFLOPS"`, or a plain number of FLOP/s.

    Raises:
        InputError: Not a speed, negative, or not finite.

    >>> parse_flops_per_s("312TFLOP/s")
    312000000000000.0
    """
    wanted = 'a speed such as "312TFLOP/s"'
    if not isinstance(text, str):
        return _checked(float(text), text, wanted)
    match = _FLOPS_RE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not {wanted}.")
    return _checked(float(match[1]) * _decimal(match[2] or ""), text, wanted)


def parse_seconds(text: str | float) -> float:
    """Seconds from `"10us"`, `"1.5ms"`, `"2min"`, or a plain number of seconds.

    Raises:
        InputError: Not a time, negative, or not finite.

    >>> parse_seconds("10us"), parse_seconds("2min")
    (1e-05, 120.0)
    """
    wanted = 'a time such as "10us", "1.5ms" or "2min"'
    if not isinstance(text, str):
        return _checked(float(text), text, wanted)
    match = _SECONDS_RE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not {wanted}.")
    # Divide by a whole number where there is one: 10 / 1e6 is exactly 1e-05, 10 * 1e-6 is not.
    scale = _SECONDS[match[2]]
    value = float(match[1]) / round(1 / scale) if scale < 1 else float(match[1]) * scale
    return _checked(value, text, wanted)


def _decimal(prefix: str) -> float:
    letter = prefix if prefix in _DECIMAL else prefix.upper()
    return _DECIMAL["k" if letter == "K" else letter]


def _checked(value: float, text: str | float, wanted: str) -> float:
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{text!r} is not {wanted}: it must be finite and not negative.")
    return value
