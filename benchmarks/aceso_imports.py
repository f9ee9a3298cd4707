"""Do plans made of Aceso's configurations fit the GPUs on which Aceso ran them?

DATA holds configurations that Aceso's search found (`aceso-configs/*.json`). Those whose names end
in `_small` are for 12,000 MiB on each of 4 GPUs, the others for 28,000 MiB.

    python benchmarks/aceso_imports.py DATA [--only NAME] [--hardware NAME]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _results import Report, options

from aliquot.core import format_bytes
from aliquot.interop.aceso import Configuration, read_configuration
from aliquot.plans import Plan

_GPUS_OF_A_NODE = 8
# By family: how the zoo calls it, the dtype, and the zoo's names of what configurations say.
_ZOO = {
    "gpt": ("gpt-{}", "float16", {"seq_length": "seq_len"}),
    "t5": (
        "t5-{}",
        "float16",
        {"encoder_seq_length": "seq_len", "decoder_seq_length": "target_len"},
    ),
    "resnet": ("wide-resnet-{}", "float32", {}),
}


def main() -> int:
    """Import all, and write which fit; 1 if any does not."""
    chosen = options(__doc__, _more)
    report = Report(
        name="aceso_imports",
        question="Do plans made of Aceso's configurations fit the GPUs on which Aceso ran them?",
        bar="every configuration fits",
        method=(
            "`aliquot aceso import` for V100s of 32 GB, under the memory that the search was"
            " given. Memory is that of the fullest device."
        ),
    )
    rows = []
    for path in sorted((chosen.data / "aceso-configs").glob("*.json")):
        if path.stem == "predicted" or chosen.only not in (None, path.stem):
            continue
        rows.append(_imported(path))
        print(json.dumps(rows[-1]), flush=True)
    report.tables["Configurations"] = rows
    fit = sum(row["fits"] == "yes" for row in rows)
    report.summary = {"configurations": len(rows), "fit": fit}
    return report.finish(chosen, met=fit == len(rows))


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="the folder DATA")
    parser.add_argument("--only", help="the name of one configuration")


def _imported(path: Path) -> dict[str, Any]:
    configuration = read_configuration(path)
    limit_mib = 12000 if path.stem.endswith("_small") else 28000
    row = {"configuration": path.stem, "limit MiB": limit_mib}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", *_command(path, configuration, limit_mib, out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return row | {"fits": "no", "memory": "", "step s": "", "why": done.stderr.strip()}
        prediction = Plan.load(out).prediction
    memory = format_bytes(prediction.peak_memory_bytes)
    return row | {
        "fits": "yes",
        "memory": memory,
        "step s": f"{prediction.step_time_s:.2f}",
        "why": "",
    }


def _command(path: Path, configuration: Configuration, limit_mib: int, out: Path) -> list[str]:
    name, dtype, settings = _ZOO[configuration.model_name]
    devices = sum(stage.num_devices for stage in configuration.stages)
    nodes = max(devices // _GPUS_OF_A_NODE, 1)
    sizes = [
        part
        for key, setting in settings.items()
        for part in ("--set", f"{setting}={configuration.settings[key]}")
    ]
    model = name.format(configuration.model_size.replace("_", ".").lower())
    return [
        *("aliquot", "aceso", "import", str(path), "--model", model, "--dtype", dtype, *sizes),
        *("--cluster", f"{nodes}x{devices // nodes}xV100-32GB"),
        *("--memory-limit", f"{limit_mib}MiB", "--out", str(out)),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
