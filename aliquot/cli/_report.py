"""`aliquot report`: what a report of a fault needs, without names of people and their folders."""

from __future__ import annotations

import getpass
import os
import platform
import sys
from pathlib import Path
from typing import Any

from ..core import version_of
from ._devices import use_seen_devices
from ._groups import option
from ._options import Json, read_plan
from ._session import session

_PACKAGES = ("aliquot", "jax", "jaxlib", "flax", "optax", "equinox", "numpy", "highspy")
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_ENABLE_X64", "CUDA_VISIBLE_DEVICES")


def report(
    plan_file: Path | None = option("Also describe this plan.", names="--plan", metavar="PLAN"),
    as_json: Json = False,
) -> None:
    """Print what a report of a fault needs: versions, devices and a plan, without your folders."""
    with session(as_json) as say:
        plan = None if plan_file is None else read_plan(plan_file)
        devices = use_seen_devices()
        kinds = sorted({f"{device.platform} {device.device_kind}" for device in devices})
        answer: dict[str, Any] = {
            "versions": {name: version_of(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "devices": f"{len(devices)} x {', '.join(kinds)}",
            "environment": {
                name: redacted(os.environ[name]) for name in _VARIABLES if name in os.environ
            },
            "command": redacted(" ".join(sys.argv)),
            "plan": None if plan is None else redacted(plan.describe(every=True)),
        }
        for name in ("python", "system", "devices"):
            say.show(f"{name:12} {answer[name]}")
        for name, value in (answer["versions"] | answer["environment"]).items():
            say.show(f"{name:12} {value}")
        if plan is not None:
            say.show(f"\n{answer['plan']}")
        say.finish(answer)


def redacted(text: str) -> str:
    """A text without the user's folders and name."""
    for private, said in (
        (str(Path.cwd()), "."),
        (str(Path.home()), "~"),
        (getpass.getuser(), "<user>"),
    ):
        # The root of all folders, or a name of few letters, would be found everywhere.
        if len(private) > 3 and private != "root":
            text = text.replace(private, said)
    return text
