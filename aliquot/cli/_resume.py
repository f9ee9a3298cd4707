"""Where a run begins: with a new state, with the weights of another, or where one stopped."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import InputError, counted
from ._launch_options import has_been_restarted
from ._run_options import RunOptions
from ._session import Session

if TYPE_CHECKING:
    from ..data import Images, Mixture, Windows
    from ..runtime import Checkpoints, Restored, Step
    from ..zoo import Workload

CHECKPOINTS = "checkpoints"
# Settings that change how a step is computed, but not what.
_SAME_NUMBERS = ("recompute", "attention")
# File servers free what a lost machine has locked after a minute or two.
_LOST_S = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The state to train from, the steps that made it, the position in the data, and what each
    checkpoint says besides that.
    """

    state: Any
    done: int
    position: dict[str, Any] | None
    meta: dict[str, Any]


@contextlib.contextmanager
def open_checkpoints(options: RunOptions, say: Session) -> Iterator[Checkpoints | None]:
    """The checkpoints of a run, closed at the end; None if it has no folder.

    Raises:
        InputError: the folder cannot be made, or another run writes there.
    """
    if options.out is None:
        yield None
        return
    from ..runtime import Checkpoints

    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {options.out} cannot be made: {error.strerror}.") from None
    with Checkpoints(
        options.out / CHECKPOINTS, keep=options.keep, on_error=lambda text: say.note(text)
    ) as opened:
        # Of a run that was restarted, a machine may have held the folder until it was lost.
        opened.claim(wait_s=_LOST_S if has_been_restarted() else 0.0)
        yield opened


def begin(
    checkpoints: Checkpoints | None,
    step: Step,
    workload: Workload,
    text: Windows | Mixture | Images,
    options: RunOptions,
    seed: int,
    say: Session,
) -> Resumed:
    """The state that a run begins with, as `--resume` and `--init-from` say.

    Raises:
        InputError: there is no such checkpoint, or it is of another model.
    """
    import jax

    meta = {"settings": workload.settings, "data": text.facts, "seed": seed}
    source, number = _source(checkpoints, options)
    if source is not None:
        step.prepare(workload.state, workload.batch)
        restored = source.restore(step, number)
        if restored is not None:
            for line in (*restored.skipped, *restored.notes):
                say.note(line)
            if number is not None and source is checkpoints:
                source.drop_later(number)
            say.note(f"resuming after step {restored.number}, from {source.folder}")
            for part, what in (("settings", "the step"), ("data", "the data")):
                old: Any = restored.meta.get(part) or {}
                new: Any = meta[part]
                differing = [
                    f"{key} was {old.get(key)}, is {new.get(key)}"
                    for key in {**old, **new}
                    if old.get(key) != new.get(key) and key not in _SAME_NUMBERS
                ]
                if old and differing:
                    say.note(f"note: {what} changes here: {'; '.join(differing)}")
            return Resumed(
                state=restored.state,
                done=restored.number,
                position=restored.meta.get("position"),
                meta=meta,
            )
    state = step.init(workload.init, jax.random.key(seed))
    if options.init_from is not None:
        weights, notes = _weights(options.init_from, state["params"], workload)
        for line in notes:
            say.note(line)
        state = {**state, "params": weights}
        # The copy that an optimizer keeps of parameters in 16 bits begins with all bits of them.
        if workload.keeps_master:
            copy, _ = _weights(options.init_from, state["opt_state"]["master"], workload)
            state["opt_state"] = {**state["opt_state"], "master": copy}
    return Resumed(state=state, done=0, position=None, meta=meta)


def _source(
    checkpoints: Checkpoints | None, options: RunOptions
) -> tuple[Checkpoints | None, int | None]:
    """The checkpoints to restore from, if there are any, and a number if one is asked for."""
    if options.resume == "no":
        if checkpoints is not None and (found := checkpoints.numbers()):
            raise InputError(
                f"--resume no: {options.out} holds checkpoints up to step {found[-1]}. Name another"
                " folder for a new run, or remove this one."
            )
        return None, None
    if options.resume.isdecimal():
        return checkpoints, int(options.resume)
    if checkpoints is not None and checkpoints.numbers():
        # A run that has checkpoints of its own goes on from these, wherever it came from.
        return checkpoints, None
    if options.resume == "auto":
        return checkpoints, None
    return opened(Path(options.resume), "--resume"), None


def checkpoint_folder(path: Path) -> Path:
    """The folder of checkpoints in the folder of a run; other folders are it themselves."""
    inner = path / CHECKPOINTS
    return inner if inner.is_dir() else path


def opened(path: Path, option: str) -> Checkpoints:
    """The checkpoints in the folder of a run, or in a folder of checkpoints."""
    from ..runtime import Checkpoints

    found = Checkpoints(checkpoint_folder(path))
    if not path.is_dir() or not found.numbers():
        raise InputError(
            f"{option} {path}: there is no checkpoint. Name the folder of a run, or a folder of"
            " checkpoints."
        )
    return found


def restored_weights(
    source: Checkpoints, params: Any, path: Path, name: str
) -> tuple[Restored, list[str]]:
    """The parameters of a model in the newest checkpoint of a folder, as far as it has them, and
    what is to be said of them.

    Raises:
        InputError: some have other shapes, or none is there.
    """
    try:
        restored = source.restore({"params": params}, partly=True)
        assert restored is not None
        if any(place.startswith("opt_state.master") for place in restored.left_out):
            # The optimizer's copy of the parameters has all their bits.
            copy = source.restore({"opt_state": {"master": params}}, restored.number, partly=True)
            assert copy is not None
            if len(copy.new) == len(restored.new):
                weights = {"params": copy.state["opt_state"]["master"]}
                restored = dataclasses.replace(restored, state=weights)
    except InputError as error:
        raise InputError(f"the weights in {path} are not those of {name}: {error}") from None
    return restored, [*restored.skipped, *restored.notes]


def _weights(path: Path, params: Any, workload: Workload) -> tuple[Any, list[str]]:
    """The parameters with which a model begins: those that the newest checkpoint of a folder, or a
    model of Hugging Face in it, has as well, and the others as they are; and which these are.

    Raises:
        InputError: some have other shapes, or none is there.
    """
    from ..zoo import is_hugging_face, read_weights

    if is_hugging_face(path):
        params, notes = read_weights(path, workload.config, params)
        return params, [f"beginning with the weights in {path}", *notes]
    name = workload.config.name
    restored, notes = restored_weights(opened(path, "--init-from"), params, path, name)
    notes.append(f"beginning with the weights in {path} (step {restored.number})")
    # The rest of a state, such as the optimizer's, is never taken over.
    left_out = [place for place in restored.left_out if place.startswith("params")]
    for places, what in (
        (restored.new, "not in it, so that they begin as new"),
        (left_out, f"of it left out, as {name} has none such"),
    ):
        if places:
            some = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
            notes.append(f"note: {counted(len(places), 'array')} {what}: {some}")
    return restored.state["params"], notes
