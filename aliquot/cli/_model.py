"""From what a user calls a model to a step with its arguments: a name from the zoo, or a factory in
a module.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cluster import Cluster
from ..core import AliquotError, InputError, listing, nearest, shortened
from ..plans import ModelReference
from ..zoo import (
    MODELS,
    AbstractConfig,
    AbstractTextConfig,
    Workload,
    as_fields,
    build,
    configure,
    from_config,
    other_architecture,
    precision_name,
    settings_faults,
    typed_setting,
)
from ._devices import use_precision
from ._session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A training step, shapes of its state and batch, and how to make it again. Only the zoo's have
    a `workload`. `recompute` is as for `aliquot.plan`; `otherwise` makes a factory's step with
    recomputation of its own.
    """

    name: str
    step: Callable[..., Any]
    state: Any
    batch: Any
    reference: ModelReference
    workload: Workload | None = None
    recompute: str | None = None
    otherwise: Callable[[], Model] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooOptions:
    """The options that shape a model of the zoo, as `aliquot.zoo.build` takes them. `dtype` and
    `attention` None: by the device. `update` has those of the optimizer. `tokens_per_step` is for
    factories alone.
    """

    global_batch: int | None
    dtype: str | None = None
    recompute: str | None = None
    attention: str | None = None
    scan: bool = False
    overrides: Mapping[str, Any]
    update: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_step: int | None = None

    def dtype_for(self, config: AbstractConfig, cluster: Cluster) -> str:
        """The model's usual one, else bf16, or float16 on devices whose float16 units are faster
        than their bfloat16 ones.
        """
        chosen = self.dtype or config.usual_dtype
        if chosen is not None:
            return precision_name(chosen)
        return (
            "float16"
            if cluster.device.peak("float16") > cluster.device.peak("bfloat16")
            else "bf16"
        )


def resolve(name: str, options: ZooOptions, cluster: Cluster) -> Model:
    """The model of a name.

    Raises:
        InputError: No such model or factory, options that do not go with it, or the user's own code
            failed.
        MissingExtraError: A model of the zoo without the packages it needs.
    """
    config = zoo_config(name, options.overrides)
    if config is None:
        return _from_factory(name, options)
    if options.tokens_per_step is not None:
        raise InputError(f"--tokens-per-step is for factories; what a step of {name} has is known.")
    if options.global_batch is None:
        raise InputError(
            f"{name} needs --global-batch: the number of {config.examples} in a step, over all"
            " devices, such as --global-batch 64."
        )
    dtype = options.dtype_for(config, cluster)
    use_precision(dtype)
    workload = build(
        config,
        options.global_batch,
        dtype=dtype,
        recompute=options.recompute or "block",
        scan=options.scan,
        attention=options.attention or "auto",
        device=cluster.device,
        **options.update,
    )
    return from_workload(workload)


def zoo_config(name: str, overrides: Mapping[str, Any]) -> AbstractConfig | None:
    """The configuration of a model of the zoo, by its name or by a `config.json`; None for a
    factory.

    Raises:
        InputError: there is no such model or file, or the zoo cannot express it.
    """
    if name in MODELS:
        return configure(name, **overrides)
    is_program = name.endswith(".py") and ":" not in name
    if name.endswith((".json", ".yaml", ".yml")) or (os.path.isfile(name) and not is_program):
        return from_config(name, **overrides)
    if ":" in name:
        return None
    instead = other_architecture(name) or (
        f"{nearest(name, MODELS, 'aliquot models')} Or give a config.json of Hugging Face, or a"
        " factory as package.module:function."
    )
    raise InputError(f"there is no model {shortened(repr(name), 60)}: {instead}")


def tell_model(name: str, config: AbstractConfig | None, say: Session) -> None:
    """A remark on what a `config.json` leaves open: how long the sequences are."""
    if isinstance(config, AbstractTextConfig) and name not in MODELS:
        say.note(
            f"{config.name}, from {name}: sequences of {config.seq_len} tokens; --seq-len changes"
            " that."
        )


def tell_attention(model: Model, cluster: Cluster, say: Session) -> None:
    """A remark on which attention a model of the zoo has on a cluster, and why."""
    if model.workload is not None and model.workload.attention:
        say.note(f"attention on {cluster.name}: {model.workload.attention}")


