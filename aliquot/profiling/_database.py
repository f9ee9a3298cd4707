"""The profile database: one row for each program that was measured.

It is an SQLite file in WAL mode. Every measurement is a transaction of its own, so that a run that
is killed keeps what it has finished and goes on from there, and readers never wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ..cluster import MEASURED
from ..core import InputError

_FORMAT = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS measurements (
    key TEXT PRIMARY KEY,
    program TEXT NOT NULL,
    device TEXT NOT NULL,
    num_devices INTEGER NOT NULL,
    mesh TEXT NOT NULL,
    jax_version TEXT NOT NULL,
    label TEXT NOT NULL,
    grade TEXT NOT NULL,
    seconds REAL,
    spread REAL NOT NULL,
    repeats INTEGER NOT NULL,
    memory_bytes REAL NOT NULL,
    outcome TEXT NOT NULL
);
"""
_COLUMNS = (
    "key, program, device, num_devices, mesh, jax_version, label, grade, seconds, spread, repeats,"
    " memory_bytes, outcome"
)
_WAIT_S = 10.0
_FAILED = "failed: "
_LONGEST_ERROR = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramKey:
    """The subject of a measurement: two with equal keys measure the same.

    Attributes:
        program: a hash of the program and of how its arrays are split.
        device: kind of the devices; of CPUs also how many cores they share.
        num_devices, mesh: how many, and their arrangement, such as `"4x2"`.
        jax_version: compilers differ.
    """

    program: str
    device: str
    num_devices: int
    mesh: str
    jax_version: str

    @property
    def digest(self) -> str:
        """A hash of all of them."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A measurement.

    Attributes:
        seconds: median of all repeats; None where the program did not run.
        spread: half of what lies between the quartiles, as a share of the median.
        repeats: how many were timed; fewer where the first was already hopeless.
        memory_bytes: of each device, as the compiler says.
        outcome: `"ok"`, `"stopped early"`, `"out of memory"`, or `"failed: "` and the error; see
            `failed`.
        grade: `MEASURED` if all devices ran, `MEASURED_COMPUTE` if one ran alone what each of many
            would.
        label: for people.
    """

    seconds: float | None
    spread: float = 0.0
    repeats: int = 1
    memory_bytes: float = 0.0
    outcome: str = "ok"
    grade: str = MEASURED
    label: str = ""

    @property
    def has_failed(self) -> bool:
        """True if the program ended with another error than too little memory; it is worth another
        try.
        """
        return self.outcome.startswith(_FAILED)


def failed(error: str) -> str:
    """The outcome of a program that failed: the error's first line, shortened."""
    line = next(iter(error.strip().splitlines()), "no reason given")
    return f"{_FAILED}{line[:_LONGEST_ERROR]}"


def check_database(path: str | os.PathLike[str]) -> None:
    """Open a database once.

    Raises:
        InputError: it is missing or is no such database.
    """
    ProfileDatabase(path, must_exist=True).close()


