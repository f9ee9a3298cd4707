"""Prices of hosts per hour, by device."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from ..core import InputError, listing, shortened
from ._device import DEVICES

SAMPLE_PRICES = "sample_prices.csv"
"""The sample that ships: a price of most hosts that can be rented, each with its source and its
day, to be replaced by your own."""
NO_PRICE = "no price"

_CURRENCY = re.compile(r"\s*\(\s*([A-Za-z]{3})\s*\)$")
_COLUMNS = ("device", "devices per host", "price per hour")
_SOURCE = "source"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPrice:
    """One kind of host: its devices, how many, and what it costs by the hour in a currency, such as
    `USD`; empty if that is not said. `source` says where the price comes from, and of which day it
    is.
    """

    device: str
    devices_per_host: int
    price_per_hour: float
    currency: str = ""
    source: str = ""


def load_prices(path: str | os.PathLike[str] | None = None) -> tuple[HostPrice, ...]:
    """Prices from a CSV file with the columns device, devices per host, price per hour, and source,
    which may be left out; by default the sample. The third column may name its currency: price per
    hour (USD).

    Lines that begin with `#` are remarks. Hosts whose price is `no price` are left out.

    Raises:
        InputError: Everything that is wrong with the file.
    """
    if path is None:
        text = resources.files(__package__).joinpath(SAMPLE_PRICES).read_text(encoding="utf-8")
        return _read(text, SAMPLE_PRICES)
    name = shortened(os.fspath(path), 60)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(
            f"prices {name!r} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    return _read(text, name)


def _read(text: str, name: str) -> tuple[HostPrice, ...]:
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    reader = csv.reader(io.StringIO("\n".join(lines)), skipinitialspace=True)
    rows = [[cell.strip() for cell in row] for row in reader]
    advice = f"The columns are {', '.join(_COLUMNS)}, as in: H100, 8, 55.04"
    named = [cell.replace("_", " ") for cell in rows[0]] if rows else []
    currency = _CURRENCY.search(named[2]) if len(named) > 2 else None
    if currency:
        named[2] = _CURRENCY.sub("", named[2])
    if [cell.lower() for cell in named] not in (list(_COLUMNS), [*_COLUMNS, _SOURCE]):
        raise InputError(
            f"prices {name!r} do not begin with a line that names the columns. {advice}"
        )
    faults: list[str] = []
    money = currency[1].upper() if currency else ""
    prices = [_price(row, number, money, faults) for number, row in enumerate(rows[1:], 1)]
    if not any(prices) and not faults:
        faults.append("there is no price")
    if faults:
        raise InputError(listing(f"prices {name!r} cannot be used", faults, advice))
    return tuple(price for price in prices if price is not None)


def _price(row: Sequence[str], number: int, currency: str, faults: list[str]) -> HostPrice | None:
    if not len(_COLUMNS) <= len(row) <= len(_COLUMNS) + 1:
        faults.append(f"row {number} has {len(row)} cells")
        return None
    by_folded = {device.casefold(): device for device in DEVICES}
    device = by_folded.get(row[0].casefold())
    if device is None:
        faults.append(f"row {number}: there is no device {shortened(row[0], 30)!r}")
    count = int(row[1]) if row[1].isdecimal() and len(row[1]) < 6 else 0
    if count < 1:
        faults.append(f"row {number}: {shortened(row[1], 30)!r} is no number of devices")
    is_open = row[2].casefold() == NO_PRICE
    try:
        price = float(row[2])
    except ValueError:
        price = math.nan
    if not is_open and not (math.isfinite(price) and price > 0):
        faults.append(f"row {number}: {shortened(row[2], 30)!r} is no price")
    if device is None or count < 1 or not (math.isfinite(price) and price > 0):
        return None
    return HostPrice(
        device=device,
        devices_per_host=count,
        price_per_hour=price,
        currency=currency,
        source=row[3] if len(row) > len(_COLUMNS) else "",
    )
