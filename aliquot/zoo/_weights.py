"""Weights of Hugging Face as parameters of the zoo: one table of names for each architecture, and
arrays that are read in the pieces in which a plan splits them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import InputError, counted, listing, shortened
from ._config import AbstractConfig
from ._hugging_face import architecture, from_config
from ._safetensors import safetensors_in
from ._sizes import as_fields

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where an array of the zoo lies in the files.

    Attributes:
        name: with `{layer}` and `{expert}`, one array for each.
        transposed: whether the file has (out, in) where the zoo has (in, out).
        part: the zoo's array is this one of the equal parts of the file's last dim, of `parts`.
        first_rows: whether the zoo's array may have fewer rows: positions of shorter sequences.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    first_rows: bool = False


def _same(name: str) -> _Source:
    return _Source(name=name)


def _matrix(name: str) -> _Source:
    """A matrix of `torch.nn.Linear`."""
    return _Source(name=name, transposed=True)


def _third(name: str, part: int) -> _Source:
    """Queries, keys or values of one array for all three."""
    return _Source(name=name, part=part, parts=3)


_GPT2 = {
    "embed.embedding": _same("wte.weight"),
    "position": _Source(name="wpe.weight", first_rows=True),
    "norm.scale": _same("ln_f.weight"),
    "norm.bias": _same("ln_f.bias"),
    "head.kernel": _matrix("lm_head.weight"),
    "layers.norm1.scale": _same("h.{layer}.ln_1.weight"),
    "layers.norm1.bias": _same("h.{layer}.ln_1.bias"),
    "layers.norm2.scale": _same("h.{layer}.ln_2.weight"),
    "layers.norm2.bias": _same("h.{layer}.ln_2.bias"),
    "layers.attn.q.kernel": _third("h.{layer}.attn.c_attn.weight", 0),
    "layers.attn.k.kernel": _third("h.{layer}.attn.c_attn.weight", 1),
    "layers.attn.v.kernel": _third("h.{layer}.attn.c_attn.weight", 2),
    "layers.attn.q.bias": _third("h.{layer}.attn.c_attn.bias", 0),
    "layers.attn.k.bias": _third("h.{layer}.attn.c_attn.bias", 1),
    "layers.attn.v.bias": _third("h.{layer}.attn.c_attn.bias", 2),
    "layers.attn.out.kernel": _same("h.{layer}.attn.c_proj.weight"),
    "layers.attn.out.bias": _same("h.{layer}.attn.c_proj.bias"),
    "layers.mlp.up.kernel": _same("h.{layer}.mlp.c_fc.weight"),
    "layers.mlp.up.bias": _same("h.{layer}.mlp.c_fc.bias"),
    "layers.mlp.down.kernel": _same("h.{layer}.mlp.c_proj.weight"),
    "layers.mlp.down.bias": _same("h.{layer}.mlp.c_proj.bias"),
}
_LLAMA = {
    "embed.embedding": _same("embed_tokens.weight"),
    "norm.scale": _same("norm.weight"),
    "head.kernel": _matrix("lm_head.weight"),
    "layers.norm1.scale": _same("layers.{layer}.input_layernorm.weight"),
    "layers.norm2.scale": _same("layers.{layer}.post_attention_layernorm.weight"),
    "layers.attn.q.kernel": _matrix("layers.{layer}.self_attn.q_proj.weight"),
    "layers.attn.k.kernel": _matrix("layers.{layer}.self_attn.k_proj.weight"),
    "layers.attn.v.kernel": _matrix("layers.{layer}.self_attn.v_proj.weight"),
    "layers.attn.q.bias": _same("layers.{layer}.self_attn.q_proj.bias"),
    "layers.attn.k.bias": _same("layers.{layer}.self_attn.k_proj.bias"),
    "layers.attn.v.bias": _same("layers.{layer}.self_attn.v_proj.bias"),
    "layers.attn.q_norm.scale": _same("layers.{layer}.self_attn.q_norm.weight"),
    "layers.attn.k_norm.scale": _same("layers.{layer}.self_attn.k_norm.weight"),
    "layers.attn.out.kernel": _matrix("layers.{layer}.self_attn.o_proj.weight"),
    "layers.mlp.gate.kernel": _matrix("layers.{layer}.mlp.gate_proj.weight"),
    "layers.mlp.up.kernel": _matrix("layers.{layer}.mlp.up_proj.weight"),
    "layers.mlp.down.kernel": _matrix("layers.{layer}.mlp.down_proj.weight"),
}
_MIXTRAL = _LLAMA | {
    "layers.moe.router": _matrix("layers.{layer}.block_sparse_moe.gate.weight"),
    "layers.moe.gate": _matrix("layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"),
    "layers.moe.down": _matrix("layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"),
    "layers.moe.up": _matrix("layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"),
}
_QWEN3_MOE = _LLAMA | {
    "layers.moe.router": _matrix("layers.{layer}.mlp.gate.weight"),
    "layers.moe.gate": _matrix("layers.{layer}.mlp.experts.{expert}.gate_proj.weight"),
    "layers.moe.up": _matrix("layers.{layer}.mlp.experts.{expert}.up_proj.weight"),
    "layers.moe.down": _matrix("layers.{layer}.mlp.experts.{expert}.down_proj.weight"),
}
_NAMES = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
}
# What stands before the names of all arrays but the head's; published files often leave it out.
_PREFIXES = {"gpt2": "transformer."}
# Masks and frequencies, which the zoo computes; and a head that is the embedding again.
_COMPUTED = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
# What a training may choose for itself.
_FREE = {"name", "seq_len", "routing", "group_size", "capacity_factor", "balance_weight"}


def is_hugging_face(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a model of Hugging Face: one with a `config.json`."""
    return (Path(folder) / _CONFIG).is_file()