class ProfileDatabase:
    """A file of measurements; see the module's description. Use it in a `with` statement, or
    `close` it.

    Args:
        path: of the file; made if there is none, unless `must_exist`.

    Raises:
        InputError: the file is none of this kind, is damaged, or is in a newer format; or there is
            none.
    """

    def __init__(self, path: str | os.PathLike[str], *, must_exist: bool = False) -> None:
        self.path = Path(path)
        if must_exist and not self.path.exists():
            raise InputError(
                f"There is no profile database {self.path}. Make one of operators with: aliquot"
                f" profile run MODEL --database {self.path}, or of segments with: aliquot blocks"
                f" profile MODEL --database {self.path}"
            )
        with self._named_faults():
            # Without transactions of Python's own: every statement is one, kept when it returns.
            self._connection = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Make the tables of a new file, and check the format of another."""
        with self._named_faults():
            # Readers go on while a run writes.
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.executescript(_TABLES)
            versions = self._connection.execute("SELECT version FROM format").fetchall()
            if not versions:
                self._connection.execute("INSERT INTO format VALUES (?)", (_FORMAT,))
        if versions and versions[0][0] != _FORMAT:
            raise InputError(
                f"{self.path} has format {versions[0][0]}, and this version of aliquot reads"
                f" {_FORMAT}. Read it with the version that wrote it, or measure again into another"
                " file."
            )

    def __enter__(self) -> ProfileDatabase:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def get(self, key: ProgramKey) -> Measurement | None:
        """The measurement of a program, or None."""
        with self._named_faults():
            row = self._connection.execute(
                "SELECT seconds, spread, repeats, memory_bytes, outcome, grade, label FROM"
                " measurements WHERE key = ?",
                (key.digest,),
            ).fetchone()
        if row is None:
            return None
        names = ("seconds", "spread", "repeats", "memory_bytes", "outcome", "grade", "label")
        return Measurement(**dict(zip(names, row, strict=True)))

    def put(self, key: ProgramKey, measurement: Measurement) -> None:
        """Keep a measurement, in place of an earlier one of the same program.

        Raises:
            InputError: the file cannot be written, as the disk is full or another process holds it;
                what it held before is still there.
        """
        m = measurement
        of_key = (key.digest, key.program, key.device, key.num_devices, key.mesh, key.jax_version)
        row = (*of_key, m.label, m.grade, m.seconds, m.spread, m.repeats, m.memory_bytes, m.outcome)
        with self._named_faults():
            marks = ", ".join("?" * len(row))
            self._connection.execute(
                f"INSERT OR REPLACE INTO measurements ({_COLUMNS}) VALUES ({marks})", row
            )

    def merge(self, other: str | os.PathLike[str]) -> int:
        """Take over what another database has measured and this one has not, or where its program
        failed.

        Returns:
            How many measurements were taken over.

        Raises:
            InputError: `other` is missing or is no such database.
        """
        # To attach a missing file would make an empty one; this checks it first.
        check_database(other)
        with self._named_faults():
            self._connection.execute("ATTACH DATABASE ? AS other", (os.fspath(other),))
            try:
                # Failures are tried again, so that what another has measured goes before them.
                return self._connection.execute(
                    f"INSERT OR REPLACE INTO measurements SELECT {_COLUMNS} FROM"
                    " other.measurements AS new WHERE NOT EXISTS (SELECT 1 FROM main.measurements"
                    " AS old WHERE old.key = new.key AND NOT (old.outcome LIKE :failed AND"
                    " new.outcome NOT LIKE :failed))",
                    {"failed": f"{_FAILED}%"},
                ).rowcount
            finally:
                self._connection.execute("DETACH DATABASE other")

    def __len__(self) -> int:
        with self._named_faults():
            return int(self._connection.execute("SELECT COUNT(*) FROM measurements").fetchone()[0])

    def rows(self) -> Iterator[tuple[ProgramKey, Measurement]]:
        """All measurements, by label."""
        with self._named_faults():
            found = self._connection.execute(
                f"SELECT {_COLUMNS} FROM measurements ORDER BY label, key"
            ).fetchall()
        for (
            _,
            program,
            device,
            count,
            mesh,
            version,
            label,
            grade,
            seconds,
            spread,
            repeats,
            memory,
            outcome,
        ) in found:
            key = ProgramKey(
                program=program, device=device, num_devices=count, mesh=mesh, jax_version=version
            )
            yield (
                key,
                Measurement(
                    seconds=seconds,
                    spread=spread,
                    repeats=repeats,
                    memory_bytes=memory,
                    outcome=outcome,
                    grade=grade,
                    label=label,
                ),
            )

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        """SQLite's errors as messages that say what to do."""
        try:
            yield
        except sqlite3.OperationalError as error:
            said = str(error)
            if "locked" in said:
                raise InputError(
                    f"{self.path} is locked by another process, which has held it for over"
                    f" {_WAIT_S:g} s. Wait for it, or measure into another file and merge the two."
                ) from error
            if "full" in said:
                raise InputError(
                    f"The disk is full: {self.path} keeps what was measured before. Make room and"
                    " run the same command again."
                ) from error
            raise InputError(
                f"{self.path} cannot be opened or written as a profile database: {said}."
            ) from error
        except sqlite3.DatabaseError as error:
            raise InputError(
                f"{self.path} is no profile database, or it is damaged ({error}). Give another"
                " file, or move this one away."
            ) from error
