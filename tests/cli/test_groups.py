"""Groups of options: the options that a verb gets, and the values that reach it."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from aliquot.cli._groups import takes_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    width: Annotated[int, typer.Option(min=1, help="How wide.")]
    deep_layers: Annotated[int, typer.Option()] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderSizes:
    width: Annotated[int, typer.Option()] = 1


def invoke(verb, *arguments):
    app = typer.Typer(add_completion=False)
    app.command()(verb)
    return CliRunner().invoke(app, arguments)


def test_fields_are_options_with_their_defaults():
    given = []

    @takes_groups
    def verb(name: Annotated[str, typer.Argument()], sizes: Sizes, loud: bool = False) -> None:
        given.append((name, sizes, loud))

    assert invoke(verb, "a", "--width", "2").exit_code == 0
    assert invoke(verb, "b", "--deep-layers", "5", "--loud", "--width", "4").exit_code == 0
    assert given == [
        ("a", Sizes(width=2, deep_layers=3), False),
        ("b", Sizes(width=4, deep_layers=5), True),
    ]


def test_options_of_a_group_are_checked_and_described_like_others():
    @takes_groups
    def verb(sizes: Sizes) -> None:
        """Print nothing."""

    assert "How wide." in invoke(verb, "--help").output
    assert invoke(verb).exit_code == 2
    assert invoke(verb, "--width", "0").exit_code == 2


def test_two_groups_with_one_option_are_refused():
    def verb(sizes: Sizes, others: WiderSizes) -> None:
        pass

    with pytest.raises(ValueError, match="width"):
        takes_groups(verb)
