"""Does our reading of Aceso's performance model give Aceso's own figures?

DATA holds Aceso's databases (`aceso-profiles/`), configurations that its search found
(`aceso-configs/`), and what its own evaluator says of them, stage by stage
(`aceso-configs/predicted.json`).

    python benchmarks/aceso_accuracy.py DATA [--quick] [--hardware NAME]
"""

import json
from pathlib import Path

from _results import Report, options

from aliquot.interop.aceso import (
    built_in_chains,
    evaluate_configuration,
    load_database,
    make_chain,
    read_configuration,
)

_TIME_BAR, _MEMORY_BAR = 1e-4, 1e-3


def main() -> int:
    """Run, and write what came out; 1 if any figure is further off than it may be."""
    chosen = options(
        __doc__, lambda parser: parser.add_argument("data", type=Path, help="the folder DATA")
    )
    report = Report(
        name="aceso_accuracy",
        question="Does our reading of Aceso's performance model give Aceso's own figures?",
        bar=(
            f"iteration times within {_TIME_BAR:.2%}, memory of every stage within"
            f" {_MEMORY_BAR:.1%}"
        ),
        method=(
            "Each configuration is judged with all faults of the model on. Differences are"
            " relative, the largest of its stages."
        ),
    )
    configurations = chosen.data / "aceso-configs"
    rows = []
    for name, wanted in sorted(json.loads((configurations / "predicted.json").read_text()).items()):
        read = read_configuration(configurations / f"{name}.json")
        database = _database(
            chosen.data / "aceso-profiles", f"{read.model_name}_{read.model_size}", name
        )
        chain = make_chain(built_in_chains()[read.model_name], read.settings)
        nodes = max(sum(stage.num_devices for stage in read.stages) // 8, 1)
        found = evaluate_configuration(
            read,
            chain,
            database,
            gpus_per_node=sum(stage.num_devices for stage in read.stages) // nodes,
        )
        rows.append(
            {
                "configuration": name,
                "Aceso ms": f"{wanted['best_iteration_ms']:.4f}",
                "ours ms": f"{found.iteration_time_ms:.4f}",
                "iteration": abs(found.iteration_time_ms / wanted["best_iteration_ms"] - 1),
                "stage times": _worst([s.busy_ms for s in found.stages], wanted["stage_time_ms"]),
                "memory": _worst([s.memory_mb for s in found.stages], wanted["stage_memory_mb"]),
                "reserved": _worst(
                    [s.reserved_mb for s in found.stages], wanted["stage_reserved_mb"]
                ),
                "not measured": len(found.missing),
            }
        )
    report.tables["Configurations"] = rows
    times = max(max(row["iteration"], row["stage times"]) for row in rows)
    memory = max(max(row["memory"], row["reserved"]) for row in rows)
    report.summary = {
        "configurations": len(rows),
        "largest difference of times": times,
        "of memory": memory,
    }
    return report.finish(chosen, met=times <= _TIME_BAR and memory <= _MEMORY_BAR)


def _database(folder: Path, model: str, name: str):
    """The smaller set of measurements for the smaller cases."""
    return load_database(
        folder / f"profiled-time-{'miniset' if name.endswith('_small') else 'eurosys'}", model
    )


def _worst(found, wanted) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