def read_weights(
    folder: str | os.PathLike[str], config: AbstractConfig, params: Any
) -> tuple[Any, list[str]]:
    """The parameters of a model from a folder of Hugging Face, each device reading its own pieces.

    Args:
        folder: holds `config.json` and `*.safetensors`.
        config: the model that takes them.
        params: its parameters, whose shapes, dtypes and places the new ones get: `jax.Array`s,
            arrays of several stages, or arrays of NumPy.

    Returns:
        The parameters, and remarks on arrays that one side has alone.

    Raises:
        InputError: the model is another, or arrays are missing, or have other shapes; all of them
            are listed.
    """
    import jax

    folder = Path(folder)
    shown = shortened(str(folder), 200)
    kind = architecture(folder / _CONFIG)
    theirs = as_fields(from_config(folder / _CONFIG, seq_len=getattr(config, "seq_len", 1)))
    ours = as_fields(config)
    faults = []
    for field in theirs:
        if field not in _FREE and theirs[field] != ours.get(field):
            faults.append(f"{field} is {theirs[field]} there, and {ours.get(field)} here")
    if faults:
        raise InputError(
            listing(
                f"the weights in {shown} are of another model than {config.name}",
                faults,
                f"Name {shown}/{_CONFIG} in place of {config.name}.",
            )
        )
    found = safetensors_in(folder)
    prefix = _PREFIXES.get(kind, "model.")
    arrays = {name.removeprefix(prefix): array for name, array in found.items()}
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    readers: list[_Reader | None] = []
    new: list[str] = []
    used: set[str] = set()
    for path, leaf in leaves:
        reader = _Reader.of(_name(path), leaf, _NAMES[kind], arrays)
        readers.append(reader)
        if reader is None:
            new.append(_name(path))
        else:
            faults += reader.faults()
            used.update(reader.sources)
    if faults:
        raise InputError(
            listing(f"the weights in {shown} are not those of {config.name}", sorted(set(faults)))
        )
    left_out = [
        name
        for name in arrays
        if name not in used and name != "lm_head.weight" and not _COMPUTED.fullmatch(name)
    ]
    notes, made = [], []
    for places, what in (
        (new, "not in it, so that they begin as new"),
        (left_out, f"of it left out, as {config.name} has none such"),
    ):
        if places:
            some = f"{', '.join(places[:3])}{', ...' * (len(places) > 3)}"
            notes.append(f"note: {counted(len(places), 'array')} {what}: {some}")
    for (_, leaf), reader in zip(leaves, readers, strict=True):
        made.append(leaf if reader is None else _placed(leaf, reader))
    return jax.tree.unflatten(tree, made), notes


