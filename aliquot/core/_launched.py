"""What a launcher tells a process through its environment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ._errors import InputError

SECRET, SECRET_FILE = "ALIQUOT_SECRET", "ALIQUOT_SECRET_FILE"

_VARIABLES = {
    "address": "ALIQUOT_COORDINATOR_ADDRESS",
    "num_processes": "ALIQUOT_NUM_PROCESSES",
    "process_id": "ALIQUOT_PROCESS_ID",
    "run_id": "ALIQUOT_RUN_ID",
    "attempt": "ALIQUOT_ATTEMPT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedProcess:
    """A process's place among those that a launcher has started.

    Attributes:
        address: `host:port` at which process 0 awaits the others.
        num_processes, process_id: how many there are, and which one this is.
        run_id: a name that only the processes of this attempt share.
        attempt: how often the run has been started, this time included.
    """

    address: str
    num_processes: int
    process_id: int
    run_id: str
    attempt: int

    def environment(self) -> dict[str, str]:
        """The variables that tell a process its place."""
        return {_VARIABLES[name]: str(value) for name, value in asdict(self).items()}

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> LaunchedProcess | None:
        """The place that an environment tells; None if no launcher of ours made it.

        Raises:
            InputError: variables are missing, or are no numbers.
        """
        given = {name: environment.get(key, "") for name, key in _VARIABLES.items()}
        if not given["address"]:
            return None
        numbers = {}
        for name in ("num_processes", "process_id", "attempt"):
            if given[name].isdecimal():
                numbers[name] = int(given[name])
        if len(numbers) < 3:
            raise InputError(
                f"{_VARIABLES['address']} says that `aliquot launch` has started this process, but"
                f" {', '.join(_VARIABLES[n] for n in ('num_processes', 'process_id', 'attempt'))}"
                " are not all numbers. Unset them all, or start it with `aliquot launch`."
            )
        return LaunchedProcess(address=given["address"], run_id=given["run_id"], **numbers)


def make_secret() -> str:
    """A new secret for the processes of one run: 43 random characters, for `ALIQUOT_SECRET` in the
    environment of each process or for the file that `ALIQUOT_SECRET_FILE` names.
    """
    return secrets.token_urlsafe(32)
