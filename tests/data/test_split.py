"""Parts of a text."""

import pytest

from aliquot.core import InputError
from aliquot.data import Split


@pytest.mark.parametrize("count", [1, 999, 1000, 123_457])
@pytest.mark.parametrize("text", ["949,50,1", "1", "0.5,0.5", "0,1,0"])
def test_parts_follow_each_other_and_are_everything(text, count):
    split = Split.read(text)
    bounds = [split.bounds(count, part) for part in ("train", "validation", "test")]
    assert bounds[0][0] == 0 and bounds[-1][1] == count
    assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
    assert str(split) == text
    for (first, last), share in zip(bounds, split.shares):
        assert last - first == pytest.approx(count * share / sum(split.shares), abs=1)


@pytest.mark.parametrize("text", ["", "a,b", "1,-1", "0,0", "1,1,1,1", "1;2", "nan", "1e5"])
def test_anything_else_is_refused(text):
    with pytest.raises(InputError, match="split"):
        Split.read(text)