def from_workload(workload: Workload) -> Model:
    """A model of the zoo."""
    name = workload.config.name
    return Model(
        name=name,
        step=workload.train_step,
        state=workload.state,
        batch=workload.batch,
        reference=ModelReference(
            kind="zoo",
            name=name,
            settings=workload.settings,
            flops_per_step=float(workload.flops_per_step),
        ),
        workload=workload,
    )


def rebuild(reference: ModelReference, *, named: str | None = None, trusted: bool = False) -> Model:
    """The model that a plan was made for, or the one that the user names instead.

    Args:
        named: what the user calls the model on the command line, which may be a factory.
        trusted: whether the user lets the plan file itself name a factory. Otherwise a file only
            ever chooses among the models of the zoo: it never decides what code runs.

    Raises:
        InputError: It cannot be made, or only by a function that nobody but the file names; the
            message says why.
    """
    chosen = reference if named is None else named_model(reference, named)
    if named is None and (reason := unnamed(reference, trusted=trusted)):
        raise InputError(reason)
    if chosen.kind == "zoo":
        return from_workload(workload_of(chosen))
    return _from_factory(chosen.name, ZooOptions(global_batch=None, overrides=chosen.settings))


def workload_of(reference: ModelReference) -> Workload:
    """A model of the zoo with the settings that a plan file has.

    Raises:
        InputError: They cannot be used; all that is wrong with them is listed.
    """
    faults = settings_faults(reference.settings)
    named = reference.settings.get("model")
    wanted_name = named.get("name") if isinstance(named, Mapping) else named
    if wanted_name != reference.name and not faults:
        faults.append(f"they are of {shortened(repr(wanted_name), 60)}")
    if faults:
        advice = (
            "Make the plan again, or read it as it is with `aliquot explain PLAN"
            " --no-alternatives`."
        )
        raise InputError(
            listing(
                f"the plan's settings of {shortened(reference.name, 60)} cannot be used",
                faults,
                advice,
            )
        )
    use_precision(str(reference.settings.get("dtype")))
    return build(**reference.settings)


def unnamed(reference: ModelReference, *, trusted: bool = False) -> str:
    """The reason why a plan file's model can only be built if the user names it; empty if there is
    none.
    """
    if reference.kind == "factory" and not trusted:
        return (
            f"the plan file names the function that makes its step, {reference.name}, and a file"
            " does not decide what code runs. If that function is yours, add --model"
            f" {reference.name}; --trust-plan calls whatever the file names."
        )
    if reference.kind in ("zoo", "factory"):
        return ""
    return (
        f"the plan is for {reference.name or 'a function'}, and its file does not say how to make"
        " that again. Name it with --model package.module:factory."
    )


def named_model(reference: ModelReference, name: str) -> ModelReference:
    """The model that the user names, with the plan's settings where these belong to it."""
    settings = dict(reference.settings)
    config = zoo_config(name, {})
    if config is None:
        return ModelReference(
            kind="factory", name=name, settings=settings if name == reference.name else {}
        )
    if reference.kind != "zoo":
        raise InputError(
            f"--model {name}: this plan was not made for a model of the zoo, so nothing says how"
            " large its batch is. Give a factory as package.module:function."
        )
    if name not in MODELS:
        settings |= {"model": as_fields(config), "overrides": {}}
    elif name != reference.name:
        settings |= {"model": name, "overrides": {}}
    return ModelReference(kind="zoo", name=config.name, settings=settings)


