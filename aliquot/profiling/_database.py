"""The profile database: one row for each program that was measured.

It is an SQLite file in WAL mode. Every measurement is a transaction of its own, so a run that is
killed loses none of its finished measurements and can be continued, and readers never wait.

What a file holds is checked row by row when it is read (`_Row`): rows that cannot be measurements
are named in a warning, and the others are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta

from ..cluster import MEASURED
from ..core import AliquotWarning, InputError, counted, faults_of, listing, printable, shortened

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
_WAIT_S = 10.0
_MOST_NAMED = 5
_LEAST_S = 1e-9
_FAILED, _OUT_OF_MEMORY = "failed: ", "out of memory"
_RAN = ("ok", "stopped early")
_ON, _HOSTS = " on ", " hosts"
_LONGEST_ERROR = 200


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row as the file holds it, in the order of its columns, with what each may be."""

    key: str
    program: str
    device: str
    num_devices: Annotated[int, Meta(ge=1, le=1_000_000)]
    mesh: Annotated[
        str, Meta(pattern=rf"^[1-9]\d{{0,5}}(x[1-9]\d{{0,5}})*({_ON}[1-9]\d{{0,5}}{_HOSTS})?$")
    ]
    jax_version: str
    label: str
    grade: Literal["measured", "measured-compute"]
    seconds: Annotated[float, Meta(ge=_LEAST_S, le=1e6)] | None
    spread: Annotated[float, Meta(ge=0, le=1e9)]
    repeats: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    memory_bytes: Annotated[float, Meta(ge=0, le=1e18)]
    outcome: str


_COLUMNS = ", ".join(field.name for field in msgspec.structs.fields(_Row))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramKey:
    """What a measurement is of: measurements with equal keys are of the same program.

    Attributes:
        program: a hash of the program and of the splits of its arrays; of a single operator, its
            text (see `Operator`).
        device: kind of the devices; for CPUs also how many cores they share.
        num_devices, mesh: number of devices, and their arrangement, such as `"4x2"`, or `"4x2 on 2
            hosts"`; see `mesh_text`.
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

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The sizes of the mesh's axes."""
        return tuple(int(size) for size in self.mesh.partition(_ON)[0].split("x"))

    @property
    def num_hosts(self) -> int:
        """How many hosts have these devices, equally many each."""
        on = self.mesh.partition(_ON)[2].removesuffix(_HOSTS)
        return int(on) if on else 1

    @property
    def devices(self) -> str:
        """The devices in words."""
        on = f"{self.num_hosts} hosts x " if self.num_hosts > 1 else ""
        return f"{on}{self.num_devices // self.num_hosts} x {self.device}"


