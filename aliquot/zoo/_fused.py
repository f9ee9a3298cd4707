"""The attention that a model is built with: the fused kernel that its device's library has, or
plain attention, which writes all scores to memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import DEVICES, Attention, Device, attention_of, why_no_attention
from ..core import nearest
from ._config import AbstractConfig, AbstractTextConfig
from ._precision import PRECISIONS

_ASKED = ("auto", "fused", "plain", "cudnn", "splash")
# A device for which each kernel is made, whose heads may be largest.
_EXAMPLES = {"cudnn": "H100", "splash": "v5e"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The attention of a model: `kernel` is `"plain"`, `"cudnn"` or `"splash"`; `reason` says why,
    for readers; it is empty for models without attention. With `faults`, what was asked for cannot
    be had.
    """

    kernel: str = "plain"
    reason: str = ""
    faults: tuple[str, ...] = ()


def choose_attention(
    asked: str, config: AbstractConfig | None, dtype: str | None, device: Device | None
) -> AttentionChoice:
    """The attention that was asked for, or what is missing for it.

    Args:
        asked: `"auto"` for the device's fused kernel where that can compute the model's attention,
            else plain; `"fused"` for the kernel and nothing else; or a kernel by its name.
        config: of the model; None if it is unknown.
        dtype: as `build` names it; None if it is unknown.
        device: that runs the step; None for any device.
    """
    if asked not in _ASKED:
        fault = f"there is no attention {asked!r}: {nearest(asked, _ASKED)}"
        return AttentionChoice(faults=(fault,))
    if asked in ("auto", "plain") and not isinstance(config, AbstractTextConfig | None):
        return AttentionChoice()
    if asked == "plain":
        return AttentionChoice(reason="as asked for")
    if device is None and asked == "auto":
        return AttentionChoice(reason="no device was named, and plain attention runs on all")
    named = asked in _EXAMPLES
    kernel = attention_of(DEVICES[_EXAMPLES[asked]] if device is None and named else device)
    lacks = _lacks(kernel, device, config, dtype)
    if named and kernel is not None and kernel.kernel != asked:
        lacks = [f"{device.name if device else 'the device'} has {kernel.title}"]
    if kernel is None or lacks:
        if asked == "auto":
            return AttentionChoice(reason=f"no fused kernel: {'; '.join(lacks)}")
        advice = f"Ask for attention {'plain' if named else 'auto or plain'} instead."
        fault = f"attention {asked!r} cannot be had: {'; '.join(lacks)}. {advice}"
        return AttentionChoice(faults=(fault,))
    where = f", on {device.name}" if device else ""
    return AttentionChoice(kernel=kernel.kernel, reason=f"{kernel.title}{where}")


def _lacks(
    kernel: Attention | None,
    device: Device | None,
    config: AbstractConfig | None,
    dtype: str | None,
) -> list[str]:
    """Reasons why a kernel cannot compute a model's attention, or why there is none."""
    if kernel is None:
        if device is None:
            return ["which kernel depends on the device, and none was named: give device="]
        return [why_no_attention(device)]
    if config is None or dtype not in PRECISIONS:
        return []
    if not isinstance(config, AbstractTextConfig):
        return [f"{config.family} has no attention"]
    lengths = {shape[1] for shape, _ in config.batch(config.batch_multiple, dtype).values()}
    return kernel.lacks(PRECISIONS[dtype].compute, config.head_dim, lengths)
