"""The dtypes of a model's computation and of its parameters, by the names that users give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import InputError, nearest

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Names of two dtypes: of activations and matrix products (`compute`), and of parameters and
    optimizer state (`params`).
    """

    compute: str
    params: str


PRECISIONS: dict[str, Precision] = {
    "float32": Precision(compute="float32", params="float32"),
    "bf16": Precision(compute="bfloat16", params="float32"),
    "float16": Precision(compute="float16", params="float32"),
    "float64": Precision(compute="float64", params="float64"),
}


_ALSO = {
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
