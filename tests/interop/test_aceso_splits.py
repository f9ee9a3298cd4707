"""Choices of a stage that follow from its configuration."""

from types import SimpleNamespace

import pytest

from aliquot.interop.aceso._products import STREAM
from aliquot.interop.aceso._stage_splits import StageSplits


@pytest.mark.parametrize(
    ("on_stream", "others", "found"),
    [((2, 2, 8), (4, 4, 4, 4), 2), ((2, 8), (4, 4), 8), ((), (4, 4, 2), 4)],
    ids=["most", "a tie", "nothing on the stream"],
)
def test_the_residual_stream_has_the_degree_of_most_operators_on_it(on_stream, others, found):
    roles = [STREAM[0]] * len(on_stream) + ["other"] * len(others)
    data = (*on_stream, *others)
    ones = (1,) * len(data)
    splits = StageSplits(
        problem=None,
        operators=SimpleNamespace(roles=roles),
        ops=(),
        stage=SimpleNamespace(tensor=ones, data=data, algorithm=ones),
        first=0,
        axes=None,
    )
    assert splits.stream_data == found
