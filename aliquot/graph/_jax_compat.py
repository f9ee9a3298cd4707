"""All uses of JAX that depend on its version, with notes on what is fragile or private."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

# Since 0.11 one class stands for open and closed jaxprs; its other name is deprecated.
_CLOSED_JAXPR: Any = getattr(jex, "ClosedJaxpr", jex.Jaxpr)
# Where a call-like primitive keeps the jaxpr it calls. The key's name has changed between releases.
_CALL_BODY_KEYS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee")
_INLINED_CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "composite",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "custom_lin",
        "custom_vmap_call",
        "eval_jaxpr",
        "linear_call",
        "xla_call",
    }
)
# Libraries whose primitives are lowered, on every backend, by tracing their implementation.
_TRACED_LIBRARIES = ("equinox.", "jax.experimental.sparse.")
ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
_CUDNN_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
# New enough for all kinds of attention that JAX knows.
_CUDNN_VERSION = 91_500
PINNED_HOST = "pinned_host"
HOST_MEMORY_KINDS = (PINNED_HOST, "unpinned_host")
"""JAX's names for the memory of hosts. Devices copy from and to pinned memory only."""
# Not annotated in JAX.
_shape_struct: Any = jax.ShapeDtypeStruct
_HIGH_LEVEL = frozenset({"call_hi_primitive", "call_hi_primitive_linearized"})
_PLACEMENTS = frozenset({"layout_constraint", "relayout", "reshard", "sharding_constraint"})
_REMAT_NAMES = frozenset({"remat", "remat2", "checkpoint"})


def plain_context() -> contextlib.AbstractContextManager[object]:
    """JAX as if the caller had neither set a mesh (`jax.set_mesh`), nor disabled `jit`, nor asked
    for checks of numbers: a plan's programs name their meshes themselves, and are compiled.
    """
    settings: Any = jax.config
    hidden = [jax.disable_jit(False)] if settings.jax_disable_jit else []
    hidden += [jax.debug_nans(False)] if settings.jax_debug_nans else []
    hidden += [jax.debug_infs(False)] if settings.jax_debug_infs else []
    mesh = jax.sharding.get_abstract_mesh()
    if not hidden and mesh.empty:
        return contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        for context in hidden:
            stack.enter_context(context)
        if not mesh.empty:
            # Inside a trace the mesh stays, which refuses the call for other reasons.
            with contextlib.suppress(ValueError):
                stack.enter_context(jax.set_mesh(None))
        return stack.pop_all()


def trace_settings() -> dict[str, Any]:
    """The settings of JAX, of which some change what a function is traced into."""
    settings: Any = jax.config
    return {name: getattr(settings, name, None) for name in settings.values}


