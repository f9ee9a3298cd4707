"""The steps outside the zoo that `benchmarks/blocks_against_ilp.py` plans too."""

import runpy
from pathlib import Path

_FILE = Path(__file__).parents[1] / "benchmarks" / "_block_steps.py"
_GLOBALS = runpy.run_path(str(_FILE))
STEPS, step_of = _GLOBALS["STEPS"], _GLOBALS["step_of"]
