"""PyTorch's AdamW, Adam and SGD as functions of JAX, with the numbers of its optimizers.

References: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1;
Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2; and
`torch.optim` as released, of which the names of settings and state are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ..core import InputError, listing

_USED = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay", "nesterov"),
}
# How an optimizer is run, or what it must be; the rest changes numbers.
_FREE = ("params", "foreach", "fused", "capturable", "differentiable", "param_names", "initial_lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer with the settings of each parameter, by name.

    Attributes:
        name: as in `torch.optim`.
        settings: of each parameter.
    """

    name: str
    settings: Mapping[str, Mapping[str, Any]]

    def state(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Shapes of the state of shapes of parameters."""
        step = {"step": jax.ShapeDtypeStruct((), jnp.int32)}
        if self.name == "SGD":
            moved = {n: p for n, p in parameters.items() if self.settings[n]["momentum"]}
            return {"momentum_buffer": moved} if moved else {}
        return {**step, "exp_avg": dict(parameters), "exp_avg_sq": dict(parameters)}

    def update(
        self, parameters: dict[str, Any], gradients: dict[str, Any], state: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """New parameters and state."""
        new: dict[str, Any] = {}
        if self.name == "SGD":
            buffers: dict[str, Any] = {}
            for name, p in parameters.items():
                own = self.settings[name]
                g = gradients[name] + own["weight_decay"] * p
                if own["momentum"]:
                    # From zero this is PyTorch's first step, too, as nothing is dampened.
                    buffers[name] = own["momentum"] * state["momentum_buffer"][name] + g
                    g = g + own["momentum"] * buffers[name] if own["nesterov"] else buffers[name]
                new[name] = p - own["lr"] * g
            return new, {"momentum_buffer": buffers} if buffers else {}
        step = state["step"] + 1
        first: dict[str, Any] = {}
        second: dict[str, Any] = {}
        for name, p in parameters.items():
            own, g = self.settings[name], gradients[name]
            lr, decay = own["lr"], own["weight_decay"]
            beta1, beta2 = own["betas"]
            if self.name == "AdamW":
                p = p * (1 - lr * decay)
            else:
                g = g + decay * p
            count = step.astype(jnp.promote_types(p.dtype, jnp.float32))
            first[name] = beta1 * state["exp_avg"][name] + (1 - beta1) * g
            second[name] = beta2 * state["exp_avg_sq"][name] + (1 - beta2) * jnp.square(g)
            root = jnp.sqrt(second[name]) / jnp.sqrt(1 - beta2**count).astype(p.dtype)
            rate = (lr / (1 - beta1**count)).astype(p.dtype)
            new[name] = p - rate * first[name] / (root + own["eps"])
        return new, {"step": step, "exp_avg": first, "exp_avg_sq": second}


_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def read_optimizer(
    optimizer: torch.optim.Optimizer | str, module: torch.nn.Module, lr: float = 1e-3
) -> Optimizer:
    """An optimizer of PyTorch, or one with PyTorch's settings by its name: adamw, adam or sgd.

    Raises:
        InputError: it is another one, has settings that are not known here, or does not update all
            parameters of the module.
    """
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if isinstance(optimizer, str):
        if optimizer.lower() not in _KINDS:
            raise InputError(f"optimizer {optimizer!r} is not one of {', '.join(_KINDS)}.")
        optimizer = _KINDS[optimizer.lower()](list(named.values()), lr=lr)
    name = type(optimizer).__name__
    if type(optimizer) not in _KINDS.values():
        raise InputError(
            f"the optimizer is {name}, and of PyTorch's AdamW, Adam and SGD are known: plan with"
            " one of these, whose state is as large or larger."
        )
    used = _USED["sgd" if name == "SGD" else "adam"]
    # Adam of newer releases can be AdamW.
    faults, settings = [], {}
    name_of = {id(p): n for n, p in named.items()}
    for group in optimizer.param_groups:
        decoupled = bool(group.get("decoupled_weight_decay"))
        if name == "Adam" and decoupled:
            faults.append("decoupled_weight_decay=True: write AdamW")
        for key, value in group.items():
            if key not in (*used, *_FREE, "decoupled_weight_decay") and value:
                faults.append(f"{key}={value} is not known here")
        for parameter in group["params"]:
            if id(parameter) in name_of:
                own = {key: group[key] for key in used}
                own["lr"] = float(own["lr"])
                settings[name_of[id(parameter)]] = own
    faults += [
        f"{n} is not updated by it: set requires_grad_(False)" for n in named if n not in settings
    ]
    if faults:
        raise InputError(listing(f"{name} cannot be planned", sorted(set(faults))))
    return Optimizer(name=name, settings=settings)
