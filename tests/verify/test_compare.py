"""Which compiled collectives a plan explains."""

import pytest

from aliquot.plans import CollectiveUse
from aliquot.runtime import CompiledCollective
from aliquot.verification._compare import compare_collectives, unintended_collectives


def use(kind, axes, count, num_bytes):
    return CollectiveUse(kind=kind, axes=tuple(axes), count=count, num_bytes=num_bytes, seconds=0.0)


def found(kind, axes, count, num_bytes, label=""):
    return CompiledCollective(
        kind=kind, axes=tuple(axes), count=count, num_bytes=num_bytes, dtype="bf16", label=label
    )


REDUCED = use("all-reduce", "x", 10, 10_000)


@pytest.mark.parametrize(
    ("predicted", "compiled", "expected"),
    [
        ([REDUCED], [found("all-reduce", "x", 1, 10_000)], []),
        # Merged, and a little more.
        ([REDUCED], [found("all-reduce", "x", 1, 10_300)], []),
        # Less is no fault.
        ([REDUCED], [], []),
        # The same kind along another axis is another collective.
        (
            [REDUCED],
            [found("all-reduce", "y", 1, 10_000, "add")],
            [("all-reduce", ("y",), 10_000, "add")],
        ),
        (
            [REDUCED],
            [found("all-reduce", "x", 10, 10_000), found("all-to-all", "x", 2, 700, "input 1")],
            [("all-to-all", ("x",), 700, "batch.tokens")],
        ),
        # Of a kind that moves too much, what has no predicted size.
        (
            [REDUCED],
            [found("all-reduce", "x", 10, 10_000, "a"), found("all-reduce", "x", 1, 5_555, "b")],
            [("all-reduce", ("x",), 5_555, "b")],
        ),
        # By cause, added up; crumbs are not listed.
        (
            [REDUCED],
            [
                found("all-gather", "x", 1, 300, "a"),
                found("all-gather", "x", 3, 900, "a"),
                found("all-gather", "x", 1, 9),
            ],
            [("all-gather", ("x",), 1200, "a")],
        ),
        # A sum of which each device needs a part is half an all-reduce.
        ([REDUCED], [found("reduce-scatter", "x", 10, 2_500)], []),
        (
            [REDUCED],
            [found("all-reduce", "x", 5, 5_000), found("reduce-scatter", "x", 10, 2_500, "a")],
            [("reduce-scatter", ("x",), 2_500, "a")],
        ),
        (
            [REDUCED],
            [found("reduce-scatter", "y", 10, 2_500, "a")],
            [("reduce-scatter", ("y",), 2_500, "a")],
        ),
        ([REDUCED], [found("all-gather", "x", 1, 50)], []),
        ([], [found("all-gather", "x", 1, 4, "a")], [("all-gather", ("x",), 4, "a")]),
    ],
)
def test_collectives_without_a_prediction_are_unintended(predicted, compiled, expected):
    listed = unintended_collectives(
        predicted, compiled, ["state.w", "batch.tokens"], {"x": 4, "y": 2}
    )
    assert [(each.kind, each.axes, each.num_bytes, each.cause) for each in listed] == expected


def test_both_sides_stand_in_one_row():
    (row,) = compare_collectives(
        [REDUCED], [found("all-reduce", "x", 2, 9_000), found("all-reduce", "x", 1, 500)]
    )
    assert (row.predicted_count, row.compiled_count, row.predicted_bytes, row.compiled_bytes) == (
        10,
        3,
        10_000,
        9_500,
    )
