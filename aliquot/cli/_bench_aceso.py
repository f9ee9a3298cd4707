"""`aliquot bench aceso`: the figures of Aceso's paper, with our search beside the published
ones.
"""

from __future__ import annotations

from pathlib import Path

from ..core import InputError
from ._groups import option
from ._options import Json
from ._session import session


def aceso(
    database: Path = option(
        "The database of the V100 nodes with 8 GPUs; with --small that of 4 GPUs.",
        ...,
        metavar="DIR",
    ),
    out: Path = option(
        "Folder for PNG, CSV and index.html; searches that are there are not made again.",
        ...,
        metavar="DIR",
    ),
    published: Path | None = option(
        "CSV files of the figures of Aceso's artifact, or of a run of it; needed unless --small.",
        metavar="DIR",
    ),
    small: bool = option(
        "The tables of the small setting: a model of each family on 4 GPUs of 12,000 MiB.", False
    ),
    max_layers: int = option("The deepest model of figure 9.", 1024, min=1),
    as_json: Json = False,
) -> None:
    """Draw figures 7, 8 and 9 of Aceso's paper and the accuracy of its performance model; no
    hardware is needed.

    Published throughput is measured; ours is relative to Megatron-LM's best grid point, as Aceso's
    performance model predicts both.
    """
    with session(as_json) as say:
        if published is None and not small:
            raise InputError(
                "The figures show what was published: add --published DIR, a folder of the CSV"
                " files of Aceso's artifact, or --small for tables that need none."
            )
        from ..interop.aceso import PublishedTables
        from ..suites import Results, draw_aceso

        tables = PublishedTables(published)
        results = Results(out, say.show, title="aliquot beside Aceso")
        say.finish(
            draw_aceso(database, tables, results, max_layers=max_layers, small=small, note=say.note)
        )
