"""Options of verbs that start processes on several hosts."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

from ..core import InputError, LaunchedProcess
from ._groups import option
from ._session import Session

#: Processes that others have started: see `initialize`.
EXTERNAL = "external"
# So the library that connects CPUs tells standard output that they are connected.
_REMARK = "[Gloo] Rank "


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
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

    @property
    def hosts(self) -> dict[str, Any]:
        """Those about hosts, as arguments of `aliquot.launching.launch`."""
        names = ("num_hosts", "num_devices_per_host", "min_hosts", "address")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(ProcessOptions):
    """The same of a verb that may run in several processes."""

    launch: str | None = option(
        "Run in several processes: local:N of this machine, or ray for one on each host;"
        " external if SLURM, MPI, Kubernetes or Cloud TPU has started this one of several.",
        metavar="ENGINE",
    )

    @property
    def starts_others(self) -> bool:
        """Whether this process is to start others that run its verb, rather than to run it."""
        return self.launch not in (None, EXTERNAL) and LaunchedProcess.of() is None

    def check(self, *, devices: int | None, has_plan: bool) -> None:
        """Check that these options go with the others of a verb.

        Args:
            devices: `--devices`.
            has_plan: whether a plan is given, which is for one number of devices.

        Raises:
            InputError: everything that does not.
        """
        engine = self.launch
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

            check_engine(engine, **self.hosts)


def has_been_restarted() -> bool:
    """Whether this process goes on for another that has failed."""
    place = LaunchedProcess.of()
    return place is not None and place.attempt > 1


def launch_again(
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
    assert how.launch is not None
    # The processes say themselves what they do.
    with say.voice.quiet():
        launch(
            ["python", "-m", "aliquot", *sys.argv[1:]],
            how.launch,
            max_restarts=restarts if how.max_restarts is None else how.max_restarts,
            **how.hosts,
            logs=None if run is None else run / "logs",
            # All processes stop at one step then.
            interrupt=signal.SIGTERM,
            kept=kept,
            note=lambda text: say.note(f"aliquot launch: {text}"),
            show=show,
        )


def measured_by_others(how: LaunchOptions, devices: int | None, say: Session) -> bool:
    """Check these options of a verb that measures; where they ask for other processes to run it,
    run it there and return True once they have ended.

    Args:
        devices: `--devices`.

    Raises:
        InputError: the options contradict each other, or processes cannot be started.
        LaunchError: a process failed, and no restarts are left.
    """
    how.check(devices=devices, has_plan=False)
    if not how.starts_others:
        return False
    launch_again(how, None, say, kept="what they have measured", all_say_the_same=True)
    return True


@contextlib.contextmanager
def joined(how: LaunchOptions, *, ends_at_signals: bool = False) -> Iterator[None]:
    """Within, this process has joined the others that run its verb, if there are any.

    Args:
        ends_at_signals: whether SIGTERM ends a process at once. Otherwise JAX takes it, so that
            all can end at one step.
    """
    if how.launch != EXTERNAL and LaunchedProcess.of() is None:
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
