"""Options of verbs that start processes on several hosts."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ..core import InputError, LaunchedProcess
from ._groups import option
from ._session import Session

#: Processes that others have started: see `initialize`.
EXTERNAL = "external"
# So the library that connects CPUs tells standard output that they are connected.
_REMARK = "[Gloo] Rank "

Engine = Annotated[
    str | None,
    option(
        "Run in several processes: local:N of this machine, or ray for one on each host;"
        " external if SLURM, MPI, Kubernetes or Cloud TPU has started this one of several.",
        metavar="ENGINE",
        rich_help_panel="Several processes",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How processes are started, and started again when one fails."""

    title: ClassVar[str] = "Several processes"

    max_restarts: int | None = option(
        "How often all processes are started again when one fails; by default 3 where the run"
        " has checkpoints, else 0."
    )
    num_devices_per_host: int | None = option(
        "Devices of each process; virtual ones on CPUs. By default all GPUs, shared out among"
        " the processes of a host."
    )
    num_hosts: int | None = option("Ray: hosts; by default all.")
    min_hosts: int | None = option(
        "Ray: hosts with which it may start again when others are gone; by default all."
    )
    address: str | None = option(
        "Ray: host:port of the cluster's head; by default RAY_ADDRESS, else a cluster that runs"
        " here, else one that is started here."
    )

    def check(self, engine: str | None, *, devices: int | None, has_plan: bool) -> None:
        """Check that these options go with the others of a verb.

        Args:
            engine, devices: `--launch` and `--devices`.
            has_plan: whether a plan is given, which is for one number of devices.

        Raises:
            InputError: everything that does not.
        """
        names = ("max_restarts", "num_devices_per_host", "num_hosts", "min_hosts", "address")
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
        faults = []
        if given and engine in (None, EXTERNAL):
            faults.append(
                f"{', '.join(given)}: say what starts the processes, with --launch local:2 or"
                " --launch ray"
            )
        if engine not in (None, EXTERNAL) and devices is not None:
            faults.append(
                f"--devices {devices} is for one process: with --launch {engine} type"
                f" --num-devices-per-host {devices} for as many in each"
            )
        if self.min_hosts is not None and has_plan:
            faults.append(
                "--min-hosts lets a run go on on fewer devices, and --plan is for one number of"
                " them: leave --plan out, so that each attempt plans for its hosts"
            )
        if faults:
            raise InputError("\n  ".join(f"{fault}." for fault in faults))
        if engine not in (None, EXTERNAL):
            from ..launching import check_engine

            check_engine(
                engine,
                num_hosts=self.num_hosts,
                num_devices_per_host=self.num_devices_per_host,
                min_hosts=self.min_hosts,
                address=self.address,
            )


def starts_others(engine: str) -> bool:
    """Whether this process is to start others that run its verb, rather than to run it."""
    return engine != EXTERNAL and LaunchedProcess.of() is None


def has_been_restarted() -> bool:
    """Whether this process goes on for another that has failed."""
    place = LaunchedProcess.of()
    return place is not None and place.attempt > 1


def launch_again(
    engine: str,
    how: LaunchOptions,
    run: Path | None,
    say: Session,
    *,
    kept: str = "their last checkpoint",
    all_say_the_same: bool = False,
) -> None:
    """Run this process's command in several processes, and show what process 0 says. What the
    others say is in the folder of the run, or else shown as well.

    Args:
        kept: what the command goes on from when it is started again.
        all_say_the_same: whether the others say nothing of their own. The last lines of one that
            fails are in the error.

    Raises:
        LaunchError: a process failed, and no restarts are left.
        InputError: they cannot be started.
    """
    from ..launching import launch

    def show(process: int, is_error: bool, line: str) -> None:
        if line.startswith(_REMARK):
            return
        if is_error:
            if process == 0 or (run is None and not all_say_the_same):
                say.note(f"[{process}] {line}" if process else line)
        elif process == 0 and say.as_json and line.startswith("{"):
            say.finish(json.loads(line))
        elif process == 0:
            # With --json, what libraries below Python print is no part of the answer.
            say.note(line) if say.as_json else say.show(line)

    restarts = 0 if run is None else 3
    launch(
        ["python", "-m", "aliquot", *sys.argv[1:]],
        engine,
        max_restarts=restarts if how.max_restarts is None else how.max_restarts,
        num_hosts=how.num_hosts,
        num_devices_per_host=how.num_devices_per_host,
        min_hosts=how.min_hosts,
        address=how.address,
        logs=None if run is None else run / "logs",
        # All processes stop at one step then.
        interrupt=signal.SIGTERM,
        kept=kept,
        note=lambda text: say.note(f"aliquot launch: {text}"),
        show=show,
    )


def measured_by_others(
    engine: str | None, how: LaunchOptions, devices: int | None, say: Session
) -> bool:
    """Check these options of a verb that measures; where they ask for other processes to run it,
    run it there and return True once they have ended.

    Args:
        devices: `--devices`.

    Raises:
        InputError: the options contradict each other, or processes cannot be started.
        LaunchError: a process failed, and no restarts are left.
    """
    how.check(engine, devices=devices, has_plan=False)
    if engine is None or not starts_others(engine):
        return False
    launch_again(engine, how, None, say, kept="what they have measured", all_say_the_same=True)
    return True


@contextlib.contextmanager
def joined(engine: str | None, *, ends_at_signals: bool = False) -> Iterator[None]:
    """Within, this process has joined the others that run its verb, if there are any.

    Args:
        ends_at_signals: whether SIGTERM ends a process at once. Otherwise JAX takes it, so that
            all can end at one step.
    """
    if engine != EXTERNAL and LaunchedProcess.of() is None:
        yield
        return
    from ..runtime import initialize, shutdown

    if ends_at_signals:
        import jax

        jax.config.update("jax_enable_preemption_service", False)
    initialize()
    try:
        yield
    except typer.Exit:
        # All end at one step.
        shutdown()
        raise
    shutdown()
