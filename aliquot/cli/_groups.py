"""How the options of verbs are declared, one by one or in groups: frozen dataclasses whose fields
are options, which `--help` lists under the `title` of their class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer

_KIND = "kind"


def option(help: str, default: Any = None, *, names: str = "", **more: Any) -> Any:
    """An option of a verb or of a group, as the default value of a parameter or field:

        stages: int | None = option("Stages of a pipeline; by default searched.")

    One that several verbs have is declared once, as `Annotated[int | None, option(...)]`, which
    takes the default from where it stands.

    Args:
        help: what `--help` says of it.
        default: None if it may be left out, `...` if it must be given.
        names: what is typed, if not the name of the parameter; several with blanks between them.
        more: other arguments of `typer.Option`, such as `metavar`, `min` and `max`.
    """
    return _declared(typer.Option, default, names.split(), {"help": help, **more})


def argument(help: str, default: Any = ..., **more: Any) -> Any:
    """As `option`, for what is typed without a name."""
    return _declared(typer.Argument, default, [], {"help": help, **more})


def _declared(kind: Any, default: Any, names: list[str], more: dict[str, Any]) -> Any:
    # Dataclasses know what a field is; functions of options read it below.
    return dataclasses.field(
        default=dataclasses.MISSING if default is ... else default,
        metadata={_KIND: (kind, tuple(names), more)},
    )


def takes_options(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb as Typer reads it: each declared option a parameter, and each parameter of a dataclass
    type one for each field. The function returned calls the verb with the groups made of them.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        hint = parameter.annotation
        if dataclasses.is_dataclass(hint):
            groups[parameter.name] = hint
            hints = get_type_hints(hint, include_extras=True)
            parameters += [
                _parameter(field.name, hints[field.name], field, getattr(hint, "title", None))
                for field in dataclasses.fields(hint)
            ]
        else:
            parameters.append(_parameter(parameter.name, hint, parameter.default))

    @functools.wraps(verb)
    def with_options(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
        verb(**given)

    # An option that two groups declare is an error here, when the program starts.
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # Else Typer reads the annotations of the verb, too.
    with_options.__annotations__ = {}
    return with_options


def _parameter(name: str, hint: Any, default: Any, title: str | None = None) -> inspect.Parameter:
    """A parameter as Typer reads it.

    Args:
        name: of the parameter or field.
        hint: its type, or `Annotated` with that and what `option` returned.
        default: its default value, or what `option` returned.
        title: under which `--help` lists it; by default it is under "Options".
    """
    declared = None
    if isinstance(default, dataclasses.Field):
        declared, default = default if _KIND in default.metadata else None, default.default
    if declared is None:
        hint, *(declared,) = get_args(hint)
    kind, names, more = declared.metadata[_KIND]
    required = default in (dataclasses.MISSING, inspect.Parameter.empty)
    if hint is bool and default is False and not names:
        # Nobody needs to type the opposite of what is off.
        names = (f"--{name.replace('_', '-')}",)
    if required or default is None:
        more = {"show_default": False, **more}
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[hint, kind(*names, **{"rich_help_panel": title, **more})],
    )
