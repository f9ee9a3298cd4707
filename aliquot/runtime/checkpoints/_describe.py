"""Facts of a folder of checkpoints, as plain data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ...core import InputError
from ._checksums import damage
from ._record import as_json, known, numbers, read_record, unfinished


def describe_checkpoints(folder: Path, number: int | None = None) -> dict[str, Any]:
    """All checkpoints of a folder, complete or not, and the whole record of one of them.

    Args:
        folder: or the folder of one checkpoint in it, which is then the one that is shown.
        number: which one is shown; by default the newest that is complete.

    Raises:
        InputError: there is no such folder, or no such checkpoint in it.
    """
    folder = folder.absolute()
    if number is None and folder.name.isdecimal() and (folder / "meta").is_dir():
        folder, number = folder.parent, int(folder.name)
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    found = numbers(folder)
    if number is not None and number not in found:
        raise InputError(f"there is no checkpoint {number}: {known(folder, found)}.")
    rows: list[dict[str, Any]] = []
    for n in found:
        files = [path for path in (folder / str(n)).rglob("*") if path.is_file()]
        on_disk = sum(path.stat().st_size for path in files)
        rows.append({"number": n, "bytes_on_disk": on_disk, "files": len(files), "fault": ""})
        try:
            record = read_record(folder, n)
        except InputError as error:
            rows[-1]["fault"] = str(error)
            continue
        rows[-1] |= {
            "saved_at": record.saved_at,
            "arrays": len(record.arrays),
            "elements": sum(math.prod(array.shape) for array in record.arrays),
            "processes": record.processes,
            "versions": record.versions,
            "fault": damage(folder, record),
        }
    complete = [row["number"] for row in rows if not row["fault"]]
    if number is None and complete:
        number = complete[-1]
    return {
        "folder": str(folder),
        "checkpoints": rows,
        "unfinished": unfinished(folder),
        "shown": None if number is None else dict(as_json(read_record(folder, number))),
    }
