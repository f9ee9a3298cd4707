"""The dtypes of a model's computation and of its parameters, by the names that users give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cluster import DEVICES, Device
from ..core import InputError, nearest

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Names of two dtypes: of activations and matrix products (`compute`), and of parameters and
    optimizer state (`params`). With `is_fp8` the linear layers of blocks multiply in 8-bit floats.

    Their scales are the last step's ("delayed"), or those of the arrays themselves: one for each
    ("tensor"), or for each row and column of each ("rows").

    With `keeps_master` the state holds parameters in `compute`, and the optimizer a copy of them in
    `params`, which it updates: gradients and their sums over micro-batches are in `compute`.
    """

    compute: str
    params: str
    is_fp8: bool = False
    scales: str = "delayed"
    keeps_master: bool = False

    @property
    def rounded_params(self) -> str | None:
        """The dtype of parameters beside a master copy; None if there is no such copy."""
        return self.compute if self.keeps_master else None


PRECISIONS: dict[str, Precision] = {
    "float32": Precision(compute="float32", params="float32"),
    "bf16": Precision(compute="bfloat16", params="float32"),
    "bf16-master": Precision(compute="bfloat16", params="float32", keeps_master=True),
    "fp8": Precision(compute="bfloat16", params="float32", is_fp8=True),
    "fp8-tensor": Precision(compute="bfloat16", params="float32", is_fp8=True, scales="tensor"),
    "fp8-rows": Precision(compute="bfloat16", params="float32", is_fp8=True, scales="rows"),
    "float16": Precision(compute="float16", params="float32"),
    "float64": Precision(compute="float64", params="float64"),
}


_ALSO = {
    "float8": "fp8",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bf16",
    "fp32": "float32",
    "single": "float32",
    "fp64": "float64",
    "double": "float64",
}


def precision_name(name: str) -> str:
    """The name in `PRECISIONS` for a name that other libraries use; any other name unchanged.

    >>> precision_name("bfloat16"), precision_name("fp16")
    ('bf16', 'float16')
    """
    return _ALSO.get(name, name)


def fp8_faults(device: Device | None) -> list[str]:
    """Why a device cannot multiply in 8-bit floats of the types e4m3fn and e5m2; empty if it can.
    CPUs compute everything, slowly.
    """
    if device is None or device.kind == "cpu" or "float8" in device.peak_flops_per_s:
        return []
    have = [name for name, each in DEVICES.items() if "float8" in each.peak_flops_per_s]
    return [
        f"dtype=fp8 multiplies in float8_e4m3fn and float8_e5m2, for which {device.name} has no"
        f" units ({', '.join(have)} have): take --dtype bf16."
    ]


def precision(name: str) -> Precision:
    """The precision of that name.

    Raises:
        InputError: there is no such name, or it is float64 and JAX is set to 32 bits, which would
            silently narrow it.
    """
    import jax

    if name not in PRECISIONS:
        raise InputError(f"There is no dtype {name!r} for a model: {nearest(name, PRECISIONS)}")
    if name == "float64" and jax.dtypes.canonicalize_dtype("float64") != "float64":
        raise InputError(
            "dtype='float64' was asked for, but JAX narrows every 64-bit number to 32 bits as it is"
            " set now. Set JAX_ENABLE_X64=1, or call jax.config.update('jax_enable_x64', True)"
            " first."
        )
    return PRECISIONS[name]


def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, without the array."""
    import jax

    return jax.ShapeDtypeStruct(shape, dtype)
