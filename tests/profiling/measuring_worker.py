"""Measures a few operators in one of several processes with 4 virtual devices each, and prints what
it got. Run by `test_hosts.py`.

Arguments: number of this process, number of all, port of process 0, file of the database.
"""

import dataclasses
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import aliquot.profiling._run as measuring
from aliquot.core import InputError
from aliquot.profiling import (
    LAUNCH,
    Operator,
    ProfileDatabase,
    Timing,
    compile_operator,
    profile_operators,
)
from aliquot.runtime import initialize, shutdown

TIMING = Timing(warm_up=1, repeats=2, least_s=0.0, retries=0)
BETWEEN, WITHIN, ALL = (0,), (1,), (0, 1)
OPERATORS = [
    (LAUNCH, (8,)),
    (Operator("product", "float32", (1, 64, 64, 64)), (8,)),
    *((Operator("all-reduce", "float32", (1 << 20,), axes), (2, 4)) for axes in (BETWEEN, WITHIN)),
    (Operator("collective-permute", "float32", (1 << 20,), ALL), (2, 4)),
    *(
        (Operator("transfer", "float32", (size,)), (n,))
        for n in (8, 4)
        for size in (1 << 16, 1 << 20)
    ),
]
BROKEN = [(Operator("all-gather", "float32", (1 << 10,), ALL), (2, 4))]
REFUSED = [(Operator("all-gather", "float32", (1 << 12,), ALL), (2, 4))]


def main() -> None:
    process, count, port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    initialize(f"127.0.0.1:{port}", count, process)
    said = {}

    def measure(name, operators, database, **options):
        try:
            run = profile_operators(operators, database, timing=TIMING, **options)
        except InputError as error:
            said[name] = str(error)
        else:
            said[name] = {**dataclasses.asdict(run), "seconds": None, "missing": run.num_missing}

    database = ProfileDatabase(path) if process == 0 else None
    measure("first", OPERATORS, database)
    # Only the budget of process 0 counts.
    measure("budget", [*OPERATORS, *BROKEN], database, budget_s=(0.0, 1e9)[process])
    measure("differs", OPERATORS[: 2 + process], database)

    def compile_here(operator, shape):
        found = compile_operator(operator, shape)
        broken = dataclasses.replace(found, compiled=None, failure="INTERNAL: no such kernel")
        return broken if process == 1 else found

    measuring.compile_operator = compile_here
    measure("broken", BROKEN, database)
    measuring.compile_operator = compile_operator
    if database is not None:

        def refuse(key, measurement):
            raise InputError("The disk is full.")

        database.put = refuse
    measure("refused", REFUSED, database)
    if database is not None:
        database.close()
    shutdown()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
