"""Checkpoints of a step's state: saved in the background, restored under any plan."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from ..core import InputError, listing, version_of
from ._arguments import canonical, is_deleted
from ._restored import Restored, Shared, saved_array, shared, target_of
from ._state_call import PlainState, StateCall, plain_state
from ._step import Step
from .checkpoints import (
    FORMAT,
    FORMAT_WITHOUT_CHECKSUMS,
    BusyError,
    NewerError,
    Record,
    SavedArray,
    Target,
    as_json,
    damage,
    differences,
    known,
    leaf_of,
    load_orbax,
    lock_folder,
    numbers,
    read_record,
    reason,
    require_orbax,
    unfinished,
    unlock_folder,
)
from .transport import PiecedArray, exchange, places_of, struct

_PROBE = ".writable"


class _UnusableError(InputError):
    """A checkpoint cannot be restored. An older one is, unless this one was asked for."""


class Checkpoints:
    """Checkpoints in one folder. A checkpoint holds each array of the state as the user knows it,
    whatever plan and however many processes wrote it, and is restored under any other.

    With several processes all must make the same calls. Nothing is touched before the first one.
    Use it in a `with` statement, or call `close` at the end.

        step = aq.parallelize(train_step, plan).prepare(state, batch)
        with aq.Checkpoints("run/checkpoints", every=100, keep=3) as checkpoints:
            restored = checkpoints.restore(step)
            first = restored.number if restored else 0
            state = restored.state if restored else step.init(init, key)
            for number in range(first, 1000):
                state, metrics = step(state, batch_at(number))
                checkpoints.save(step, state, number + 1)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int | None = None,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            folder: is made if need be, within one that exists.
            every: `save` skips numbers that this does not divide.
            keep: how many checkpoints stay, the newest; all if None.
            on_error: is told why a checkpoint could not be saved, and the run goes on; `close`
                raises nevertheless if the last one is missing. Without it, the next call raises.

        Raises:
            MissingExtraError: Orbax is not installed.
        """
        # Said here, and not after hours of training.
        require_orbax()
        if every < 1 or (keep is not None and keep < 1):
            raise InputError(f"every and keep must be at least 1, got every={every}, keep={keep}.")
        self._folder = Path(os.path.abspath(folder))
        self._every, self._keep, self._on_error = every, keep, on_error
        self._manager: Any = None
        self._pending: int | None = None
        self._failed: str | None = None
        self._lock: int | None = None
        self._unusable: set[int] = set()
        self.failures: tuple[str, ...] = ()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The error that ends the block is the one to be seen.
        with contextlib.suppress(*(() if error is None else (InputError,))):
            self.close()

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._folder

    def numbers(self) -> tuple[int, ...]:
        """The complete checkpoints, ascending. Waits for one that is being written."""
        self.wait()
        return tuple(numbers(self._folder))

    def unfinished(self) -> tuple[str, ...]:
        """Names of checkpoints whose writing was broken off. The next save removes them."""
        self.wait()
        return tuple(unfinished(self._folder))

    def record(self, number: int) -> Record:
        """What a checkpoint says of itself. Raises `InputError` if there is none of that number."""
        self._require(number, numbers(self._folder))
        return read_record(self._folder, number)

    def claim(self, *, wait_s: float = 0.0) -> None:
        """Keep other runs from writing here, from now on until `close`. The first `save` does so
        too: a long run that calls this before has not worked in vain.

        Args:
            wait_s: how long to wait for another run to end.

        Raises:
            InputError: another run writes here; it names its process and host.
        """
        self._claim(None, wait_s)

    def save(
        self,
        step: Step | None,
        state: Any,
        number: int,
        *,
        meta: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Save a state in the background. Returns once its arrays are copied to the host, so that
        the next step may replace them; waits for an earlier save first.

        Args:
            step: whose state it is. None for any tree of arrays.
            state: as `step` takes it; its state argument, or a tuple of several.
            number: by which it is restored, mostly of the next step. One that exists is replaced.
            meta: plain data to be kept with it, such as the position in the training data.
            force: save a number that `every` does not divide.

        Returns:
            Whether saving began.

        Raises:
            InputError: it could not be saved, or an earlier save has failed since the last call
                (see `on_error`); another run writes here, see `claim`; there are later
                checkpoints, see `drop_later`; the state is not that of the step, or gone; `meta`
                is no JSON.
        """
        if number < 0:
            raise InputError(f"A checkpoint's number must not be negative, got {number}.")
        if not force and number % self._every:
            return False
        flat = plain_state(state) if step is None else step.flat_state(state)
        _require_there(flat)
        leaves = flat.leaves if step is None else tuple(map(_as_step_takes_it, flat.leaves))
        arrays = tuple(map(saved_array, flat.names, leaves))
        if step is not None:
            _require_whole(step, state, arrays)
        plain = _plain(meta)
        self.wait()
        if self._cannot_write(number):
            return False
        later = [n for n in self._agreed_numbers() if n > number]
        if later:
            raise InputError(
                f"cannot save checkpoint {number}: {str(self._folder)!r} holds later ones"
                f" ({', '.join(map(str, later))}), which would be restored instead of it. Remove"
                f" them with checkpoints.drop_later({number}), or save to another folder."
            )
        stored = [leaf_of(leaf, turn) for turn, leaf in enumerate(leaves)]
        record = Record(
            format=FORMAT,
            number=number,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            processes=jax.process_count(),
            writers=tuple(sorted(set().union(*(leaf.writers for leaf in stored)))),
            arrays=arrays,
            meta=plain,
        )
        try:
            if self._manager is None:
                self._manager = load_orbax().Manager(self._folder, self._keep)
            self._manager.save(number, flat.tree(stored), as_json(record))
        except Exception as error:
            # The store raises what its parts happen to raise.
            self._fail(number, error)
            return False
        self._pending = number
        self._unusable.discard(number)
        return True

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            InputError: what was being written could not be, unless `on_error` is told instead.
        """
        if self._pending is None:
            return
        number, self._pending = self._pending, None
        try:
            self._manager.wait()
        except Exception as error:
            # Whatever Orbax's threads met, a checkpoint is missing.
            self._fail(number, error)
        else:
            self._failed = None

    def close(self) -> None:
        """Wait, and end the threads that write.

        Raises:
            InputError: the last checkpoint could not be saved.
        """
        try:
            self.wait()
            self._close_manager()
        finally:
            lock, self._lock = self._lock, None
            if lock is not None:
                unlock_folder(self._folder, lock)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise InputError(f"the last checkpoint is missing: {failed}")

    def restore(
        self, into: Step | Any = None, number: int | None = None, *, partly: bool = False
    ) -> Restored | None:
        """The newest complete checkpoint, or that of a number.

        Args:
            into: the step whose state it becomes, called or prepared before: each process reads
                what its devices need. Or a tree of arrays or shapes: arrays get their `sharding`;
                those without one come as arrays of NumPy. None for arrays of NumPy in dicts and
                lists, with random keys as their words.
            number: of the checkpoint.
            partly: `into` is a tree of arrays, of which only those are restored that the checkpoint
                has at the same places. The others stay as they are; see `Restored`. Floats of
                another width are rounded or widened.

        Returns:
            The checkpoint, or None if there is none yet and no number was asked for.

        Raises:
            InputError: there is none of this number, or it is of another state; it lists both
                shapes of the first arrays that differ. It was written by a newer release, is not
                complete, or is not what was written.
        """
        self.wait()
        found = self._agreed_numbers()
        if number is not None:
            self._require(number, found)
            try:
                return self._restored(number, (), into, partly)
            except _UnusableError as error:
                raise InputError(
                    f"{error} {known(self._folder, found)}: restore another one by its number."
                ) from error
        skipped = []
        for name in unfinished(self._folder):
            if not found or int(name.split(".")[0]) > found[-1]:
                skipped.append(
                    f"{name} in {str(self._folder)!r} was not written to its end, and is skipped."
                )
        for candidate in reversed(found):
            try:
                return self._restored(candidate, skipped, into, partly)
            except _UnusableError as error:
                self._unusable.add(candidate)
                skipped.append(f"{error} It is skipped.")
        if found:
            raise InputError(listing("no checkpoint can be restored", skipped))
        return None

    def _restored(self, number: int, skipped: Sequence[str], into: Any, partly: bool) -> Restored:
        """A checkpoint that is there. Raises `_UnusableError` in all processes if one cannot read
        it, and `InputError` if it is of another state.
        """
        record = self._sound_record(number)
        common = Shared(both={})
        if partly:
            state, read_bytes, common = self._read_part(record, into)
        elif into is None:
            state, read_bytes = self._read(record, None)
        else:
            state, read_bytes = self._read_into(record, into)
        notes = [*common.notes]
        if record.format <= FORMAT_WITHOUT_CHECKSUMS:
            notes.append(
                f"checkpoint {number} in {str(self._folder)!r} was written without checksums, by an"
                " earlier release: whether its arrays are still what was written is not known."
            )
        return Restored(
            state=state,
            number=number,
            meta=record.meta,
            skipped=tuple(skipped),
            notes=tuple(notes),
            read_bytes=read_bytes,
            new=common.new,
            left_out=common.left_out,
        )

    def drop_later(self, number: int) -> tuple[int, ...]:
        """Remove the checkpoints after a number, from which a run was taken back to that one.

        Returns:
            The numbers that were removed.

        Raises:
            InputError: they cannot be removed, or another run writes here.
        """
        self.wait()
        later = tuple(n for n in self._agreed_numbers() if n > number)
        if not later:
            return ()
        fault = self._claim(None)
        if not fault:
            try:
                if self._manager is None:
                    self._manager = load_orbax().Manager(self._folder, self._keep)
                for n in later:
                    self._manager.delete(n)
            except Exception as error:
                fault = reason(error)
        if fault:
            raise InputError(f"cannot remove checkpoints in {str(self._folder)!r}: {fault}.")
        return later

    def _read_into(self, record: Record, into: Any) -> tuple[Any, int]:
        """The arrays of a checkpoint for a step, or in a tree. Raises `InputError` if it needs
        others.
        """
        if isinstance(into, Step):
            flat: StateCall | PlainState = into.flat_state()
            places, targets = places_of(into.shardings), []
            for path, leaf in zip(flat.paths, flat.leaves, strict=True):
                described = struct(leaf.shape, canonical(leaf.dtype), None)
                targets.append(Target(described=described, places=places[path]))
        else:
            flat = plain_state(into)
            targets = list(map(target_of, flat.leaves))
        wanted = map(saved_array, flat.names, [target.described for target in targets])
        differing = differences(record.arrays, wanted)
        if differing:
            raise InputError(
                listing(
                    f"checkpoint {record.number} in {str(self._folder)!r} is of another state",
                    differing,
                    "Restore it into the model that it was saved from, or choose another folder.",
                )
            )
        tree, read_bytes = self._read(record, flat.tree(targets))
        # A tree has its arrays in another order than the step's arguments, as dicts are sorted.
        order = jax.tree.leaves(flat.tree(range(len(targets))))
        arrays = dict(zip(order, jax.tree.leaves(tree), strict=True))
        state = flat.value([arrays[k] for k in range(len(targets))])
        if isinstance(into, Step):
            into.remember(state)
        return state, read_bytes

    def _read_part(self, record: Record, into: Any) -> tuple[Any, int, Shared]:
        """A tree with the arrays that a checkpoint has, the bytes that were read, and what both
        have in common. Raises `InputError` if arrays have other shapes, or none is there.
        """
        if into is None or isinstance(into, Step):
            raise InputError(
                "a checkpoint is restored partly into a tree of arrays, which stay as they are"
                " where it has none: pass what step.init gives, or a part of it such as"
                " {'params': params}."
            )
        flat = plain_state(into)
        common = shared(record, flat.names, flat.leaves, self._folder)
        targets = {path: target_of(flat.leaves[k]) for path, k in common.both.items()}
        found, read_bytes = self._read(record, targets, some=True)
        leaves = list(flat.leaves)
        for path, k in common.both.items():
            leaves[k] = found[path]
        return flat.value(leaves), read_bytes, common

    def _read(self, record: Record, wanted: Any, *, some: bool = False) -> tuple[Any, int]:
        """The arrays of a checkpoint, or some of them. Raises `_UnusableError` in all processes if
        one cannot read them.
        """
        orbax = load_orbax()
        read: tuple[Any, int] = (None, 0)
        fault, cause = "", None
        try:
            read = (orbax.read_some if some else orbax.read_tree)(
                self._folder, record.number, wanted
            )
        except (MemoryError, jax.errors.JaxRuntimeError):
            # Nothing is wrong with the checkpoint.
            raise
        except Exception as error:
            # The store raises what its parsers happen to raise.
            fault, cause = f"cannot be read: {reason(error)}", error
        self._agree(record.number, fault, cause)
        return read

    def _sound_record(self, number: int) -> Record:
        """The record of a checkpoint, whose files are those that were written. Raises
        `_UnusableError` in all processes if they are not.
        """
        record, fault, cause = None, "", None
        try:
            record = read_record(self._folder, number)
            # All processes restore from the same files.
            if jax.process_index() == 0 and (found := damage(self._folder, record)):
                fault = f"is not complete, or damaged: {found}"
        except NewerError:
            raise
        except InputError as error:
            fault, cause = str(error), error
        self._agree(number, fault, cause)
        assert record is not None
        return record

    def _agree(self, number: int, fault: str, cause: Exception | None) -> None:
        """Raises `_UnusableError` in all processes if one of them has found a fault."""
        faults = [text for text in exchange(fault, str) if text]
        if not faults:
            return
        text = faults[0].rstrip(".")
        if not text.startswith("checkpoint "):
            text = f"checkpoint {number} in {str(self._folder)!r} {text}"
        raise _UnusableError(f"{text}.") from cause

    def _agreed_numbers(self) -> list[int]:
        """The complete checkpoints as process 0 sees them, in every process."""
        found, fault = [], ""
        if jax.process_index() == 0:
            try:
                found = numbers(self._folder)
            except InputError as error:
                fault = str(error)
        found, fault = exchange((found, fault), tuple[list[int], str])[0]
        if fault:
            raise InputError(fault)
        return found

    def _require(self, number: int, found: Sequence[int]) -> None:
        if number not in found:
            raise InputError(f"there is no checkpoint {number}: {known(self._folder, found)}.")

    def _cannot_write(self, number: int) -> bool:
        """True, with a failure, if nothing can be written into the folder, which is made. Raises
        `InputError` if another run writes there.
        """
        fault = self._claim(number)
        if fault:
            self._fail(number, OSError(fault))
        return bool(fault)

    def _claim(self, number: int | None, wait_s: float = 0.0) -> str:
        """Lock the folder, and find out whether it can be written: why not, if it cannot be.
        Checkpoints after `number` that could not be restored get other names.
        """
        passed_over = sorted(n for n in self._unusable if number is not None and n > number)
        if passed_over:
            self._unusable.difference_update(passed_over)
            self._close_manager()
        fault = busy = ""
        if jax.process_index() == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                if self._lock is None:
                    self._lock = lock_folder(self._folder, wait_s)
                for n in passed_over:
                    # Give a checkpoint that cannot be restored another name, so that it is no
                    # longer counted.
                    checkpoint = self._folder / str(n)
                    target, count = checkpoint.with_name(f"{checkpoint.name}.damaged"), 1
                    while target.exists():
                        count += 1
                        target = checkpoint.with_name(f"{checkpoint.name}.damaged-{count}")
                    checkpoint.rename(target)
                probe = self._folder / _PROBE
                probe.write_bytes(bytes(4096))
                probe.unlink()
            except BusyError as error:
                busy = str(error)
            except FileExistsError:
                fault = "it is a file"
            except OSError as error:
                fault = reason(error)
        fault, busy = exchange((fault, busy), tuple[str, str])[0]
        if busy:
            raise InputError(busy)
        return fault

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _fail(self, number: int, error: Exception) -> None:
        """Keep a failure, and tell it. Raises `InputError` if nobody else is told."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.drop()
        text = f"cannot save checkpoint {number} in {str(self._folder)!r}: {reason(error)}."
        self.failures, self._failed = (*self.failures, text), text
        if self._on_error is None:
            self._failed = None
            raise InputError(
                f"{text} Free space or choose another folder; the checkpoints that were complete"
                " are still there."
            ) from error
        self._on_error(text)


