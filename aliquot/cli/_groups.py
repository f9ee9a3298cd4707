"""Groups of options that several verbs take: frozen dataclasses whose fields are the options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def takes_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose parameters of a dataclass type become one option for each field.

    Typer reads one option from each parameter of a function and knows no groups. The function
    returned has the options of the groups as its parameters, and calls the verb with the groups
    made of them.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _options_of(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def with_options(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
        verb(**given)

    # An option that two groups declare is an error here, when the module is imported.
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_options


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        required = field.default is dataclasses.MISSING
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if required else field.default,
            annotation=hints[field.name],
        )