def _name(path: Any) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads blocks of one array of the zoo.

    Attributes:
        shape: of the zoo's array, whose leading dims count layers or experts that the files keep
            apart.
        lead: the number of these dims.
        sources: names in the files, in the order of the leading dims.
    """

    shape: tuple[int, ...]
    dtype: Any
    lead: int
    source: _Source
    sources: tuple[str, ...]
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def of(
        cls, path: str, leaf: Any, names: Mapping[str, _Source], arrays: Mapping[str, NDArray[Any]]
    ) -> _Reader | None:
        """The reader of a leaf; None if no array of the files stands for it."""
        number = re.match(r"layers\.(\d+)\.", path)
        source = names.get(re.sub(r"^layers\.\d+\.", "layers.", path))
        if source is None:
            return None
        fields: list[list[tuple[str, int]]] = []
        dims = iter(leaf.shape)
        if "{layer}" in source.name:
            layers = [int(number[1])] if number else range(next(dims))
            fields.append([("layer", k) for k in layers])
        if "{expert}" in source.name:
            fields.append([("expert", k) for k in range(next(dims))])
        sources = [source.name.format(**dict(each)) for each in itertools.product(*fields)]
        return cls(
            shape=tuple(leaf.shape),
            dtype=leaf.dtype,
            lead=len(leaf.shape) - len(list(dims)),
            source=source,
            sources=tuple(sources),
            arrays=arrays,
        )

    def faults(self) -> Iterator[str]:
        """Arrays that are missing or have another shape."""
        *rest, last = self.shape[self.lead :]
        wanted = [*rest, last * self.source.parts]
        wanted = wanted[::-1] if self.source.transposed else wanted
        for name in self.sources:
            if name not in self.arrays:
                yield f"{name} is missing"
                continue
            shape = list(self.arrays[name].shape)
            longer = self.source.first_rows and shape[0] > wanted[0] and shape[1:] == wanted[1:]
            if shape != wanted and not longer:
                yield f"{name} has shape {tuple(shape)}, and should have {tuple(wanted)}"

    def read(self, index: tuple[slice, ...]) -> NDArray[Any]:
        """A block of the array, of which the files read no more than that."""
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        outer, inner = bounds[: self.lead], bounds[self.lead :]
        shift = self.source.part * self.shape[-1]
        inner[-1] = (inner[-1][0] + shift, inner[-1][1] + shift)
        block = tuple(slice(*pair) for pair in inner)
        numbers = np.arange(len(self.sources)).reshape(self.shape[: self.lead])
        chosen = numbers[tuple(slice(*pair) for pair in outer)]
        out = np.empty([*chosen.shape, *(last - first for first, last in inner)], self.dtype)
        for place, number in np.ndenumerate(chosen):
            array = self.arrays[self.sources[number]]
            out[place] = array[block[::-1]].T if self.source.transposed else array[block]
        return out


def _placed(leaf: Any, reader: _Reader) -> Any:
    """The array in the place of another, in all its pieces."""
    import jax

    from ..runtime import PiecedArray

    if isinstance(leaf, np.ndarray):
        return reader.read((slice(None),) * leaf.ndim)
    if isinstance(leaf, PiecedArray):
        starts = zip(leaf.pieces, leaf.bounds, strict=False)
        return PiecedArray([_rows(piece, reader, start) for piece, start in starts])
    return _rows(leaf, reader, 0) if isinstance(leaf, jax.Array) else leaf


def _rows(piece: Any, reader: _Reader, start: int) -> Any:
    import jax

    def block(index: tuple[slice, ...] | None) -> NDArray[Any]:
        assert index, "no weight is a scalar"
        first, last, _ = index[0].indices(piece.shape[0])
        return reader.read((slice(first + start, last + start), *index[1:]))

    return jax.make_array_from_callback(piece.shape, piece.sharding, block, dtype=piece.dtype)
