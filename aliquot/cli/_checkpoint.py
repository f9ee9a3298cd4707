"""`aliquot checkpoint`: what a folder of checkpoints holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import counted, format_bytes, format_count
from ._devices import use_host_only
from ._groups import argument, option
from ._options import Json
from ._session import Session, session

_ARRAYS = 12


def show_checkpoint(
    folder: Path = argument("A folder of checkpoints, or one of them.", metavar="FOLDER"),
    number: int | None = option("Show this one; by default the newest."),
    arrays: bool = option("List all arrays.", False),
    as_json: Json = False,
) -> None:
    """Show the checkpoints in a folder, and the arrays and data of one of them."""
    with session(as_json) as say:
        use_host_only()
        from ..runtime import describe_checkpoints

        answer = describe_checkpoints(folder, number)
        _show_folder(say, answer)
        if answer["shown"] is not None:
            _show_one(say, answer["shown"], None if arrays else _ARRAYS)
        say.finish(answer)


def _show_folder(say: Session, answer: Mapping[str, Any]) -> None:
    from ..report import columns

    rows = answer["checkpoints"]
    if not rows:
        say.show(f"{answer['folder']} holds no complete checkpoint.")
    else:
        header = ("number", "saved at", "arrays", "elements", "on disk", "files", "written by")
        say.show(
            columns(
                f"{counted(len(rows), 'checkpoint')} in {answer['folder']}",
                header,
                [
                    (
                        str(row["number"]),
                        row["saved_at"].replace("T", " ").replace("+00:00", " UTC"),
                        str(row["arrays"]),
                        format_count(row["elements"]),
                        format_bytes(row["bytes_on_disk"]),
                        str(row["files"]),
                        f"{counted(row['processes'], 'process')},"
                        f" aliquot {row['versions'].get('aliquot', '?')},"
                        f" jax {row['versions'].get('jax', '?')}",
                    )
                    for row in rows
                    if "saved_at" in row
                ],
                right=(0, 2, 3, 4, 5),
            )
        )
    for row in rows:
        if row["fault"]:
            say.show(f"{row['number']} is not usable: {row['fault']}")
    for name in answer["unfinished"]:
        say.show(f"{name} was not written to its end; the next save removes it.")


def _show_one(say: Session, record: Mapping[str, Any], most: int | None) -> None:
    from ..report import columns

    arrays = record["arrays"]
    shown = arrays if most is None or len(arrays) <= most + 1 else arrays[:most]
    of = "" if len(shown) == len(arrays) else f", the first {len(shown)} of {len(arrays)}"
    say.show(
        columns(
            f"Arrays of checkpoint {record['number']}{of}",
            ("path", "shape", "dtype"),
            [(a["path"], " x ".join(map(str, a["shape"])) or "-", a["dtype"]) for a in shown],
        )
    )
    if of:
        say.show("All of them: --arrays.")
    if record["meta"]:
        say.show(f"Saved with it: {json.dumps(record['meta'], ensure_ascii=False)}")
