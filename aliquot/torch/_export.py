"""A module of PyTorch as a function of JAX: `torch.export` traces it, and each ATen operator runs
as the table of operators says.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..cluster import Device, attention_of
from ..core import CaptureError, listing
from . import _network_operators as _network_operators
from ._operators import OPERATORS

# What only checks, or names places in a tuple.
_CHECKS = ("_assert_tensor_metadata.default", "_assert_async.msg", "sym_constrain_range.default")
# A mask of more elements is not computed to see whether it is causal.
_LARGEST_MASK = 2**28
_ATTENTION = "scaled_dot_product_attention.default"
_DROPOUTS = {"dropout.default": 1, "native_dropout.default": 1, _ATTENTION: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A module with its loss as a function.

    Attributes:
        parameters: shapes of what is trained, by name; of tied parameters the first name alone.
        buffers: shapes of what the module changes besides them, such as running means, and of
            frozen parameters. Other buffers are constants.
        batch: shapes of the batch.
        loss: `(parameters, buffers, batch)` to the loss and the new buffers.
    """

    parameters: dict[str, jax.ShapeDtypeStruct]
    buffers: dict[str, jax.ShapeDtypeStruct]
    batch: dict[str, jax.ShapeDtypeStruct]
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


class _WithLoss(torch.nn.Module):
    """A module and its loss as one module, whose parameters are cast as FSDP casts them."""

    def __init__(
        self, module: torch.nn.Module, loss: Callable[..., Any], dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.module, self._loss, self._dtype = module, loss, dtype

    def forward(self, batch: dict[str, Any]) -> Any:
        if self._dtype is None:
            return self._loss(self.module, batch)
        narrow = {}
        for name, parameter in self.module.named_parameters():
            narrow[name] = parameter.to(self._dtype) if parameter.is_floating_point() else parameter
        batch = dict(batch)
        for name, x in batch.items():
            if torch.is_tensor(x) and x.is_floating_point():
                batch[name] = x.to(self._dtype)

        def cast(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.module, narrow, args, kwargs)

        return self._loss(cast, batch)


def export(
    module: torch.nn.Module,
    batch: Mapping[str, Any],
    loss: Callable[..., Any],
    *,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    recomputes: bool = False,
) -> Exported:
    """Trace a module and its loss. No weight is read: modules and batches on the device `meta` do.

    Args:
        module: in the mode, of training or not, in which it shall run.
        batch: tensors by name.
        loss: `loss(module, batch)` gives a scalar.
        dtype: parameters and batch are cast to it; by default they stay as they are.
        device: whose fused attention is taken where it has one; None for plain attention.
        recomputes: whether `blocks` are computed again in the backward pass.

    Raises:
        CaptureError: the module cannot be traced, has dropout, or has operators that the table has
            not: each with the line of the module.
    """
    programs: dict[Any, _Program] = {}

    def program_for(shapes: Mapping[str, tuple[int, ...]]) -> _Program:
        key = tuple(sorted(shapes.items()))
        if key not in programs:
            # Parts of a batch, such as micro-batches, are traced with tensors of their size.
            sized = dict(batch)
            for name, shape in shapes.items():
                if tuple(sized[name].shape) != shape:
                    sized[name] = sized[name].new_zeros(shape)
            programs[key] = _Program.of(_traced(module, sized, loss, dtype), module, sized)
        return programs[key]

    structs = {name: _struct(x) for name, x in batch.items() if torch.is_tensor(x)}
    first = program_for({name: struct.shape for name, struct in structs.items()})

    def run(
        parameters: dict[str, jax.Array],
        buffers: dict[str, jax.Array],
        arrays: dict[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        program = program_for({name: tuple(x.shape) for name, x in arrays.items()})
        again = frozenset(blocks(module)) if recomputes else frozenset()
        parts = {"parameters": parameters, "buffers": buffers, "batch": arrays}
        return program.loss(parts, device, again)

    return Exported(
        parameters=first.parameters,
        buffers=first.buffers,
        batch=structs,
        loss=run,
    )


def _traced(
    module: torch.nn.Module,
    batch: Mapping[str, Any],
    loss: Callable[..., Any],
    dtype: torch.dtype | None,
) -> Any:
    """The exported program, all of whose operators are known. Raises as `export` does."""
    name = type(module).__name__
    try:
        with warnings.catch_warnings():
            # PyTorch's tracer warns of its own code.
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.export.export(
                _WithLoss(module, loss, dtype), (dict(batch),), strict=False
            ).run_decompositions({})
            known, some = torch.export.default_decompositions(), {}
            for node in _operators(program):
                if _key(node) not in OPERATORS and node.target in known:
                    some[node.target] = known[node.target]
            if some:
                program = program.run_decompositions(some)
    except Exception as error:
        lines = list(filter(None, map(str.strip, str(error).splitlines())))
        where = [line for line in lines if line.startswith("File ") and "site-packages" not in line]
        said = f"{type(error).__name__}: {lines[0] if lines else ''}"
        raise CaptureError(
            listing(
                f"{name} cannot be traced by torch.export",
                [said, *where[-1:]],
                "What it computes must not depend on the values of its tensors: take torch.where or"
                " torch.cond in place of if, and call torch.export.export on it to see more.",
            )
        ) from error
    _drop_constant_masks(program)
    _refuse(name, _faults(program))
    return program


def _refuse(name: str, faults: Iterable[str]) -> None:
    """Raise `CaptureError` with all of these faults, if there are any."""
    listed = sorted(set(faults))
    if listed:
        raise CaptureError(
            listing(
                f"{name} cannot be planned",
                listed,
                "Write these lines with other operators, or register a function for each with"
                " aliquot.torch.operator(name).",
            )
        )


def _operators(program: Any) -> Iterator[torch.fx.Node]:
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _key(node) not in _CHECKS:
            yield node


def _key(node: torch.fx.Node) -> str:
    """The name in the table; operators of other libraries keep the library's."""
    return str(node.target).removeprefix("aten.")


def _faults(program: Any) -> Iterator[str]:
    for node in _operators(program):
        key = _key(node)
        if key not in OPERATORS:
            yield f"aten.{key} has no function in JAX here{_line(node)}"
        position = _DROPOUTS.get(key)
        if position is not None:
            share = node.kwargs.get("dropout_p" if key == _ATTENTION else "p", 0)
            share = node.args[position] if len(node.args) > position else share
            trains = key == _ATTENTION or (node.args[2] if len(node.args) > 2 else True)
            if share and trains:
                yield f"a dropout of {share} is drawn anew in each run: set it to 0{_line(node)}"


def _line(node: torch.fx.Node) -> str:
    """The innermost line of the user's module that an operator came from."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [place for place in found if "/torch/nn/" not in place[0]] or found
    return f", at {own[-1][0]}, line {own[-1][1]}" if own else ""


def _drop_constant_masks(program: Any) -> None:
    """Say of each attention whose mask is the same in all runs that it is causal, or has none, if
    that is what the mask says: then it may run as a fused kernel.
    """
    known: dict[torch.fx.Node, Any] = {}

    def value(node: Any) -> Any:
        """A node's value where it depends on no input; raises `KeyError` where it does."""
        if not isinstance(node, torch.fx.Node):
            return node
        if node not in known:
            if node.op != "call_function" or node.meta["val"].numel() > _LARGEST_MASK:
                raise KeyError(node.name)
            arguments, keywords = torch.fx.node.map_aggregate((node.args, node.kwargs), value)
            if "device" in keywords:
                keywords = {**keywords, "device": "cpu"}
            known[node] = node.target(*arguments, **keywords)
        return known[node]

    for node in program.graph.nodes:
        if _key(node) != _ATTENTION or len(node.args) < 4 or node.args[3] is None:
            continue
        with contextlib.suppress(KeyError, AttributeError):
            mask = value(node.args[3])
            if mask.dtype != torch.bool:
                mask = torch.where(mask == 0, True, mask > torch.finfo(mask.dtype).min / 2)
            # Rows that were expanded are looked at once.
            first = tuple(0 if stride == 0 else slice(None) for stride in mask.stride()[:-2])
            mask = mask[first]
            lower = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
            dropout = node.args[4] if len(node.args) > 4 else 0.0
            if bool(mask.all()):
                node.args = (*node.args[:3], None, *node.args[4:])
            elif bool((mask == lower).all()):
                node.args = (*node.args[:3], None, dropout, True)
    program.graph.eliminate_dead_code()


def _struct(tensor: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), _dtype(tensor.dtype))


def _dtype(dtype: torch.dtype) -> Any:
    return jax.dtypes.canonicalize_dtype(str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A traced program with the meaning of its inputs and results.

    Attributes:
        graph: of operators.
        parameters, buffers: as of `Exported`.
        sources: for each input of the graph the part of the arguments it is from and its name
            there, or "constants" and its numbers.
        results: names of the new values of buffers.
        returned: name of the loss.
    """

    graph: torch.fx.Graph
    parameters: dict[str, jax.ShapeDtypeStruct]
    buffers: dict[str, jax.ShapeDtypeStruct]
    sources: dict[str, tuple[str, Any]]
    results: dict[str, str]
    returned: str

    @classmethod
    def of(cls, program: Any, module: torch.nn.Module, batch: Mapping[str, Any]) -> _Program:
        """The meaning of a traced program of a module."""
        kinds = torch.export.graph_signature.InputKind
        outputs = torch.export.graph_signature.OutputKind
        own = dict(module.named_parameters(remove_duplicate=False))
        first_of: dict[int, str] = {}
        for name, tensor in own.items():
            first_of.setdefault(id(tensor), name)
        trained = {n: _struct(p) for n, p in module.named_parameters() if p.requires_grad}
        results, returned = {}, []
        for spec in program.graph_signature.output_specs:
            if spec.kind == outputs.BUFFER_MUTATION:
                results[spec.arg.name] = spec.target.removeprefix("module.")
            elif spec.kind == outputs.USER_OUTPUT:
                returned.append(spec.arg.name)
        (loss,) = returned
        sources: dict[str, tuple[str, Any]] = {}
        buffers: dict[str, jax.ShapeDtypeStruct] = {}
        given = iter(key for key, x in batch.items() if torch.is_tensor(x))
        for spec in program.graph_signature.input_specs:
            place = spec.arg.name
            if spec.kind == kinds.USER_INPUT:
                if isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
                    sources[place] = ("batch", next(given))
                continue
            target = spec.target.removeprefix("module.")
            if spec.kind == kinds.PARAMETER:
                # Of tied parameters there is one.
                target = first_of[id(own[target])]
            if target in trained:
                sources[place] = ("parameters", target)
            elif target in own or target in results.values():
                tensor = own[target] if target in own else module.get_buffer(target)
                buffers[target] = _struct(tensor)
                sources[place] = ("buffers", target)
            else:
                is_lifted = spec.kind == kinds.CONSTANT_TENSOR
                tensor = program.constants[spec.target] if is_lifted else module.get_buffer(target)
                # Plans do not depend on the numbers, which are unknown on `meta`.
                unknown = np.zeros(tensor.shape)
                numbers = unknown if tensor.is_meta else tensor.detach().cpu().numpy()
                sources[place] = ("constants", numbers.astype(_dtype(tensor.dtype)))
        return cls(
            graph=program.graph,
            parameters=trained,
            buffers=buffers,
            sources=sources,
            results=results,
            returned=loss,
        )

    def loss(
        self,
        arrays: Mapping[str, dict[str, jax.Array]],
        device: Device | None,
        again: frozenset[str],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and the buffers with their new values, from parameters, buffers and the batch;
        `again` are paths of modules that the backward pass computes again.
        """
        values: dict[str, Any] = {}
        faults: list[str] = []

        def value(node: Any) -> Any:
            if not isinstance(node, torch.fx.Node):
                return node
            # A parameter is cast where it is read, so that its copy does not live all the time.
            if _key(node) == "_to_copy.default" and node.args[0].name in self.sources:
                return values[node.args[0].name].astype(_dtype(node.meta["val"].dtype))
            return values[node.name]

        def run(nodes: Sequence[torch.fx.Node]) -> dict[str, Any]:
            """The values that others read of what these nodes make."""
            for node in nodes:
                arguments, keywords = torch.fx.node.map_aggregate((node.args, node.kwargs), value)
                with jax.named_scope(next(reversed(_modules(node)), "") or "loss"):
                    values[node.name] = _run(node, arguments, keywords, device, faults)
            kept = {self.returned, *self.results.values()}
            own = {*nodes}
            return {
                n.name: values[n.name] for n in nodes if n.name in kept or not {*n.users} <= own
            }

        for name, (kind, key) in self.sources.items():
            values[name] = jnp.asarray(key) if kind == "constants" else arrays[kind][key]
        called = [n for n in self.graph.nodes if n.op == "call_function" and _key(n) not in _CHECKS]
        for block, group in itertools.groupby(
            called, lambda node: next((path for path in _modules(node) if path in again), "")
        ):
            found = functools.partial(run, [*group])
            values |= jax.checkpoint(found)() if block else found()
        _refuse("the module", faults)
        new = {target: values[name] for name, target in self.results.items()}
        return values[self.returned], {**arrays["buffers"], **new}


def blocks(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost items of lists of modules, by path: layers, of which each recomputes alone."""
    found: dict[str, torch.nn.Module] = {}
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.ModuleList) and not name.startswith((*found,)):
            for i, item in enumerate(child):
                found[f"{name}.{i}.".removeprefix(".")] = item
    return {name.removesuffix("."): item for name, item in found.items()}


def _modules(node: torch.fx.Node) -> list[str]:
    """The paths of the modules that an operator belongs to, the outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [re.sub(r"^L\['self'\]\.|^module\.?", "", path) for path, *_ in stack]


def _run(
    node: torch.fx.Node, arguments: Any, keywords: Any, device: Device | None, faults: list[str]
) -> Any:
    """One operator, with results of the dtypes that PyTorch found; attention by the fused kernel of
    the device where that computes it. Of a variant that has no function it adds a fault, and goes
    on with zeros to find the others.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target(*arguments, **keywords)
    key = _key(node)
    keywords = dict(keywords)
    for name in ("device", "pin_memory", "layout"):
        keywords.pop(name, None)
    if keywords.get("dtype") is not None:
        keywords["dtype"] = _dtype(keywords["dtype"])
    if key == _ATTENTION:
        fused, (q, k) = attention_of(device), arguments[:2]
        keywords["kernel"] = "plain"
        if fused is not None and q.ndim == 4 and (len(arguments) < 4 or arguments[3] is None):
            if not fused.lacks(str(q.dtype), q.shape[-1], {q.shape[-2], k.shape[-2]}):
                keywords["kernel"] = fused.kernel
    found = node.meta["val"]
    try:
        result = OPERATORS[key](*arguments, **keywords)
    except NotImplementedError as error:
        faults.append(f"aten.{key} has no function in JAX here for {error}{_line(node)}")
        result = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x: jnp.zeros(tuple(x.shape), _dtype(x.dtype)), found
        )
    if torch.is_tensor(found):
        return _as_found(key, result, found)
    results = []
    for made, wanted in zip(result, found, strict=False):
        results.append(made if wanted is None else _as_found(key, made, wanted))
    return tuple(results)


def _as_found(key: str, made: Any, found: Any) -> Any:
    made = jnp.asarray(made)
    assert made.shape == tuple(found.shape), f"{key}: {made.shape}, not {tuple(found.shape)}"
    dtype = _dtype(found.dtype)
    return made if made.dtype == dtype else made.astype(dtype)
