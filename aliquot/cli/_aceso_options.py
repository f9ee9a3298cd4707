"""Options of several verbs of `aliquot aceso`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ._groups import argument, option

AcesoDatabase = Annotated[Path, option("A folder that Aceso's profiler wrote.", metavar="DIR")]
AcesoFile = Annotated[Path, argument("A configuration in Aceso's JSON.", metavar="CONFIG")]
AcesoChain = Annotated[
    Path | None, option("A TOML file that says which operators follow one another.", metavar="FILE")
]