def _from_factory(name: str, options: ZooOptions) -> Model:
    odd = [
        flag
        for flag, given in (
            ("--dtype", options.dtype),
            ("--attention", options.attention),
            ("--scan", options.scan),
            ("--optimizer and other options of the update", options.update),
        )
        if given
    ]
    if odd:
        raise InputError(
            f"{', '.join(odd)}: only for models of the zoo; {name} decides this by itself."
        )
    factory = find_factory(name)
    settings = dict(options.overrides)
    if options.recompute is not None:
        settings |= _recompute_argument(name, options.recompute, settings)
    settings |= _batch_argument(factory, options.global_batch, settings)
    settings = _check_call(name, factory, settings)
    with user_code(name, "fails", everywhere=True):
        returned = factory(**settings)
    if not (isinstance(returned, tuple) and len(returned) == 3 and callable(returned[0])):
        raise InputError(
            f"{name} must return (train_step, state, batch) with a function first, got"
            f" {_kind(returned)}. State and batch may be arrays or jax.ShapeDtypeStructs."
        )
    step, state, batch = returned
    try:
        inspect.signature(step).bind(state, batch)
    except TypeError as error:
        raise InputError(
            f"the step that {name} made cannot be called as train_step(state, batch): {error}."
            " All that changes from step to step is one argument, batch: a dict or tuple of arrays."
        ) from None
    except ValueError:
        # It has no signature that Python knows.
        pass
    import jax

    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())}
    wanted = options.global_batch
    if wanted is not None and sizes and wanted not in sizes:
        listed = ", ".join(map(str, sorted(sizes)))
        raise InputError(
            f"{name} made a batch of {listed}, and --global-batch says {wanted}. Leave the"
            " option out, or give the factory an argument global_batch and make a batch of that"
            " size."
        )
    reference = ModelReference(
        kind="factory", name=name, settings=settings, tokens_per_step=options.tokens_per_step or 0
    )
    return Model(name=name, step=step, state=state, batch=batch, reference=reference)


def takes_batch(name: str) -> bool:
    """Whether a factory has an argument `global_batch`, so that others say its batch."""
    return "global_batch" in (_parameters(find_factory(name)) or ())


def recomputes(name: str) -> bool:
    """Whether a factory has an argument `recompute` whose default is true, false, "none" or
    "block", so that its step may be built in two ways. Other defaults do not say what it takes.
    """
    try:
        argument = inspect.signature(find_factory(name)).parameters.get("recompute")
    except (TypeError, ValueError):
        # Built-in functions may have no signature that Python knows.
        return False
    if argument is None:
        return False
    default = argument.default
    return isinstance(default, bool) or (isinstance(default, str) and default in ("none", "block"))


