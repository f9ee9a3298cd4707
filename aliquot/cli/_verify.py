"""`aliquot verify`: what the compiler that will run a plan makes of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..core import InputError, nearest
from ..plans import ModelReference, Plan
from ._devices import use_host_only
from ._options import Json, PlanFile
from ._session import session

if TYPE_CHECKING:
    from ._model import Model


def verify(
    plan_file: PlanFile,
    target: Annotated[
        str | None,
        typer.Option(help="A GPU or TPU such as H100 or v5e, cpu, or a file describing a GPU; by default the plan's."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model, where the plan file does not say how to make it: package.module:factory."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a plan with the compiler that will run it, without the devices, and compare with the prediction."""
    with session(as_json) as say:
        found = Plan.load(plan_file)
        use_host_only()
        _check_target(found, target)
        from .._api import verify as compile_plan
        from ..report import verification
        from ._model import user_code

        made = _model(found, model)
        with _progress() as report, user_code(made.name):
            result = compile_plan(found, made.step, made.state, made.batch, target=target, progress=report)
        answer = result.to_dict()
        say.show(verification(answer))
        say.finish(answer)
    if not result.fits:
        raise typer.Exit(1)


def _check_target(plan: Plan, target: str | None) -> None:
    """Refuse a target that cannot be compiled for before the step is traced."""
    from ..cluster import Cluster
    from ..verify import require_compiler, resolve_target

    require_compiler(resolve_target(target, Cluster.from_dict(plan.cluster)))


def _model(plan: Plan, name: str | None) -> Model:
    """The model to lower: the one that the plan file names, or the user does."""
    from ._model import rebuild

    made = rebuild(plan.model if name is None else _reference(plan, name))
    if made is None:
        raise InputError(
            f"this plan is for {plan.model.name or 'a function'}, and its file does not say how to make that again. "
            "Name it with --model package.module:factory, or call aliquot.verify(plan, train_step, state, batch)."
        )
    return made


def _reference(plan: Plan, name: str) -> ModelReference:
    settings = dict(plan.model.settings)
    if ":" in name:
        return ModelReference(kind="factory", name=name, settings=settings if name == plan.model.name else {})
    if plan.model.kind != "zoo":
        raise InputError(
            f"--model {name}: this plan was not made for a model of the zoo, so nothing says how large its batch is. "
            "Give a factory as package.module:function."
        )
    from ..zoo import MODELS

    if name not in MODELS:
        raise InputError(f"there is no model {name!r}: {nearest(name, MODELS)}")
    if name != plan.model.name:
        settings |= {"model": name, "overrides": {}}
    return ModelReference(kind="zoo", name=name, settings=settings)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function to call with a line; it changes in place in a terminal, and stands once elsewhere."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        seen: set[str] = set()

        def once(line: str) -> None:
            what = line.partition(" (")[0]
            if what not in seen:
                seen.add(what)
                print(f"{what} ...", file=sys.stderr, flush=True)

        yield once
        return
    with console.status("tracing the step") as status:
        yield status.update
