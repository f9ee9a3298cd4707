"""From what a user calls a model to a step with its arguments: a name from the zoo, or a factory in a module."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..cluster import Cluster
from ..core import AliquotError, InputError, nearest
from ..plans import ModelReference
from ..zoo import MODELS, AbstractConfig, Workload, build
from ._devices import use_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A training step, shapes of its state and batch, and how to make it again. Only the zoo's have a `workload`."""

    name: str
    step: Callable[..., Any]
    state: Any
    batch: Any
    reference: ModelReference
    workload: Workload | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooOptions:
    """The options that shape a model of the zoo, as `aliquot.zoo.build` takes them. `dtype` None: by the device."""

    global_batch: int | None
    dtype: str | None = None
    recompute: str | None = None
    scan: bool = False
    overrides: Mapping[str, Any]

    def dtype_for(self, config: AbstractConfig, cluster: Cluster) -> str:
        """The model's usual one, else bf16, or float16 on devices whose float16 units are faster than their bfloat16 ones."""
        chosen = self.dtype or config.usual_dtype
        if chosen is not None:
            return chosen
        return "float16" if cluster.device.peak("float16") > cluster.device.peak("bfloat16") else "bf16"


def resolve(name: str, options: ZooOptions, cluster: Cluster) -> Model:
    """The model of a name.

    Raises:
        InputError: No such model or factory, options that do not go with it, or the user's own code failed.
        MissingExtraError: A model of the zoo without the packages it needs.
    """
    if ":" in name:
        return _from_factory(name, options)
    if name not in MODELS:
        raise InputError(
            f"there is no model {name!r}: {nearest(name, MODELS)} Or give a factory as package.module:function."
        )
    if options.global_batch is None:
        examples = MODELS[name].examples
        raise InputError(f"{name} needs --global-batch: the number of {examples} in a step, over all devices.")
    dtype = options.dtype_for(MODELS[name], cluster)
    use_precision(dtype)
    workload = build(
        name,
        options.global_batch,
        overrides=options.overrides,
        dtype=dtype,
        recompute=options.recompute or "block",
        scan=options.scan,
    )
    return from_workload(workload)


def from_workload(workload: Workload) -> Model:
    """A model of the zoo."""
    name = workload.config.name
    return Model(
        name=name,
        step=workload.train_step,
        state=workload.state,
        batch=workload.batch,
        reference=ModelReference(kind="zoo", name=name, settings=workload.settings),
        workload=workload,
    )


def rebuild(reference: ModelReference, *, named: str | None = None, trusted: bool = False) -> Model:
    """The model that a plan was made for, or the one that the user names instead.

    Args:
        named: what the user calls the model on the command line, which may be a factory.
        trusted: whether the user lets the plan file itself name a factory. Otherwise a file only ever chooses among the
            models of the zoo: it never decides what code runs.

    Raises:
        InputError: It cannot be made, or only by a function that nobody but the file names; the message says why.
    """
    chosen = reference if named is None else _named(reference, named)
    if named is None and (reason := unnamed(reference, trusted=trusted)):
        raise InputError(reason)
    if chosen.kind == "zoo":
        use_precision(str(chosen.settings.get("dtype")))
        try:
            return from_workload(build(**chosen.settings))
        except TypeError as error:
            raise InputError(f"the plan's settings of {chosen.name} are not those of the zoo: {error}.") from None
    return _from_factory(chosen.name, ZooOptions(global_batch=None, overrides=chosen.settings))


def unnamed(reference: ModelReference, *, trusted: bool = False) -> str:
    """Why the model of a plan file cannot be made unless the user names it; empty if it can."""
    if reference.kind == "factory" and not trusted:
        return (
            f"the plan file names the function that makes its step, {reference.name}, and a file does not decide what code "
            f"runs. If that function is yours, add --model {reference.name}; --trust-plan calls whatever the file names."
        )
    if reference.kind in ("zoo", "factory"):
        return ""
    return (
        f"the plan is for {reference.name or 'a function'}, and its file does not say how to make that again. "
        "Name it with --model package.module:factory."
    )


