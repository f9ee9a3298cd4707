"""A plan applied to a PyTorch module: FSDP over the axes that split the batch, DTensors over the
others.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from ..core import InputError, PlanMismatchError
from ..plans import Plan
from ._export import blocks

_STATES = ("exp_avg", "momentum_buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A module that is split as a plan says, in this process.

    Attributes:
        module: the same module; its parameters are DTensors. Make the optimizer of these.
        mesh: its dims are `replicate` and `shard`, which split the batch, and the plan's others.
    """

    module: torch.nn.Module
    mesh: DeviceMesh

    def local(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This process's rows of a whole batch. Each process passes these to the module."""
        count = self.mesh.size(0) * self.mesh.size(1)
        own = self.mesh.get_local_rank(0) * self.mesh.size(1) + self.mesh.get_local_rank(1)
        faults = [f"{k} has {len(x)} rows" for k, x in batch.items() if len(x) % count]
        if faults:
            raise InputError(f"{'; '.join(faults)}, which {count} processes cannot share equally.")
        return {key: x.chunk(count)[own] for key, x in batch.items()}

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over the whole batch of a loss that each process has of its rows."""
        own = loss.detach()
        total = (own.full_tensor() if isinstance(own, DTensor) else own).clone()
        for dim in (0, 1):
            torch.distributed.all_reduce(total, group=self.mesh.get_group(dim))
        return total / (self.mesh.size(0) * self.mesh.size(1))


def apply(plan: Plan, module: torch.nn.Module, mesh: DeviceMesh | None = None) -> Applied:
    """Split a module as a plan says, in every process of a group that is as large as the plan.

    Axes that split the batch become FSDP: what the plan splits over them is sharded, and the rest
    of them replicates, as hybrid FSDP does; without any such split the module is replicated. Over
    other axes parameters are DTensors with the plan's splits: products compute with their pieces,
    while activations between modules are whole there, which takes more memory and communication
    than the plan says where it splits these, too. Batch norms get the figures of the whole batch.
    Items of a `ModuleList` are computed again in the backward pass where the plan recomputes them.

    Args:
        plan: of `aliquot.torch.plan`, for this module.
        module: with its weights, the same in all processes. It is changed.
        mesh: of the processes, in the order of the plan's devices; by default all, by their rank.

    Raises:
        PlanMismatchError: the plan is a pipeline, is for another module, or for another number of
            processes.
    """
    (stage, *others) = plan.stages
    named = dict(module.named_parameters())
    specs = {name: _spec(stage.shardings, "params", name) for name in named}
    problems = []
    size = math.prod(stage.mesh_shape)
    found = torch.distributed.get_world_size() if mesh is None else mesh.size()
    if others:
        problems.append(f"it has {len(plan.stages)} stages, and a module is one program")
    if size != found:
        problems.append(f"it is for {size} devices, and processes there are {found}")
    problems += [f"parameter {n} is not in the plan" for n, s in specs.items() if s is None]
    if problems:
        raise PlanMismatchError(
            problems,
            asked=f"the plan cannot be applied to {type(module).__name__}",
            advice="Plan this module with aliquot.torch.plan for as many devices as processes.",
        )
    # The axes that split the rows of any array of the batch.
    rows = []
    for item in plan.inputs:
        if item.path.startswith("batch") and item.shape:
            rows.append(stage.shardings[item.path][0])
    split = set(itertools.chain(*rows))
    batch_axes = tuple(axis for axis in stage.axis_names if axis in split)
    tensor_axes = [axis for axis in stage.axis_names if axis not in split]
    shard_axes, keeps_gathered = _shard_axes(stage.shardings, named, specs, batch_axes)
    made = _mesh(stage, batch_axes, shard_axes, tensor_axes, mesh, next(iter(named.values())))
    for child in module.modules():
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm):
            _of_whole_batch(child, made)
    if tensor_axes:
        _distribute(module, specs, tensor_axes, made[made.mesh_dim_names[2:]])
    shard_dims = {name: _dim_over(spec, shard_axes) or 0 for name, spec in specs.items()}
    if plan.model.settings.get("recompute") == "block":
        for block in blocks(module).values():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    _fully_shard(plan, module, made, shard_dims, reshard=not keeps_gathered)
    return Applied(module=module, mesh=made)


def _spec(
    shardings: Mapping[str, tuple[tuple[str, ...], ...]], part: str, name: str
) -> tuple[tuple[str, ...], ...] | None:
    for path in (f"state.{part}[{name!r}]", f"state.{part}.{name}"):
        if path in shardings:
            return shardings[path]
    # Frozen parameters stand among the buffers.
    return _spec(shardings, "buffers", name) if part == "params" else None


def _dim_over(spec: Sequence[Sequence[str]] | None, some: Collection[str]) -> int | None:
    """The first dim that is split over some axes."""
    return next((d for d, axes in enumerate(spec or ()) if not {*some}.isdisjoint(axes)), None)


def _shard_axes(
    shardings: Mapping[str, Any],
    named: Mapping[str, torch.nn.Parameter],
    specs: Mapping[str, Any],
    batch_axes: tuple[str, ...],
) -> tuple[tuple[str, ...], bool]:
    """The batch's axes over which most of the parameters are split, or else of the optimizer's
    state, as in stage 2 of ZeRO: then parameters stay gathered.
    """
    for state in (None, *_STATES):
        sizes: dict[tuple[str, ...], int] = {}
        for name, parameter in named.items():
            spec = specs[name] if state is None else _spec(shardings, state, name)
            used = set(itertools.chain(*(spec or ())))
            key = tuple(a for a in batch_axes if a in used)
            sizes[key] = sizes.get(key, 0) + parameter.numel()
        if axes := max(sizes, key=lambda key: sizes[key]):
            return axes, state is not None
    return (), False


def _mesh(
    stage: Any,
    batch_axes: tuple[str, ...],
    shard_axes: tuple[str, ...],
    tensor_axes: list[str],
    given: DeviceMesh | None,
    parameter: torch.nn.Parameter,
) -> DeviceMesh:
    """The processes as (replicate, shard, other axes)."""
    size = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
    whole = [a for a in batch_axes if a not in shard_axes]
    order = list(map(stage.axis_names.index, (*whole, *shard_axes, *tensor_axes)))
    ranks = torch.arange(math.prod(stage.mesh_shape)) if given is None else given.mesh.flatten()
    shape = (
        math.prod(size[a] for a in whole),
        math.prod(size[a] for a in shard_axes),
        *(size[a] for a in tensor_axes),
    )
    return DeviceMesh(
        parameter.device.type if given is None else given.device_type,
        ranks.reshape(stage.mesh_shape).permute(order).reshape(shape),
        mesh_dim_names=("replicate", "shard", *(f"tensor_{a}" for a in tensor_axes)),
    )


def _distribute(
    module: torch.nn.Module, specs: Mapping[str, Any], axes: list[str], mesh: DeviceMesh
) -> None:
    """Make DTensors of the parameters that are split over axes that do not split the batch, and let
    the modules that own them compute with their pieces.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    made: dict[int, torch.nn.Parameter] = {}
    for owner in module.modules():
        split = False
        for key, parameter in list(owner._parameters.items()):
            spec = None if parameter is None else specs[names[id(parameter)]]
            if _dim_over(spec, axes) is None:
                continue
            placements = []
            for axis in axes:
                dim = _dim_over(spec, (axis,))
                placements.append(Replicate() if dim is None else Shard(dim))
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(
                    distribute_tensor(parameter.detach(), mesh, placements),
                    requires_grad=parameter.requires_grad,
                )
            owner._parameters[key] = made[id(parameter)]
            split = True
        if split:
            owner.forward = _in_pieces(owner, mesh)


def _in_pieces(owner: torch.nn.Module, mesh: DeviceMesh) -> Callable[..., Any]:
    """The forward of a module with pieces of its parameters, of whole inputs, to whole results: a
    matrix or an embedding computes with its pieces, and other modules gather theirs.
    """
    call = owner.forward
    whole = [Replicate()] * mesh.ndim
    weight = owner._parameters.get("weight")
    multiplies = weight is not None and weight.dim() == 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        own = {}
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, DTensor):
                own[name] = parameter if multiplies else parameter.full_tensor()
            elif parameter is not None:
                local = DTensor.from_local(parameter, mesh, whole) if multiplies else parameter
                own[name] = local
        if not multiplies:
            return _with(own, call, x)
        y = _with(own, call, DTensor.from_local(x, mesh, whole, run_check=False))
        return y.redistribute(mesh, whole).to_local()

    def _with(own: dict[str, torch.Tensor], call: Callable[..., Any], x: torch.Tensor) -> Any:
        before = dict(owner._parameters)
        # As `functional_call` does, which would call this function again.
        for name in own:
            del owner._parameters[name]
            object.__setattr__(owner, name, own[name])
        try:
            return call(x)
        finally:
            for name in own:
                object.__delattr__(owner, name)
            owner._parameters.update(before)

    return forward


