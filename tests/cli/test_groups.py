"""Declared options: those of a verb, one by one and in groups, and the values that reach it."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from aliquot.cli._groups import argument, option, takes_options
from aliquot.cli._other_names import Verb

Depth = Annotated[int, option("How deep.", min=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    title: ClassVar[str] = "How large"

    width: int = option("How wide.", ..., min=1)
    deep_layers: Depth = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderSizes:
    width: int = option("How wide.", 1)


def invoke(verb, *arguments):
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=Verb)(takes_options(verb))
    return CliRunner().invoke(app, arguments)


def test_options_have_their_defaults_and_reach_the_verb():
    given = []

    def verb(
        *,
        name: str = argument("Of what."),
        sizes: Sizes,
        depth: Depth = 7,
        loud: bool = option("Louder.", False),
        fast: bool = option("Or slow.", True),
        found: str | None = option("Where.", names="--at -a"),
    ) -> None:
        given.append((name, sizes, depth, loud, fast, found))

    assert invoke(verb, "a", "--width", "2").exit_code == 0
    more = ("--deep-layers", "5", "--loud", "--no-fast", "--width", "4", "-a", "here")
    assert invoke(verb, "b", *more, "--depth", "2").exit_code == 0
    assert given == [
        ("a", Sizes(width=2, deep_layers=3), 7, False, True, None),
        ("b", Sizes(width=4, deep_layers=5), 2, True, False, "here"),
    ]
    # What is off has no name to turn it off.
    assert invoke(verb, "a", "--width", "2", "--no-loud").exit_code == 2


def test_options_of_a_group_are_checked_and_described_like_others():
    def verb(sizes: Sizes, depth: Depth = 1) -> None:
        """Print nothing."""

    options, _, of_group = invoke(verb, "--help").output.partition("How large:\n")
    assert "--depth" in options and "--help" in options and "--width" not in options
    assert "How wide." in of_group and "--deep-layers" in of_group
    assert invoke(verb).exit_code == 2
    assert invoke(verb, "--width", "0").exit_code == 2
    assert invoke(verb, "--width", "1", "--deep-layers", "0").exit_code == 2


def test_groups_are_dataclasses_with_the_defaults_that_are_declared():
    assert WiderSizes() == WiderSizes(width=1) and Sizes(width=2).deep_layers == 3
    with pytest.raises(TypeError, match="width"):
        Sizes()


def test_two_groups_with_one_option_are_refused():
    def verb(sizes: Sizes, others: WiderSizes) -> None:
        pass

    with pytest.raises(ValueError, match="width"):
        takes_options(verb)
