"""Tables of data: the columns that are declared, and what is said in each cell."""

from dataclasses import dataclass

from aliquot.core import format_seconds
from aliquot.report import Column, as_text, table


@dataclass
class Run:
    name: str
    seconds: float | None


def test_cells_come_from_keys_attributes_and_functions():
    columns = (
        Column("name", "name"),
        Column("time", "seconds", format_seconds, number=True),
        Column("letters", lambda run: len(run["name"] if isinstance(run, dict) else run.name)),
    )
    rows = [{"name": "a", "seconds": 0.25}, {"name": "bcd"}]
    assert as_text(table("Runs", rows, *columns)).split("\n")[1:] == [
        "",
        " name       time   letters",
        " " + "─" * 25,
        " a      250.0 ms   1",
        " bcd               3",
    ]
    of_objects = table("Runs", [Run("a", 0.25), Run("bcd", None)], *columns)
    assert as_text(of_objects) == as_text(table("Runs", rows, *columns))


def test_columns_may_be_left_out():
    column = Column("name", "name")
    shown = table("Runs", [{"name": "a"}], column, Column("time", "seconds", shown=False))
    assert as_text(shown) == as_text(table("Runs", [{"name": "a"}], column))
