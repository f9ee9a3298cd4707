"""Pallas kernels, as their equations describe them: the dim of each array along which each dim of
the grid walks.

A kernel runs once for each point of its grid, on a block of each array. If a dim of the grid only
chooses blocks, along one dim of every result, then runs that differ in it are independent, and a
piece of the arrays needs only a piece of the grid. The parameters are as in JAX 0.10 to 0.12.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from . import _jax_compat as compat
from ._kernel_work import kernel_arithmetic
from ._rule import Scores

KERNEL = "pallas_call"
_TRANSCENDENTAL_FLOPS = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Blocks along one dim of an array, of `block` elements each, chosen by dim `grid_dim` of the
    grid (-1 if none may be cut).
    """

    grid_dim: int
    block: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel as a planner sees it.

    Attributes:
        grid: number of points along each dim.
        operands, results: for each array, how the grid walks along each of its dims.
        flops: of all runs together, from the author's estimate if there is one, else from the
            kernel's operators; work that runs skip is not counted.
        accessed_bytes: bytes read and written by all runs, from the author's estimate; 0 without
            one.
        scores: of fused attention; None for other kernels.
    """

    grid: tuple[int, ...]
    operands: tuple[tuple[Walked, ...], ...]
    results: tuple[tuple[Walked, ...], ...]
    flops: float
    accessed_bytes: float
    scores: Scores | None


def kernel_of(params: Mapping[str, Any], tables: Sequence[Any] = ()) -> Kernel:
    """The kernel that the parameters of a `pallas_call` describe.

    Args:
        tables: values of the operands that only choose blocks and work; None for those that are
            unknown.
    """
    mapping = params["grid_mapping"]
    fixed = all(isinstance(size, int) for size in mapping.grid)
    grid = tuple(size if isinstance(size, int) else 1 for size in mapping.grid)
    blocks = [_walks(block, grid) for block in mapping.block_mappings]
    free = _independent(params, grid, blocks) if fixed else frozenset()
    whole = Walked(grid_dim=-1, block=1)
    arrays = []
    for walks in blocks:
        arrays.append(tuple(w if w.grid_dim in free else whole for w in walks))
    # Operands that only choose blocks (scalar prefetch) come first, and have no blocks themselves.
    chosen = [() for _ in range(mapping.num_index_operands)]
    counted = kernel_arithmetic(params, grid, tables)
    scores = None
    if counted.exponentials and counted.products > 1:
        # Fused attention: a softmax between two products, or its gradients, which take more.
        scores = Scores(is_backward=counted.products > 2)
    flops, accessed_bytes = counted.flops, 0.0
    estimate = params.get("cost_estimate")
    if estimate is not None:
        flops = float(estimate.flops + _TRANSCENDENTAL_FLOPS * estimate.transcendentals)
        if counted.flops < counted.unconditional:
            # Estimates do not know which runs skip their work.
            flops = min(flops, counted.flops)
        accessed_bytes = float(estimate.bytes_accessed)
    return Kernel(
        grid=grid,
        operands=(*chosen, *arrays[: mapping.num_inputs]),
        results=tuple(arrays[mapping.num_inputs :]),
        flops=flops,
        accessed_bytes=accessed_bytes,
        scores=scores,
    )


def kernel_on_pieces(eqn: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """The equation for pieces of its operands, with these shapes; None if the kernel cannot be cut
    like that.
    """
    params = eqn.params
    mapping, kernel = params["grid_mapping"], kernel_of(params)
    grid = list(kernel.grid)
    for var, shape, walks in zip(eqn.invars, shapes, kernel.operands, strict=True):
        # An operand without blocks has no dims that are walked along.
        for d, (before, after) in enumerate(zip(var.aval.shape, shape, strict=True)):
            if before == after:
                continue
            walk = walks[d] if walks else Walked(grid_dim=-1, block=1)
            if (
                walk.grid_dim < 0
                or after % walk.block
                or grid[walk.grid_dim] not in (kernel.grid[walk.grid_dim], after // walk.block)
            ):
                return None
            grid[walk.grid_dim] = after // walk.block
    cut = math.prod(grid) / max(math.prod(kernel.grid), 1)

    def piece(aval: Any, walks: Sequence[Walked]) -> Any:
        sizes = []
        for n, w in zip(aval.shape, walks, strict=True):
            sizes.append(n if w.grid_dim < 0 else grid[w.grid_dim] * w.block)
        return aval.update(shape=tuple(sizes))

    walked = [*kernel.operands[mapping.num_index_operands :], *kernel.results]
    blocks = []
    for block, walks in zip(mapping.block_mappings, walked, strict=True):
        blocks.append(dataclasses.replace(block, array_aval=piece(block.array_aval, walks)))
    changed = {
        "grid_mapping": dataclasses.replace(
            mapping, grid=tuple(grid), block_mappings=tuple(blocks)
        ),
        "out_avals": tuple(map(piece, params["out_avals"], kernel.results)),
    }
    estimate = params.get("cost_estimate")
    if estimate is not None:
        parts = {}
        for name in ("flops", "transcendentals", "bytes_accessed"):
            parts[name] = int(getattr(estimate, name) * cut)
        changed["cost_estimate"] = dataclasses.replace(estimate, **parts)
    return eqn.replace(params={**params, **changed})


def _walks(block: Any, grid: Sequence[int]) -> tuple[Walked, ...]:
    """How the grid walks along each dim of one array: by the dim of the grid whose position is used
    unchanged as the number of the block.
    """
    body, _ = compat.open_body(block.index_map_jaxpr)
    places = {var: g for g, var in enumerate(body.invars[: len(grid)])}
    walks = []
    for size, shape, index in zip(
        block.array_aval.shape, block.block_shape, body.outvars, strict=True
    ):
        grid_dim = -1 if compat.is_literal(index) else places.get(index, -1)
        kind = type(shape).__name__
        length = {
            "Squeezed": 1,
            "NoneType": 1,
            "Blocked": getattr(shape, "block_size", 0),
            "int": shape,
        }.get(kind, 0)
        if grid_dim >= 0 and length and grid[grid_dim] * length == size:
            walks.append(Walked(grid_dim=grid_dim, block=length))
        else:
            walks.append(Walked(grid_dim=-1, block=1))
    return tuple(walks)


def _independent(
    params: Mapping[str, Any], grid: Sequence[int], blocks: Sequence[Sequence[Walked]]
) -> frozenset[int]:
    """The dims of the grid along which the kernel may be cut."""
    mapping = params["grid_mapping"]
    if params.get("mesh") is not None or not mapping.num_outputs:
        return frozenset()
    # The dims of the grid whose position or size the kernel asks for. A kernel numbers them without
    # those that `vmap` has added.
    added = set(mapping.vmapped_dims)
    grid_dims = [g for g in range(len(grid)) if g not in added]
    asked: set[int] = set()
    for eqn in _equations(compat.open_body(params["jaxpr"])[0]):
        name = eqn.primitive.name
        if name in ("program_id", "num_programs"):
            asked.add(grid_dims[eqn.params["axis"]])
        elif any(word in name for word in ("semaphore", "dma", "callback", "print", "prng")):
            # Runs may wait for one another or must happen in order, so no dim can be cut.
            asked.update(range(len(grid)))
    has_memory = bool(mapping.scratch_avals)
    independent = set()
    for g in range(len(grid)):
        # Scratch memory is undefined in the first run. If the kernel cannot tell the first run
        # along this dim, or along the dims outside of it, from others, it does not rely on what
        # earlier runs left there.
        hidden = asked.isdisjoint(range(g + 1) if has_memory else (g,))
        # For each array, which of its dims are walked along this dim of the grid.
        along = []
        for walks in blocks:
            along.append([walk.grid_dim == g for walk in walks])
        named = all(dims.count(True) <= 1 for dims in along)
        everywhere = all(map(any, along[mapping.num_inputs :]))
        alone = not any(
            _uses(block, g, walks)
            for block, walks in zip(mapping.block_mappings, blocks, strict=True)
        )
        alike = all(
            along[given] == along[mapping.num_inputs + result]
            for given, result in params["input_output_aliases"]
        )
        taken = any(map(any, along[: mapping.num_inputs]))
        if hidden and named and everywhere and alone and alike and taken and grid[g] > 1:
            independent.add(g)
    return frozenset(independent)


def _uses(block: Any, grid_dim: int, walks: Sequence[Walked]) -> bool:
    """True if a dim of the grid chooses blocks in another way than as the number of a block."""
    body, _ = compat.open_body(block.index_map_jaxpr)
    var = body.invars[grid_dim]
    read = itertools.chain.from_iterable(eqn.invars for eqn in body.eqns)
    if any(var is atom for atom in read):
        return True
    for index, walk in zip(body.outvars, walks, strict=True):
        if index is var and walk.grid_dim != grid_dim:
            return True
    return False


def _equations(body: Any) -> Iterator[Any]:
    """The operators of a kernel, also inside its loops and branches."""
    for eqn in body.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)