def _fully_shard(
    plan: Plan, module: torch.nn.Module, mesh: DeviceMesh, dims: Mapping[str, int], *, reshard: bool
) -> None:
    dim_of = {id(p): dims[name] for name, p in module.named_parameters()}
    count = mesh.size(1)

    def placement(parameter: torch.nn.Parameter) -> Shard | None:
        dim = dim_of.get(id(parameter), 0)
        # Only rows may be split unequally.
        return Shard(dim if parameter.shape[dim] % count == 0 else 0)

    named = plan.model.settings.get("compute_dtype")
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, named) if named else None)
    both = mesh["replicate", "shard"]
    # Parameters of these are gathered together: the items of lists of modules that run.
    units: list[torch.nn.Module] = []
    containers = torch.nn.ModuleList, torch.nn.ModuleDict
    for child in module.modules():
        if isinstance(child, torch.nn.ModuleList):
            units += [item for item in child if not isinstance(item, containers)]
    for unit in (*reversed(units), module):
        if any(True for _ in unit.parameters()):
            fully_shard(
                unit,
                mesh=both,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
                mp_policy=policy,
            )


def _of_whole_batch(norm: torch.nn.modules.batchnorm._BatchNorm, mesh: DeviceMesh) -> None:
    """Let a batch norm normalise by the figures of all processes' rows."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        for dim in (0, 1):
            x = all_reduce(x, group=mesh.get_group(dim)) if mesh.size(dim) > 1 else x
        return x

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not norm.training:
            return type(norm).forward(norm, x)
        dims = [0, *range(2, x.dim())]
        shape = (1, -1, *(1 for _ in dims[1:]))
        count = x.numel() // x.shape[1] * mesh.size(0) * mesh.size(1)
        mean = summed(x.sum(dims)) / count
        var = summed((x - mean.view(shape)).square().sum(dims)) / count
        if norm.track_running_stats:
            with torch.no_grad():
                norm.num_batches_tracked.add_(1)
                rate = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
                for figure, new in (
                    (norm.running_mean, mean),
                    (norm.running_var, var * (count / max(count - 1, 1))),
                ):
                    figure.lerp_(new.to(figure.dtype), rate)
        y = (x - mean.view(shape)) * (var.view(shape) + norm.eps).rsqrt()
        return y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y

    norm.forward = forward