def _require_there(flat: StateCall | PlainState) -> None:
    """Raises `InputError` for arrays that a call has donated."""
    gone = [name for name, leaf in zip(flat.names, flat.leaves, strict=True) if is_deleted(leaf)]
    if gone:
        raise InputError(
            f"cannot save a state that no longer exists: a call has replaced"
            f" {', '.join(gone[:3])}{', ...' * (len(gone) > 3)}. Save the state that the last call"
            " returned."
        )
    if not flat.leaves:
        raise InputError("there is nothing to save: the state holds no array.")


def _require_whole(step: Step, state: Any, arrays: Sequence[SavedArray]) -> None:
    """Raises `InputError` if a state is not what a step takes."""
    differing = differences(arrays, step.state_arrays())
    if differing:
        swapped = [line.replace("in the checkpoint", "in this state") for line in differing]
        raise InputError(
            listing(
                f"cannot save a state that {step.__name__} does not take",
                step.misplaced(state) or swapped,
                "Pass its state argument, or a tuple of several in the order of its parameters.",
            )
        )


def _as_step_takes_it(leaf: Any) -> Any:
    """An array of the host in the precision in which the step takes it."""
    return leaf if isinstance(leaf, jax.Array | PiecedArray) else leaf.astype(canonical(leaf.dtype))


def _plain(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """The caller's data as JSON gives them back. Raises `InputError` if it cannot."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(meta or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the meta of a checkpoint must be plain data, as JSON holds it: {error}."
        ) from error
    return plain


@functools.cache
def _versions() -> dict[str, str]:
    packages = ("aliquot", "jax", "orbax-checkpoint")
    return {"python": platform.python_version(), **{name: version_of(name) for name in packages}}
