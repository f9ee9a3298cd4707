"""Plans of PyTorch training: the step as a function of JAX, which planners of one program take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch

from .._api import plan as plan_step
from ..cluster import Cluster
from ..core import InputError
from ..planners import AbstractMethod, WholeProgram
from ..plans import ModelReference, Plan
from ._export import export
from ._optimizers import read_optimizer

Loss = Callable[[Any, dict[str, Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStep:
    """A training step of PyTorch in JAX. All but the step are shapes.

    Attributes:
        step: `step(state, batch)` gives the new state and the loss, `{"loss": ...}`.
        state: `params` by the names of `module.named_parameters()`, the optimizer's state by its
            names in PyTorch, and `buffers`: those that the module changes, and frozen parameters.
        batch: tensors by name.
    """

    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    state: dict[str, Any]
    batch: dict[str, jax.ShapeDtypeStruct]


def training_step(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | str,
    inputs: Mapping[str, Any],
    loss: Loss | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    cluster: Cluster | None = None,
    recompute: str = "none",
) -> TorchStep:
    """The training step of a module: forward by `torch.export`, backward and update by JAX.

    `aliquot plan package.module:factory` takes it from a function that returns
    `(step.step, step.state, step.batch)`.

    Args:
        module: in the mode in which it trains. It may be on the device `meta`.
        optimizer: AdamW, Adam or SGD of `torch.optim` with the module's parameters, or its name.
        inputs: tensors of the whole batch, by name; on `meta` they need no memory.
        loss: `loss(module, inputs)` gives a scalar; by default `module(**inputs).loss`, as of the
            models of `transformers`.
        compute_dtype: parameters and inputs are cast to it in the step, as by FSDP's
            `MixedPrecisionPolicy(param_dtype=...)`; by default they stay as they are.
        cluster: for devices that have a fused attention this is taken.
        recompute: "block" computes each item of a `ModuleList` again in the backward pass, as
            `torch.utils.checkpoint` does; "none" nothing.

    Raises:
        CaptureError: the module cannot be traced, or has operators without a function in JAX.
        InputError: the optimizer is not known, or `recompute` is another name or counts batches of
            a batch norm twice.
    """
    if recompute not in ("none", "block"):
        raise InputError(f"recompute={recompute!r}: modules of PyTorch take block or none.")
    norms = torch.nn.modules.batchnorm._BatchNorm
    if recompute == "block" and any(isinstance(m, norms) for m in module.modules()):
        raise InputError(
            "recompute='block': a batch norm that is computed again counts each batch twice. Leave"
            " recompute out."
        )
    exported = export(
        module,
        inputs,
        loss or (lambda module, batch: module(**batch).loss),
        dtype=compute_dtype,
        device=None if cluster is None else cluster.device,
        recomputes=recompute == "block",
    )
    update = read_optimizer(optimizer, module)

    def step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, dict[str, jax.Array]]:
        gradient = jax.value_and_grad(exported.loss, has_aux=True)
        (loss, buffers), gradients = gradient(state["params"], state.get("buffers", {}), batch)
        params, kept = update.update(state["params"], gradients, state)
        return {"params": params, **kept, **({"buffers": buffers} if buffers else {})}, {
            "loss": loss
        }

    step.__name__ = type(module).__name__
    state = {"params": exported.parameters, **update.state(exported.parameters)}
    if exported.buffers:
        state["buffers"] = exported.buffers
    return TorchStep(step=step, state=state, batch=exported.batch)


def plan(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | str,
    inputs: Mapping[str, Any],
    loss: Loss | None = None,
    *,
    cluster: Cluster | None = None,
    method: AbstractMethod | None = None,
    compute_dtype: torch.dtype | None = None,
    recompute: str = "none",
    **options: Any,
) -> Plan:
    """Plan how to train a module of PyTorch on a cluster: as one program, without pipelines.

    Times and memory are predictions for the same step under XLA: what PyTorch's autograd keeps for
    the backward pass, and which kernels it starts, differs from that. Give the plan to `apply`.

    Args:
        module, optimizer, inputs, loss, compute_dtype, recompute: as for `training_step`. What the
            module itself recomputes by `torch.utils.checkpoint` is not seen: take it out.
        cluster: the devices to plan for; by default those JAX sees.
        method: how to parallelize; by default `WholeProgram()`, the fastest that needs no stages.
        options: as for `aliquot.plan`.

    Raises:
        CaptureError, InfeasibleError, InputError: as `training_step` and `aliquot.plan` do; or the
            method makes a pipeline.
    """
    cluster = cluster or Cluster.detect()
    needs_double = any(p.dtype == torch.float64 for p in module.parameters())
    with jax.enable_x64(True) if needs_double else contextlib.nullcontext():
        made = training_step(
            module,
            optimizer,
            inputs,
            loss,
            compute_dtype=compute_dtype,
            cluster=cluster,
            recompute=recompute,
        )
        said = {"recompute": recompute}
        if compute_dtype is not None:
            said["compute_dtype"] = str(compute_dtype)[6:]
        planned = plan_step(
            made.step,
            made.state,
            made.batch,
            cluster=cluster,
            method=method or WholeProgram(),
            recompute="none",
            model=ModelReference(kind="closure", name=type(module).__name__, settings=said),
            **options,
        )
    if planned.is_pipeline:
        raise InputError(
            f"method {planned.method} makes a pipeline of {len(planned.stages)} stages, and modules"
            " of PyTorch are split as one program: take WholeProgram, ShardParallel, Zero3Parallel,"
            " TensorParallel or DataParallel."
        )
    return planned