def trace(fn: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """The jaxpr of `fn(*leaves)`; leaves are arrays or shapes.

    The caller's mesh is hidden from `fn`, since a plan chooses its own, unless `fn` needs it to
    understand names of axes: then all its axes are automatic, and JAX takes its constraints as
    hints, which plans do not follow.
    """
    mesh = jax.sharding.get_abstract_mesh()
    with _any_cudnn, plain_context():
        try:
            return jax.make_jaxpr(fn)(*leaves)
        except Exception:
            if mesh.empty:
                raise
    # Said, because the default differs between releases.
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    automatic = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    with _any_cudnn, plain_context(), jax.sharding.use_abstract_mesh(automatic):
        try:
            return jax.make_jaxpr(fn)(*leaves)
        except Exception as error:
            error.add_note(
                f"The step was traced with the axes {mesh.axis_names} of jax.set_mesh as automatic"
                " ones, since a plan decides how arrays are split. Take explicit shardings out of"
                " it (`jax.sharding.reshard`, `out_sharding=`), or plan it without jax.set_mesh."
            )
            raise


def equations(fn: Callable[..., Any], structs: Sequence[Any]) -> Sequence[Any]:
    """The equations that JAX writes for a function of ours."""
    with plain_context():
        eqns: Sequence[Any] = jax.make_jaxpr(fn)(*structs).jaxpr.eqns
    return eqns


class _AnyCudnn:
    """Lets cuDNN's attention be traced where cuDNN is not installed, which JAX refuses, and with
    all heads that any GPU takes where there is none. Planning does not run it.

    Threads may trace at the same time: the last one that ends restores what JAX had.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces = 0
        self._installed: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._traces += 1
            module: Any = sys.modules.get(_CUDNN_MODULE)
            version = getattr(module, "check_cudnn_version", None)
            suffices = getattr(module, "check_compute_capability", None)
            if self._installed is not None or version is None or suffices is None:
                return
            self._installed = version, suffices

            def any_version() -> int:
                try:
                    return int(version())
                except RuntimeError:
                    return _CUDNN_VERSION

            def capable(capability: str) -> bool:
                return jax.default_backend() != "gpu" or bool(suffices(capability))

            module.check_cudnn_version, module.check_compute_capability = any_version, capable

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._traces -= 1
            if self._traces == 0 and self._installed is not None:
                module: Any = sys.modules[_CUDNN_MODULE]
                module.check_cudnn_version, module.check_compute_capability = self._installed
                self._installed = None


_any_cudnn = _AnyCudnn()


def shape_struct(leaf: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and memory of an array, with its weak type: JAX treats an array that was made
    from a Python number like the number.

    Args:
        shape: another than the array's.
    """
    dtype = leaf.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        # As for arrays, 64 bits become 32 unless `jax_enable_x64` is set.
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    struct: jax.ShapeDtypeStruct = _shape_struct(
        leaf.shape if shape is None else tuple(shape),
        dtype,
        weak_type=getattr(leaf, "weak_type", False),
        sharding=_in_host_memory() if lies_on_host(leaf) else None,
    )
    return struct


def lies_on_host(leaf: Any) -> bool:
    """True if an array, or a shape with a sharding, lies in the memory of its devices' hosts."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) in HOST_MEMORY_KINDS


@functools.cache
def _in_host_memory() -> NamedSharding:
    """A sharding that says nothing but where an array lies; its mesh has no devices."""
    mesh = AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=PINNED_HOST)


def memory_kind(array: Any) -> str | None:
    """JAX's name for the memory of a value; None for device memory, which is JAX's default."""
    return PINNED_HOST if array.memory == "host" else None


def is_on_host(aval: Any) -> bool:
    """True if a traced array lies in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def memory_moves(eqn: Any) -> list[Any]:
    """For each array of a `device_put`, the equation that moves it alone to another memory; None
    for an array that stays in its memory.

    Devices and splits are left out of them: the plan decides about these.
    """
    moves = []
    for k, (before, after) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        target = after.aval.memory_space
        moves.append(
            None
            if before.aval.memory_space is target
            else eqn.replace(
                invars=[before],
                outvars=[after],
                params={
                    "devices": (target,),
                    "srcs": (None,),
                    "copy_semantics": (eqn.params["copy_semantics"][k],),
                },
            )
        )
    return moves


def number_struct(number: int | float) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a Python number, as JAX traces it."""
    struct: jax.ShapeDtypeStruct = _shape_struct(
        (), jax.numpy.result_type(type(number)), weak_type=True
    )
    return struct


def key_generator(dtype: Any) -> Any:
    """The generator of random keys of a dtype, as `jax.random.key(..., impl=...)` takes it."""
    found: list[Any] = []
    # It can only be read from an array or a tracer.
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), _shape_struct((), dtype))
    return found[0]


def static_arguments(fn: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of the arguments that a jitted function declares static; none for other
    functions.
    """
    info = getattr(fn, "_jit_info", None)
    positions, names = getattr(info, "static_argnums", ()), getattr(info, "static_argnames", ())
    return frozenset(positions or ()), frozenset(names or ())


def is_placement(eqn: Any) -> bool:
    """True if the equation only states where arrays lie, and returns them unchanged."""
    return eqn.primitive.name in _PLACEMENTS


def is_remat(eqn: Any) -> bool:
    """True if the equation is a rematerialised region (`jax.checkpoint`)."""
    return eqn.primitive.name in _REMAT_NAMES


def inlined_body(eqn: Any) -> tuple[Any, Sequence[Any], Sequence[int]] | None:
    """The open jaxpr of a call that does not matter to sharding, with its constants and the
    positions of the operands that it takes; None for any other equation.
    """
    params = eqn.params
    if eqn.primitive.name == "custom_linear_solve":
        # The other jaxprs are for derivatives. Each has constants of its own, which stand before
        # the right-hand sides.
        lengths = params["const_lengths"]
        before = lengths.matvec + lengths.vecmat
        body, consts = open_body(params["jaxprs"].solve)
        given = (*range(before, before + lengths.solve), *range(sum(lengths), len(eqn.invars)))
        return body, consts, given
    if eqn.primitive.name in _HIGH_LEVEL:
        # Since 0.12, some functions of jax.numpy are traced as one equation, which can be expanded.
        structs = [_shape_struct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        closed = jax.make_jaxpr(lambda *arrays: list(eqn.primitive.to_lojax(*arrays, **params)))(
            *structs
        )
        return *open_body(closed), range(len(eqn.invars))
    traced = _traced(eqn.primitive)
    if traced is not None:
        return _implementation(eqn, traced)
    if eqn.primitive.name not in _INLINED_CALLS:
        return None
    for key in _CALL_BODY_KEYS:
        body = params.get(key)
        if body is not None:
            return *open_body(body), range(len(eqn.invars))
    return None


def _traced(primitive: Any) -> Callable[..., Any] | None:
    """The JAX implementation by whose tracing a primitive is lowered; None for other primitives.

    Such primitives are those of Equinox, those that other libraries make with its `create_vprim`
    (also in batched form), and those of sparse arrays. Any other primitive may be lowered to
    anything, and is not opened.
    """
    implementation: Callable[..., Any] = primitive.impl
    if primitive.name == "bcoo_dot_general":
        # Its lowering for CPUs and TPUs, and for GPUs unless JAX is told to use cuSPARSE.
        implementation = getattr(
            sys.modules.get("jax.experimental.sparse.bcoo"),
            "_bcoo_dot_general_impl",
            implementation,
        )
    if str(getattr(implementation, "__module__", None)).startswith(_TRACED_LIBRARIES):
        return implementation
    equinox_primitives = sys.modules.get("equinox.internal._primitive")
    return (
        implementation
        if primitive in getattr(equinox_primitives, "_vprim_impl_registry", ())
        else None
    )


def _implementation(
    eqn: Any, traced: Callable[..., Any]
) -> tuple[Any, Sequence[Any], Sequence[int]] | None:
    """Trace of a primitive's implementation; None if it needs the values of its operands."""

    def run(*arrays: Any) -> Sequence[Any]:
        out = traced(*arrays, **eqn.params)
        return list(out) if eqn.primitive.multiple_results else [out]

    weak = [getattr(v.aval, "weak_type", False) for v in eqn.invars]
    structs = []
    for v, w in zip(eqn.invars, weak, strict=True):
        structs.append(_shape_struct(v.aval.shape, v.aval.dtype, weak_type=w))
    try:
        with eqn.ctx.manager:
            closed = jax.make_jaxpr(run)(*structs)
    except jax.errors.JAXTypeError:
        return None
    return *open_body(closed), range(len(structs))


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Number of constants and of carried values among the operands of a scan, from the equation's
    parameters.
    """
    if "ft_in" in params:
        # Since 0.11 the operands are a tree of constants, carry and slices.
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return int(params["num_consts"]), int(params["num_carry"])


def loop_like(eqn: Any, num_carry: int, num_consts: int = 0, scope: str | None = None) -> Any:
    """A scan equation with the length, direction, names and user's line of another, with
    `num_consts` constants and `num_carry` carried values. Its body and slices are only
    placeholders: a `Call` has its own blocks.

    Args:
        scope: names in place of the equation's own.
    """
    params = eqn.params

    def loop(*operands: Any) -> Any:
        consts, start = operands[:num_consts], operands[num_consts:]
        return jax.lax.scan(
            lambda carry, _: ([c + 1 for c in carry], sum(consts, 0)),
            list(start),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )

    (made,) = equations(loop, [number_struct(0)] * (num_consts + num_carry))
    return _with_info(made, eqn.source_info, scope)


def remat_equation(*, prevent_cse: bool, scope: str) -> Any:
    """The equation of a region in a backward pass that `jax.checkpoint` has left. Its body is only
    a placeholder.

    Args:
        prevent_cse: whether optimization barriers keep the compiler from merging what is computed
            again with the original; a body of a loop needs none.
        scope: names of the user's code around it.
    """
    made = _remat_of_gradient(prevent_cse)
    return _with_info(made, made.source_info, scope)


@functools.cache
def _remat_of_gradient(prevent_cse: bool) -> Any:
    kept = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=prevent_cse)
    traced = equations(jax.grad(kept), [_shape_struct((), jnp.float32)])
    return next(filter(is_remat, traced))


def _with_info(eqn: Any, info: Any, scope: str | None) -> Any:
    """An equation with the user's line of `info`, and its names unless a scope is given."""
    if scope is not None:
        info = info.replace(name_stack=source_info_util.new_name_stack(scope))
    return eqn.replace(source_info=info)


def open_body(body: Any) -> tuple[Any, Sequence[Any]]:
    """An open jaxpr and its constants, whether `body` is open or closed."""
    if isinstance(body, _CLOSED_JAXPR):
        return body.jaxpr, body.consts
    return body, ()


def holds_jaxpr(value: Any) -> bool:
    """True if a parameter of an equation is a jaxpr, or a sequence of them."""
    if isinstance(value, tuple | list) and value:
        return all(map(holds_jaxpr, value))
    return isinstance(value, jex.Jaxpr | _CLOSED_JAXPR)


def is_literal(atom: Any) -> bool:
    """True if an operand of an equation is a constant written into it."""
    return isinstance(atom, jex.Literal)


def is_dropped(var: Any) -> bool:
    """True if a result is named `_`: never used."""
    return type(var).__name__ == "DropVar"


def shape_dtype(aval: Any) -> tuple[tuple[int, ...], str, int]:
    """Shape, name of the dtype and bytes per element. Tokens and other abstract values count as
    empty.
    """
    shape = getattr(aval, "shape", None)
    if shape is None:
        return (), type(aval).__name__, 0
    # NumPy writes JAX's type of zeros without numbers as the record type that it is underneath.
    name = "float0" if aval.dtype == jax.dtypes.float0 else str(aval.dtype)
    return tuple(shape), name, int(aval.dtype.itemsize)


class NameStacks:
    """Name stacks by their text, each made once."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def get(self, scope: str) -> Any:
        """The name stack of a scope, inside the names that surround the replay."""
        known = self._known.get(scope)
        if known is None:
            around = source_info_util.current_name_stack()
            known = around.extend(scope) if scope else around
            self._known[scope] = known
        return known


def widened(jaxpr: Any, narrow: Any) -> Any:
    """A jaxpr, open or closed, with float32 in place of a narrower dtype, in its loops and calls,
    too.
    """
    wide = jnp.dtype("float32")
    fresh: dict[Any, Any] = {}

    def is_narrow(of: Any) -> bool:
        return bool(getattr(of, "dtype", None) == narrow)

    def atom(of: Any) -> Any:
        if not is_narrow(of.aval):
            return of
        aval = of.aval.update(dtype=wide)
        if isinstance(of, jex.Literal):
            return jex.Literal(jnp.asarray(of.val, wide), aval)
        if of not in fresh:
            fresh[of] = jex.Var(aval)
        return fresh[of]

    def param(of: Any) -> Any:
        if isinstance(of, (tuple, list)) and not hasattr(of, "_fields"):
            return type(of)(map(param, of))
        if isinstance(of, (_CLOSED_JAXPR, jex.Jaxpr)):
            return widened(of, narrow)
        return wide if isinstance(of, jnp.dtype) and of == narrow else of

    if isinstance(jaxpr, _CLOSED_JAXPR) and hasattr(jaxpr, "jaxpr") and jaxpr.jaxpr is not jaxpr:
        consts = [c.astype(wide) if is_narrow(c) else c for c in jaxpr.consts]
        return jaxpr.replace(jaxpr=widened(jaxpr.jaxpr, narrow), consts=consts)
    eqns = []
    for eqn in jaxpr.eqns:
        params = {name: param(each) for name, each in eqn.params.items()}
        invars, outvars = [*map(atom, eqn.invars)], [*map(atom, eqn.outvars)]
        eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
    return jaxpr.replace(
        constvars=[*map(atom, jaxpr.constvars)],
        invars=[*map(atom, jaxpr.invars)],
        outvars=[*map(atom, jaxpr.outvars)],
        eqns=eqns,
    )


def named_as(eqn: Any) -> Any:
    """A context in which new equations carry the names and the user's line of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def bind(eqn: Any, operands: Sequence[Any], name_stack: Any = None) -> list[Any]:
    """Run one equation on other operands, under the context and the user's line it was traced with.

    `name_stack` replaces its names, which JAX records only from the innermost call inwards.
    """
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Since 0.10 only the parameters; earlier releases returned (functions, parameters).
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    info = eqn.source_info
    if name_stack is None:
        name_stack = source_info_util.current_name_stack() + info.name_stack
    context = eqn.ctx.manager
    if not eqn.ctx.cur_abstract_mesh.empty:
        context = _under_this_mesh(context)
    with source_info_util.user_context(info.traceback, name_stack=name_stack), context:
        out = eqn.primitive.bind(*functions, *operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def _under_this_mesh(context: Any) -> Iterator[None]:
    """The context of an equation, but for the mesh under which it was traced: that of its plan is
    another.
    """
    mesh, none = jax.sharding.get_abstract_mesh(), jax.sharding.AbstractMesh((), ())
    # JAX goes from one mesh to another of another size only through none.
    with context, jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(mesh):
        yield


def attention_on_piece(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Run cuDNN's attention on one device's arrays, bypassing JAX's own partitioner of it.

    The partitioner asks for the devices while a program is lowered, and a program for absent
    devices has none. The kernel itself is marked as if it asked, too, so the mark is removed.
    """
    from jax._src import dispatch

    kernel = getattr(
        sys.modules[_CUDNN_MODULE], f"_{eqn.primitive.name.removesuffix('_wrapper')}_p"
    )
    # The table belongs to JAX: the mark is gone for the rest of the process.
    dispatch.prim_requires_devices_during_lowering.discard(kernel)
    return list(eqn.primitive.impl(*operands, **eqn.params))


def bind_remat(eqn: Any, body: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
    """Run a remat equation again with `body` in place of its own, keeping its policy and its
    optimization barriers.
    """
    closed = jax.make_jaxpr(body)(*operands)
    # A remat equation takes an open jaxpr: constants that the new body captured become its first
    # operands.
    jaxpr = closed.jaxpr
    if closed.consts:
        opened = jex.Jaxpr(
            constvars=(),
            invars=[*jaxpr.constvars, *jaxpr.invars],
            outvars=jaxpr.outvars,
            eqns=jaxpr.eqns,
            effects=jaxpr.effects,
            debug_info=jaxpr.debug_info,
        )
        jaxpr = opened
    params = {**eqn.params, "jaxpr": jaxpr}
    return list(eqn.primitive.bind(*closed.consts, *operands, **params))


@functools.cache
def host_device() -> Any:
    """A CPU device of a separate client, beside JAX's own devices: no backend is started, and no
    accelerator looked for.

    Uses a private API: by public ones, JAX starts all its backends when the first device is asked
    for.
    """
    from jaxlib import xla_client

    client: Any = xla_client.make_cpu_client(asynchronous=False, num_devices=1)
    return client.local_devices()[0]


def detect_processes(
    address: str | None,
    count: int | None,
    process: int | None,
    device_ids: Sequence[int] | None,
    timeout_s: int,
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Arguments of `jax.distributed.initialize`: those that are None are taken from the cluster's
    launcher.
    """
    from jax._src.clusters import ClusterEnv

    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if None in (address, count, process):
        address, count, process, device_ids = ClusterEnv.auto_detect_unset_distributed_params(
            address, count, process, device_ids, None, timeout_s
        )
    return address, count, process, device_ids


def coordination_client() -> tuple[Any, str, int, int] | None:
    """Connection made by `jax.distributed.initialize`: a client of the service for all processes,
    the service's address `host:port`, which process this is, and how many there are.

    None before that. The service keeps small values for all processes and has barriers. Private to
    JAX: nothing public exchanges bytes without touching a device.
    """
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None:
        return None
    return (
        state.client,
        str(state.coordinator_address),
        int(state.process_id),
        int(state.num_processes),
    )