def mesh_text(shape: Sequence[int], num_hosts: int) -> str:
    """The mesh of a `ProgramKey`. What one host measured is no measurement of links between hosts,
    so several hosts are named.

    >>> mesh_text((4, 2), 1), mesh_text((4, 2), 2)
    ('4x2', '4x2 on 2 hosts')
    """
    on = f"{_ON}{num_hosts}{_HOSTS}" if num_hosts > 1 else ""
    return "x".join(map(str, shape)) + on


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
        path: path of the file, which is created if it is missing, unless `must_exist`. A file that
            must exist need not be writable, nor its folder.

    Raises:
        InputError: the file is no profile database, is damaged, or has another format; or it is
            missing.
    """

    def __init__(self, path: str | os.PathLike[str], *, must_exist: bool = False) -> None:
        self.path = Path(path)
        if must_exist and not os.path.exists(self.path):
            raise InputError(
                f"There is no profile database {self.path}. Make one of operators with: aliquot"
                f" profile run MODEL --database {self.path}, or of segments with: aliquot blocks"
                f" profile MODEL --database {self.path}"
            )
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise InputError(f"{self.path} is no profile database: it is no file.")
        folder = self.path.parent
        self._is_read_only = must_exist and not (
            os.access(self.path, os.W_OK) and os.access(folder, os.W_OK)
        )
        with self._named_faults():
            # Without Python's implicit transactions: every statement is a transaction of its own,
            # committed when it returns.
            self._connection = sqlite3.connect(
                self._address(), timeout=_WAIT_S, isolation_level=None, uri=True
            )
        # Bytes that are no text spoil one row, not the reading of all.
        self._connection.text_factory = lambda data: data.decode(errors="replace")
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        name = f"file:{quote(os.fspath(self.path))}"
        if not self._is_read_only:
            return name
        # Where nothing can be written, SQLite cannot make the files that share a log among
        # processes. Without a log, it need not.
        log = self.path.with_name(f"{self.path.name}-wal")
        has_log = log.exists() and log.stat().st_size > 0
        return f"{name}?mode=ro" if has_log else f"{name}?mode=ro&immutable=1"

    def _prepare(self) -> None:
        """Create the tables of a new file, and check the format of an existing one."""
        with self._named_faults():
            # A file may bring views and triggers, which are programs. Measurements need none.
            self._connection.execute("PRAGMA trusted_schema=OFF")
            kinds = {kind for (kind,) in self._connection.execute("SELECT type FROM sqlite_master")}
            if not kinds.isdisjoint({"view", "trigger"}):
                raise InputError(f"{self.path} is no profile database: it has views or triggers.")
            if not self._is_read_only:
                # Readers are not blocked while a run writes.
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.executescript(_TABLES)
            versions = self._connection.execute("SELECT version FROM format").fetchall()
            if not versions and not self._is_read_only:
                self._connection.execute("INSERT INTO format VALUES (?)", (_FORMAT,))
        if versions and versions[0][0] != _FORMAT:
            raise InputError(
                f"{self.path} has format {shortened(repr(versions[0][0]), 40)}, and this version of"
                f" aliquot reads {_FORMAT}. Read it with the version that wrote it, or measure"
                " again into another file."
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
        """The measurement of a program, or None; also if its row is no measurement."""
        with self._named_faults():
            row = self._connection.execute(
                f"SELECT {_COLUMNS} FROM measurements WHERE key = ?", (key.digest,)
            ).fetchone()
        if row is None:
            return None
        found = _read(row)
        # The index of a damaged file may lead to another program's row.
        return None if isinstance(found, str) or found[0] != key else found[1]

    def put(self, key: ProgramKey, measurement: Measurement) -> None:
        """Store a measurement, in place of an earlier one of the same program.

        Raises:
            InputError: the file cannot be written, because the disk is full or another process
                locks it; earlier measurements are not lost.
        """
        m = measurement
        # A launch may take less than the clock resolves.
        seconds = m.seconds if m.seconds is None else max(m.seconds, _LEAST_S)
        of_key = (key.digest, key.program, key.device, key.num_devices, key.mesh, key.jax_version)
        row = (*of_key, m.label, m.grade, seconds, m.spread, m.repeats, m.memory_bytes, m.outcome)
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
        with ProfileDatabase(other, must_exist=True) as theirs:
            found = list(theirs.rows())
        copied = 0
        with self._named_faults():
            self._connection.execute("BEGIN")
        try:
            for key, measurement in found:
                mine = self.get(key)
                # A failure is only a reason to try again, so a measurement replaces it.
                if mine is None or (mine.has_failed and not measurement.has_failed):
                    self.put(key, measurement)
                    copied += 1
        finally:
            with self._named_faults():
                self._connection.execute("COMMIT")
        return copied

    def __len__(self) -> int:
        with self._named_faults():
            return int(self._connection.execute("SELECT COUNT(*) FROM measurements").fetchone()[0])

    def rows(self) -> Iterator[tuple[ProgramKey, Measurement]]:
        """All measurements, by label. Rows that are none are left out, with a warning that names
        them.
        """
        found: list[tuple[ProgramKey, Measurement]] = []
        refused = []
        with self._named_faults():
            # Sorted here: without an order, what lies before damage to the file can be read.
            cursor = self._connection.execute(f"SELECT {_COLUMNS} FROM measurements")
            while True:
                try:
                    row = cursor.fetchone()
                except sqlite3.DatabaseError as error:
                    if not found:
                        raise
                    refused.append(f"the file is damaged behind these: {error}")
                    break
                if row is None:
                    break
                read = _read(row)
                if isinstance(read, str):
                    refused.append(read)
                else:
                    found.append(read)
        if refused:
            more = len(refused) - _MOST_NAMED
            shown = [*refused[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
            warnings.warn(
                listing(
                    f"{self.path} has rows that are no measurements",
                    shown,
                    f"They are left out; the other {counted(len(found), 'row')} are used. Measure"
                    " these programs again, or restore the file.",
                ),
                AliquotWarning,
                stacklevel=2,
            )
        yield from sorted(found, key=lambda row: (row[1].label, row[0].digest))

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


def _read(row: Sequence[Any]) -> tuple[ProgramKey, Measurement] | str:
    """What a row says, or what is wrong with it."""
    fields = dict(zip(_Row.__struct_fields__, row, strict=True))
    name = shortened(printable(str(fields["label"] or fields["key"]), keep=""), 60)
    if faults := list(faults_of(fields, _Row, "")):
        return f"row {name!r}: {'; '.join(faults)}"
    r = msgspec.convert(fields, _Row)
    key = ProgramKey(
        program=r.program,
        device=r.device,
        num_devices=r.num_devices,
        mesh=r.mesh,
        jax_version=r.jax_version,
    )
    if key.digest != r.key:
        return f"row {name!r}: its key is that of another program"
    ran = r.outcome in _RAN
    if not ran and r.outcome != _OUT_OF_MEMORY and not r.outcome.startswith(_FAILED):
        return f"row {name!r}: outcome is {shortened(printable(r.outcome, keep=''), 40)!r}"
    if ran != (r.seconds is not None):
        return f"row {name!r}: outcome is {r.outcome!r}, with {r.seconds} seconds"
    return key, Measurement(
        seconds=r.seconds,
        spread=r.spread,
        repeats=r.repeats,
        memory_bytes=r.memory_bytes,
        outcome=r.outcome,
        grade=r.grade,
        label=r.label,
    )