def _recompute_argument(name: str, how: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The argument of a factory that says what `--recompute` says: the text, or whether anything is
    recomputed where the argument's default is true or false.

    Raises:
        InputError: The factory has no such argument, or `--set` gives it, too.
    """
    if not recomputes(name):
        raise InputError(
            f"--recompute {how}: {name} decides this by itself. Give it an argument recompute"
            ' whose default is "none" or "block", or False or True: it then gets one of these.'
        )
    if "recompute" in settings:
        raise InputError("--recompute and --set recompute=... say the same thing; leave one out.")
    default = inspect.signature(find_factory(name)).parameters["recompute"].default
    if not isinstance(default, bool):
        return {"recompute": how}
    if how not in ("none", "block"):
        raise InputError(
            f"--recompute {how}: {name} takes recompute=True or False; say none, block or auto."
        )
    return {"recompute": how != "none"}


def _batch_argument(
    factory: Callable[..., Any], global_batch: int | None, settings: Mapping[str, Any]
) -> dict[str, int]:
    """The argument `global_batch` of a factory that has one, if `--global-batch` is given.

    Raises:
        InputError: `--set` gives it, too.
    """
    if global_batch is None or "global_batch" not in (_parameters(factory) or ()):
        return {}
    if "global_batch" in settings:
        raise InputError(
            "--global-batch and --set global_batch=... say the same thing; leave one out."
        )
    return {"global_batch": global_batch}


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a factory by name; None if Python does not know them, as of some built-in
    functions.
    """
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None


def _check_call(
    name: str, factory: Callable[..., Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What is set, with texts converted to what the factory's arguments take.

    Raises:
        InputError: The factory does not take what is set, or needs something else.
    """
    parameters = _parameters(factory)
    if parameters is None:
        # The call will show.
        return dict(settings)
    kinds = inspect.Parameter
    by_name = kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY
    known = [each for each, p in parameters.items() if p.kind in by_name]
    faults = []
    if not any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        for key in settings:
            if key not in known:
                meant = nearest(key, known).removesuffix(".")
                faults.append(f"it has no argument {key!r}: {meant}")
    typed = dict(settings)
    for key, value in settings.items():
        if isinstance(value, str):
            try:
                typed[key] = typed_setting(value, _kind_of_argument(parameters.get(key)))
            except InputError as error:
                faults.append(f"{key}={error}")
    without = [each for each, p in parameters.items() if p.default is kinds.empty]
    needed = [each for each in known if each in without and each not in settings]
    if needed:
        given = " ".join(f"--set {each}=..." for each in needed)
        faults.append(f"it needs {', '.join(needed)}: add {given}, or give them defaults")
    if any(parameters[each].kind is kinds.POSITIONAL_ONLY for each in without):
        faults.append("it needs arguments without names, which cannot be given")
    if faults:
        raise InputError(f"{name} cannot be called: {'; '.join(faults)}.")
    return typed


def _kind_of_argument(parameter: inspect.Parameter | None) -> Any:
    """The type that an argument's annotation names, or else that of its default; None if neither
    is there.
    """
    kinds = inspect.Parameter
    if parameter is None or parameter.kind is kinds.VAR_KEYWORD:
        return None
    if parameter.annotation is not kinds.empty:
        return parameter.annotation
    return None if parameter.default in (kinds.empty, None) else type(parameter.default)


def find_factory(name: str) -> Callable[..., Any]:
    """The factory that `package.module:function` names; see `find_function`."""
    return find_function(name, " that returns (train_step, state, batch)")


def find_function(name: str, that: str = "") -> Callable[..., Any]:
    """The function that `package.module:function` names; its module is imported and may register
    rules, methods and schedules.

    Args:
        that: what the function does, for messages.

    Raises:
        InputError: there is no such module or function, or it cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        # A console script starts with its own folder there, unlike `python -m`.
        sys.path.insert(0, os.getcwd())
    with user_code(name, "cannot be imported", everywhere=True):
        try:
            module_spec = importlib.util.find_spec(module_name) if module_name else None
        except (ImportError, ValueError, AttributeError):
            module_spec = None
    if module_spec is None:
        write = "package.module:function"
        if module_name.endswith(".py"):
            # Other tools take the path of a file.
            parts = module_name.removesuffix(".py").replace("\\", "/").split("/")
            dotted = ".".join(part for part in parts if part not in ("", "."))
            write = f"{dotted}:{attribute or 'function'}"
        raise InputError(
            f"there is no module {module_name!r} for {name!r}. Write {write}, and start from the"
            " folder that holds it."
        )
    with user_code(name, "cannot be imported", everywhere=True):
        module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        names = [
            each
            for each in dir(module)
            if callable(getattr(module, each, None)) and not each.startswith("_")
        ]
        raise InputError(f"{module_name} has no {attribute!r}: {nearest(attribute, names)}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise InputError(f"{name} is {_kind(factory)}, not a function{that}.")
    callable_factory: Callable[..., Any] = factory
    return callable_factory


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(item).__name__ for item in value)})"
    return f"{type(value).__name__} {value!r:.40}"


@contextlib.contextmanager
def user_code(
    name: str, what: str = "fails while it is traced", everywhere: bool = False
) -> Iterator[None]:
    """Turn an error of the user's code into two lines that name it and the place. Errors of this
    package pass through, and are about `name`.

    Args:
        everywhere: whether nothing of ours runs within, so that every error is the user's.

    Raises:
        InputError: The error went through the module of `name`, or that ends the process.
    """
    root = name.partition(":")[0].partition(".")[0]
    try:
        yield
    except AliquotError as error:
        error.about = error.about or name
        raise
    except KeyboardInterrupt:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        place = _own_place(error, root) if ":" in name else None
        if place is None and not everywhere:
            raise
        first = str(error).strip().partition("\n")[0]
        said = f"{type(error).__name__}: {first:.300}" if first else type(error).__name__
        if isinstance(error, SystemExit):
            said = f"it ends the process with sys.exit({error.code!r:.100}) and returns nothing"
        at = f"\n  at {place}" if place else ""
        raise InputError(f"{name} {what}: {said}{at}") from None


def _own_place(error: BaseException, root: str) -> str | None:
    """The innermost line of the user's package that the error went through."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == root:
            place = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return place
