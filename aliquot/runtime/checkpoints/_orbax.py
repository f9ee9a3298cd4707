"""Orbax's manager of a folder of checkpoints, set up for the processes of a run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from ...graph import plain_context
from ..transport import Rendezvous
from ._checksums import write_checksums
from ._handler import LeafHandler, Wanted, plain_name
from ._leaves import Leaf, Target
from ._record import unfinished

_TIMEOUT_S = 3600
_made = itertools.count(1)


class Manager:
    """Saves into one folder, in the background.

    When a save has failed in any process, `wait` raises in all of them, and the manager is of no
    further use.

    Args:
        folder: must exist.
        keep: how many checkpoints stay, the newest; None for all.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder, self._number = folder, 0
        processes = _processes()
        handler = LeafHandler()
        barrier = _Barrier(Rendezvous(f"checkpoints {next(_made)} in {folder}"), handler)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=False,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
            multiprocessing_options=processes,
            async_options=ocp.AsyncOptions(
                timeout_secs=_TIMEOUT_S,
                barrier_sync_fn=barrier,
                post_finalization_callback=self._write_checksums,
            ),
        )
        with _alone():
            self._manager = ocp.CheckpointManager(
                folder,
                options=options,
                item_names=("state", "meta"),
                item_handlers={
                    "state": _tree_handler(handler),
                    "meta": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
                },
            )

    def save(self, number: int, tree: Any, record: Mapping[str, Any]) -> None:
        """Copy a tree of `Leaf`s to the host, and write it in the background."""
        self._number = number
        with _alone():
            if number in self._manager.all_steps():
                self._manager.delete(number)
            self._manager.save(
                number,
                force=True,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(tree), meta=ocp.args.JsonSave(dict(record))
                ),
            )

    def _write_checksums(self) -> None:
        """Orbax calls it in process 0 when all files are there, before a checkpoint gets its final
        name.
        """
        for name in unfinished(self._folder):
            if name.startswith(f"{self._number}."):
                write_checksums(self._folder / name)

    def delete(self, number: int) -> None:
        """Remove a checkpoint. All processes must call it."""
        with _alone():
            self._manager.delete(number)

    def wait(self) -> None:
        """Until nothing is being written. Raises what has gone wrong meanwhile."""
        with _alone():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """End its threads."""
        with _alone():
            self._manager.close()

    def drop(self) -> None:
        """Give up after a failure, and remove what is half-written."""
        if jax.process_index() == 0:
            for name in unfinished(self._folder):
                shutil.rmtree(self._folder / name, ignore_errors=True)


class _Barrier:
    """Where processes wait for each other while they save in the background.

    A process that failed before it came here comes to the next barrier instead of to this one, as
    Orbax has it. All processes see that at once, with its reason, and from then on none waits
    again.
    """

    def __init__(self, rendezvous: Rendezvous, handler: LeafHandler) -> None:
        self._rendezvous, self._handler = rendezvous, handler
        self._is_broken = False

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        if self._is_broken or jax.process_count() == 1:
            return
        # Orbax numbers some keys, in each process for itself.
        mine = [re.sub(r"\d+", "", key), self._handler.failure]
        said = self._rendezvous.exchange(mine, list[str], timeout_ms / 1000)
        reasons = [f"process {k}: {reason}" for k, (_, reason) in enumerate(said) if reason]
        if reasons or len({name for name, _ in said}) > 1:
            self._is_broken = True
            raise OSError("; ".join(reasons) or "a process failed while it was writing")


def read_tree(folder: Path, number: int, wanted: Any) -> tuple[Any, int]:
    """The arrays of a checkpoint, and the bytes that this process has read of them.

    Args:
        wanted: a tree of `Target`s, or None for arrays of NumPy in dicts and lists.
    """
    handler = LeafHandler()
    args = ocp.args.PyTreeRestore()
    if wanted is not None:
        args = ocp.args.PyTreeRestore(
            item=jax.tree.map(lambda target: target.described, wanted),
            restore_args=jax.tree.map(
                lambda target: Wanted(restore_type=Leaf, target=target), wanted
            ),
        )
    with _alone():
        tree = _tree_handler(handler).restore(epath.Path(folder) / str(number) / "state", args=args)
    return tree, handler.read_bytes


def read_some(
    folder: Path, number: int, wanted: Mapping[str, Target]
) -> tuple[dict[str, Any], int]:
    """Some arrays of a checkpoint by their paths, and the bytes that this process has read."""
    names = {plain_name(path): path for path in wanted}
    handler = LeafHandler({name: wanted[path] for name, path in names.items()})
    with _alone():
        place = epath.Path(folder) / str(number) / "state"
        _tree_handler(handler).restore(place, args=ocp.args.PyTreeRestore())
    return {names[name]: array for name, array in handler.found.items()}, handler.read_bytes


def _processes() -> Any:
    # With all of them named, Orbax waits by JAX's service, and not by a program on all devices.
    return ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(jax.process_count()))
    )


def _tree_handler(handler: LeafHandler) -> Any:
    return ocp.PyTreeCheckpointHandler(
        # Of zarr's versions, the one that can store a checksum with each chunk. What is read may
        # have either.
        use_zarr3=True,
        multiprocessing_options=_processes(),
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((Leaf, handler)),
    )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without the caller's mesh, at which Orbax fails, and without Orbax's log: what matters of it
    is in the errors.
    """
    logger = logging.getLogger("absl")
    if _is_not_orbax not in logger.filters:
        logger.addFilter(_is_not_orbax)
    with plain_context():
        yield


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/checkpoint/" not in record.pathname