def _named(reference: ModelReference, name: str) -> ModelReference:
    """The model that the user names, with the plan's settings where these belong to it."""
    settings = dict(reference.settings)
    if ":" in name:
        return ModelReference(kind="factory", name=name, settings=settings if name == reference.name else {})
    if reference.kind != "zoo":
        raise InputError(
            f"--model {name}: this plan was not made for a model of the zoo, so nothing says how large its batch is. "
            "Give a factory as package.module:function."
        )
    if name not in MODELS:
        raise InputError(f"there is no model {name!r}: {nearest(name, MODELS)}")
    if name != reference.name:
        settings |= {"model": name, "overrides": {}}
    return ModelReference(kind="zoo", name=name, settings=settings)


def _from_factory(name: str, options: ZooOptions) -> Model:
    odd = [
        flag
        for flag, given in (("--dtype", options.dtype), ("--recompute", options.recompute), ("--scan", options.scan))
        if given
    ]
    if odd:
        raise InputError(f"{', '.join(odd)}: only for models of the zoo; {name} decides this by itself.")
    factory = _find(name)
    settings = dict(options.overrides)
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        raise InputError(f"{name} cannot be called with --set {settings}: {error}.") from None
    with user_code(name, "fails"):
        made = factory(**settings)
    if not (isinstance(made, tuple) and len(made) == 3 and callable(made[0])):
        raise InputError(
            f"{name} must return (train_step, state, batch) with a function first, got {_kind(made)}. "
            "State and batch may be arrays or jax.ShapeDtypeStructs."
        )
    step, state, batch = made
    _check_batch(name, batch, options.global_batch)
    reference = ModelReference(kind="factory", name=name, settings=settings)
    return Model(name=name, step=step, state=state, batch=batch, reference=reference)


def _find(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        # A console script starts with its own folder there, unlike `python -m`.
        sys.path.insert(0, os.getcwd())
    with user_code(name, "cannot be imported"):
        try:
            found = importlib.util.find_spec(module_name) if module_name else None
        except (ImportError, ValueError, AttributeError):
            found = None
    if found is None:
        raise InputError(
            f"there is no module {module_name!r} for {name!r}. Write package.module:function, and start from the "
            "folder that holds it."
        )
    with user_code(name, "cannot be imported"):
        module = importlib.import_module(module_name)
    factory = getattr(module, attribute, None)
    if factory is None:
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise InputError(f"{module_name} has no {attribute!r}: {nearest(attribute, names)}")
    if not callable(factory):
        raise InputError(f"{name} is {_kind(factory)}, not a function that returns (train_step, state, batch).")
    found_factory: Callable[..., Any] = factory
    return found_factory


def _check_batch(name: str, batch: Any, global_batch: int | None) -> None:
    import jax

    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())}
    if global_batch is not None and sizes and global_batch not in sizes:
        listed = ", ".join(map(str, sorted(sizes)))
        raise InputError(
            f"{name} made a batch of {listed}, and --global-batch says {global_batch}. Leave the option out, or change "
            "the factory."
        )


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(item).__name__ for item in value)})"
    return f"{type(value).__name__} {value!r:.40}"


@contextlib.contextmanager
def user_code(name: str, what: str = "fails while it is traced") -> Iterator[None]:
    """Turn an error of the user's own code into two lines that name it and the place; ours stay bugs of ours.

    Raises:
        InputError: The error went through the module of `name`.
    """
    root = name.partition(":")[0].partition(".")[0]
    try:
        yield
    except (AliquotError, KeyboardInterrupt):
        raise
    except Exception as error:
        place = _own_place(error, root) if ":" in name else None
        if place is None:
            raise
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"{name} {what}: {type(error).__name__}: {first:.300}\n  at {place}") from None


def _own_place(error: Exception, root: str) -> str | None:
    """The innermost line of the user's package that the error went through."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == root:
            found = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return found
