"""Options of several verbs of `aliquot aceso`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AcesoDatabase = Annotated[
    Path,
    typer.Option(
        "--database",
        metavar="DIR",
        help="A folder that Aceso's profiler wrote.",
        show_default=False,
    ),
]
AcesoChain = Annotated[
    Path | None,
    typer.Option(
        "--chain", metavar="FILE", help="A TOML file that says which operators follow one another."
    ),
]
