"""The table of verbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from ..core import version_of
from ._aceso import evaluate, show
from ._aceso_plans import export_plan, import_plan
from ._aceso_search import search
from ._bench_aceso import aceso as bench_aceso
from ._bench_alpa import alpa as bench_alpa
from ._bench_alpa import list_suites
from ._bench_cfp import cfp as bench_cfp
from ._blocks import analyze, enumerate_, profile
from ._blocks import search as search_blocks
from ._catalog import models
from ._checkpoint import show_checkpoint
from ._cluster import cluster
from ._compare import compare
from ._data import data
from ._demo import demo
from ._diff import diff
from ._explain import explain
from ._export import export as export_settings
from ._generate import generate
from ._groups import takes_options
from ._launch import launch
from ._next_steps import next_steps
from ._other_names import Verb
from ._plan import plan
from ._profile import check, fit, merge, run
from ._profile import show as show_profiles
from ._profile_export import export
from ._read import read
from ._report import report
from ._size import size
from ._train import train
from ._verify import verify

app = typer.Typer(
    name="aliquot",
    help="Plan how a JAX training step runs on many devices, say why, and run it.",
    epilog=(
        "Exit codes: 0 done, 1 no feasible plan or a failed check, 2 bad input, 4 an export that"
        " would lose something, 130 interrupted."
    ),
    # Plain help needs a third of the time, and errors of options stay on two lines.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _add(group: typer.Typer, name: str, verb: Callable[..., None]) -> None:
    """Add a verb. Lists of verbs show its first sentence, which Typer would cut to one line."""
    sentence = " ".join((verb.__doc__ or "").split("\n\n")[0].split()).split(". ")[0]
    group.command(name, cls=Verb, short_help=sentence.rstrip(".") + ".")(takes_options(verb))


_VERBS: tuple[Callable[..., None], ...] = (
    demo,
    models,
    cluster,
    plan,
    compare,
    size,
    explain,
    diff,
    read,
    verify,
    data,
    train,
)
_VERBS += (generate, launch, report)
_GROUPS: Mapping[str, tuple[str, Mapping[str, Callable[..., None]]]] = {
    "aceso": (
        "Plan from Aceso's measured databases, and judge its configurations.",
        {
            "show": show,
            "evaluate": evaluate,
            "search": search,
            "export": export_plan,
            "import": import_plan,
        },
    ),
    "blocks": (
        "ParallelBlocks: find them, measure their programs, and plan from that.",
        {"analyze": analyze, "profile": profile, "search": search_blocks, "enumerate": enumerate_},
    ),
    "profile": (
        "Measure operators where there is hardware, and plan from that.",
        {
            "run": run,
            "show": show_profiles,
            "check": check,
            "fit": fit,
            "merge": merge,
            "export": export,
        },
    ),
    "checkpoint": ("See what checkpoints hold.", {"show": show_checkpoint}),
    "bench": (
        "Plan and run the benchmarks of papers, with our results beside the published ones.",
        {"aceso": bench_aceso, "cfp": bench_cfp, "alpa": bench_alpa, "list": list_suites},
    ),
}
for _verb in _VERBS:
    _add(app, _verb.__name__, _verb)
_add(app, "export", export_settings)
for _name, (_help, _verbs) in _GROUPS.items():
    _group = typer.Typer(help=_help, no_args_is_help=True)
    for _inner, _verb in _verbs.items():
        _add(_group, _inner, _verb)
    app.add_typer(_group, name=_name, short_help=_help)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"aliquot {version_of('aliquot')}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(
            f"{app.info.help}\n\nSee it work in a minute: aliquot demo\n\n{next_steps()}\n\n"
            "aliquot --help lists all commands; aliquot --install-completion completes them."
        )
