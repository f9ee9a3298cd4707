"""Files of settings of a training framework, read: whose they are, and what they say."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core import InputError, listing, nearest
from . import _accelerate, _maxtext, _megatron, _torchtitan
from ._settings import Found, Settings
from ._syntax import Text, read_arguments, read_text
from ._table import Table, Words, tables

LayersOf = Callable[[Mapping[str, Any]], int | None]


def read_settings(
    files: Sequence[str | os.PathLike[str]],
    *,
    num_devices: int | None = None,
    framework: str | None = None,
    recipe: str | None = None,
    layers_of: LayersOf = lambda model: model.get("num_layers"),
) -> Found:
    """What files of settings say.

    Args:
        files: Megatron-LM's arguments in a shell script, or as a list; Megatron-Bridge's recipes;
            torchtitan's TOML or config_registry.py; MaxText's YAML or scripts; accelerate's YAML;
            DeepSpeed's JSON; each with a `config.json` of Hugging Face, if there is one, whose path
            is then `model["config"]`. `name=value` and arguments that begin with `--` change what
            files say; a name in capitals is a variable of a script.
        num_devices: of the whole run; without it, what is left to devices stays open.
        framework: whose settings they are, such as "maxtext" or "torchtitan-0.2"; by default the
            one that knows the most of them.
        recipe: the function to read in files of Python that have several.
        layers_of: the number of layers of a model from its fields, where only a name is given.

    Raises:
        InputError: a file cannot be read, belongs to no framework, or contradicts itself; all that
            is wrong is listed.
    """
    texts, config = _texts(files, recipe)
    table = _table_of(texts, framework, [os.fspath(file) for file in files])
    words = Words(table=table, texts=texts, num_devices=num_devices)
    settings, model = _of_framework(words, layers_of, config)
    if words.faults:
        advice = "Nothing is planned from settings that the framework itself would refuse."
        raise InputError(
            listing(f"these settings of {table.title} cannot hold", words.faults, advice)
        )
    count, hosts = words.run()
    if num_devices and count and count != num_devices:
        words.assumed.append(f"the run has {num_devices} devices; the files say {count}")
    nothing = "fused" if table.kernels_fuse and words.flag("compiled", True) else "none"
    if settings.recompute == "none":
        settings = replace(settings, recompute=nothing)
    return Found(
        table=table,
        settings=settings,
        nothing_recomputed=nothing,
        model={**model, **({"config": config} if config else {})},
        num_devices=count,
        num_hosts=hosts,
        said=tuple(words.parts()),
        assumed=tuple(dict.fromkeys(words.assumed)),
        lost=tuple(dict.fromkeys(words.lost)),
        unknown=tuple(dict.fromkeys(words.unknown)),
        advice=tuple(dict.fromkeys(words.advice)),
    )


def _of_framework(
    words: Words, layers_of: LayersOf, config: str
) -> tuple[Settings, dict[str, Any]]:
    name = words.table.framework
    beside = {"config": config} if config else {}
    if name in ("megatron", "bridge"):
        return _megatron.read(words, lambda model: layers_of({**model, **beside}))
    if name in ("accelerate", "deepspeed"):
        reader = {
            "accelerate": _accelerate.read_accelerate,
            "deepspeed": _accelerate.read_deepspeed,
        }
        return reader[name](words), _accelerate.model(words)
    module = _torchtitan if name == "torchtitan" else _maxtext
    model = module.model(words)
    return module.read(words, layers_of({**model, **beside})), model


def _texts(files: Sequence[str | os.PathLike[str]], recipe: str | None) -> tuple[list[Text], str]:
    """What the files hold, and the path of a `config.json` of Hugging Face; empty without one."""
    texts, arguments, config = list[Text](), list[str](), ""
    names = [os.fspath(file) for file in files]
    given = [name for name in names if "=" in name and not Path(name).exists()]
    # Variables of scripts are written in capitals.
    variables = dict(each.split("=", 1) for each in given if re.match(r"[A-Z_0-9]+=", each))
    for file in names:
        if file.partition("=")[0] in variables:
            continue
        if arguments or file.startswith("--") or file in given:
            arguments.append(file)
        elif file.endswith(".json") and _is_model(file):
            config = file
        else:
            texts.append(read_text(file, recipe, variables))
    if arguments:
        texts.append(read_arguments(arguments))
    if not texts:
        raise InputError(
            f"{config or 'nothing'} says no layout: give the framework's own settings, too."
        )
    return texts, config


def _is_model(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.loads(file.read(2**21))
    except (OSError, ValueError, RecursionError):
        # The reader of settings says what is wrong.
        return False
    return isinstance(data, dict) and ("model_type" in data or "architectures" in data)


def _table_of(texts: Sequence[Text], framework: str | None, files: Sequence[str]) -> Table:
    """The table that knows the most settings; among equals, the one that knows the most by name."""
    known = tables()
    if framework is not None:
        names = [*dict.fromkeys(t.framework for t in known), *(_version_name(t) for t in known)]
        if framework not in names:
            raise InputError(
                f"--framework: there is no reader of {framework!r}: {nearest(framework, names)}"
            )
        known = tuple(t for t in known if framework in (t.framework, _version_name(t)))
    names = []
    for text in texts:
        names += [setting.name for setting in text.settings]
    kinds = {text.kind for text in texts}

    def score(table: Table) -> tuple[int, int]:
        if table.kinds and not kinds & set(table.kinds):
            return 0, 0
        canonical = [table.canonical(name) for name in names]
        read = sum(name in table.layout or name in table.model for name in canonical)
        return read, sum(map(table.knows, names))

    best = max(known, key=score)
    if score(best)[0] == 0:
        shown = ", ".join(files)
        advice = (
            "Readers: " + ", ".join(t.title for t in tables()) + ". --framework NAME says which."
        )
        raise InputError(
            listing(
                f"{shown} has no settings of a known framework",
                [f"{len(names)} settings: {', '.join(names[:8]) or 'none'}"],
                advice,
            )
        )
    return best


def _version_name(table: Table) -> str:
    return f"{table.framework}-{table.version}"
