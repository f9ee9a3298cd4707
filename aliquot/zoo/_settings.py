"""Checks of a model's settings that come from a file: finds all faults before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..core import InputError, nearest, shortened
from ._step import build, configuration, faults_of_step

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, Mapping), "a name or the fields of a configuration"),
    "global_batch": ((int,), "a whole number"),
    "overrides": ((Mapping, type(None)), "an object"),
    "dtype": ((str, type(None)), "a name"),
    "recompute": ((str,), "a name"),
    "scan": ((bool,), "true or false"),
    "optimizer": ((str,), "a name"),
    "learning_rate": ((int, float, Mapping), "a number or the fields of a schedule"),
    "weight_decay": ((int, float, type(None)), "a number"),
    "momentum": ((int, float), "a number"),
    "clip_norm": ((int, float, type(None)), "a number"),
    "grad_norm": ((bool,), "true or false"),
    "loss_scaling": ((str, type(None)), "a name"),
    "attention": ((str,), "a name"),
}


def settings_faults(settings: Mapping[str, Any]) -> list[str]:
    """Reasons why `build(**settings)` would refuse the settings of a plan file; empty if there are
    none.

    >>> settings_faults({"model": "gpt-125m", "global_batch": 0, "scan": 1})
    ['scan=1 is not true or false', 'global_batch=0 must be at least 1.']
    """
    faults = []
    for key in settings:
        if key not in _KINDS:
            faults.append(f"there is no setting {key!r}: {nearest(str(key), _KINDS)}")
    faults += [f"{key} is missing" for key in ("model", "global_batch") if key not in settings]
    given = {key: value for key, value in settings.items() if key in _KINDS}
    usable = {}
    for name, each in inspect.signature(build).parameters.items():
        if each.default is not inspect.Parameter.empty and name in _KINDS:
            usable[name] = each.default
    wrong = set()
    for key, value in given.items():
        kinds, what = _KINDS[key]
        # A truth value is a number, too.
        if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
            usable[key] = value
        else:
            wrong.add(key)
            faults.append(f"{key}={shortened(repr(value), 60)} is not {what}")
    config = None
    if "model" in usable and not wrong & {"overrides"}:
        try:
            config = configuration(usable["model"], usable["overrides"])
        except InputError as error:
            faults.append(str(error))
    return faults + faults_of_step(config, usable)
