"""The profile database: one row for each program that was measured.

It is an SQLite file in WAL mode. Every measurement is a transaction of its own, so a run that is
killed loses none of its finished measurements and can be continued, and readers never wait.
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
    """What a measurement is of: measurements with equal keys are of the same program.

    Attributes:
        program: a hash of the program and of the splits of its arrays; of a single operator, its
            text (see `Operator`).
        device: kind of the devices; for CPUs also how many cores they share.
        num_devices, mesh: number of devices, and their arrangement, such as `"4x2"`.
        jax_version: its compiler compiled the program.
    """

    program: str
    device: str
    num_devices: int
    mesh: str
    jax_version: str

    @property
    def digest(self) -> str:
        """A hash of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The result of measuring one program.

    Attributes:
        seconds: median of the timed runs, or the fastest warm-up run if stopped early; None if the
            program did not run.
        spread: half the interquartile range, as a share of the median.
        repeats: number of timed runs; 1 if stopped early, 0 if the program did not run.
        memory_bytes: memory on each device, as the compiler states it.
        outcome: `"ok"`, `"stopped early"`, `"out of memory"`, or `"failed: "` and the error; see
            `failed`.
        grade: `MEASURED` if all devices ran, `MEASURED_COMPUTE` if one device alone ran what each
            of many would run.
        label: name for readers.
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
        """True if the program ended with an error other than too little memory; such programs are
        measured again.
        """
        return self.outcome.startswith(_FAILED)


def failed(error: str) -> str:
    """The outcome of a program that failed: the error's first line, shortened."""
    line = next(iter(error.strip().splitlines()), "no reason given")
    return f"{_FAILED}{line[:_LONGEST_ERROR]}"


def check_database(path: str | os.PathLike[str]) -> None:
    """Check that a database can be opened.

    Raises:
        InputError: it is missing or is no profile database.
    """
    ProfileDatabase(path, must_exist=True).close()


class ProfileDatabase:
    """A file of measurements; see the module's description. Use it in a `with` statement, or
    `close` it.

    Args:
        path: path of the file, which is created if it is missing, unless `must_exist`.

    Raises:
        InputError: the file is no profile database, is damaged, or has another format; or it is
            missing.
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
            # Without Python's implicit transactions: every statement is a transaction of its own,
            # committed when it returns.
            self._connection = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Create the tables of a new file, and check the format of an existing one."""
        with self._named_faults():
            # Readers are not blocked while a run writes.
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
        """Store a measurement, in place of an earlier one of the same program.

        Raises:
            InputError: the file cannot be written, because the disk is full or another process
                locks it; earlier measurements are not lost.
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
        """Copy from another database the measurements of programs that this one lacks, or whose
        measurement failed here and not there.

        Returns:
            How many measurements were copied.

        Raises:
            InputError: `other` is missing or is no profile database.
        """
        # ATTACH would create a missing file, so check first.
        check_database(other)
        with self._named_faults():
            self._connection.execute("ATTACH DATABASE ? AS other", (os.fspath(other),))
            try:
                # A failure is only a reason to try again, so a measurement replaces it.
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
        """Turn SQLite's errors into messages that say what to do."""
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
