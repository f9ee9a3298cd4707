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
from ._resume import checkpoint_folder
from ._session import session

_ARRAYS = 12


def show_checkpoint(
    folder: Path = argument(
        "A run of aliquot train, a folder of checkpoints, or one of them.", metavar="FOLDER"
    ),
    number: int | None = option("Show this one; by default the newest."),
    arrays: bool = option("List all arrays.", False),
    as_json: Json = False,
) -> None:
    """Show the checkpoints in a folder, and the arrays and data of one of them."""
    with session(as_json) as say:
        use_host_only()
        from ..report import Column, table
        from ..runtime import describe_checkpoints

        answer = describe_checkpoints(checkpoint_folder(folder), number)
        rows = answer["checkpoints"]
        if not rows:
            say.show(f"{answer['folder']} holds no complete checkpoint.")
        else:
            say.show(
                table(
                    f"{counted(len(rows), 'checkpoint')} in {answer['folder']}",
                    [row for row in rows if "saved_at" in row],
                    Column("number", "number", number=True),
                    Column(
                        "saved at",
                        "saved_at",
                        lambda at: at.replace("T", " ").replace("+00:00", " UTC"),
                    ),
                    Column("arrays", "arrays", number=True),
                    Column("elements", "elements", format_count, number=True),
                    Column("on disk", "bytes_on_disk", format_bytes, number=True),
                    Column("files", "files", number=True),
                    Column("written by", _writer),
                )
            )
        for row in rows:
            if row["fault"]:
                say.show(f"{row['number']} is not usable: {row['fault']}")
        for name in answer["unfinished"]:
            say.show(f"{name} was not written to its end; the next save removes it.")
        if answer["shown"] is not None:
            record = answer["shown"]
            found = record["arrays"]
            shown = found if arrays or len(found) <= _ARRAYS + 1 else found[:_ARRAYS]
            of = "" if len(shown) == len(found) else f", the first {len(shown)} of {len(found)}"
            say.show(
                table(
                    f"Arrays of checkpoint {record['number']}{of}",
                    shown,
                    Column("path", "path"),
                    Column("shape", "shape", lambda shape: " x ".join(map(str, shape)) or "-"),
                    Column("dtype", "dtype"),
                )
            )
            if of:
                say.show("All of them: --arrays.")
            if record["meta"]:
                say.show(f"Saved with it: {json.dumps(record['meta'], ensure_ascii=False)}")
        say.finish(answer)


def _writer(row: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {row['versions'].get(name, '?')}" for name in ("aliquot", "jax"))
    return f"{counted(row['processes'], 'process')}, {versions}"
