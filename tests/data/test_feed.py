"""The position in sources of batches."""

import json

import pytest

from aliquot.core import InputError
from aliquot.data import Feed


class Numbered:
    def batch_at(self, step, rows=None):
        return step, rows


class Iterator:
    """An iterator as grain's are."""

    def __init__(self):
        self.next_index = 0

    def __next__(self):
        self.next_index += 1
        return self.next_index - 1

    def get_state(self):
        return {"next_index": self.next_index}

    def set_state(self, state):
        self.next_index = state["next_index"]


@pytest.mark.parametrize("make", [Numbered, Iterator])
def test_a_position_goes_through_a_file(make):
    feed = Feed(make())
    before = [next(feed) for _ in range(3)]
    position = json.loads(json.dumps(feed.position))
    after = [next(feed) for _ in range(2)]
    resumed = Feed(make(), position=position)
    assert resumed.step == 3 and [next(resumed) for _ in range(2)] == after
    assert len({*before, *after}) == 5


def test_rows_are_passed_to_sources_that_take_them():
    assert next(Feed(Numbered(), rows=slice(2, 4))) == (0, slice(2, 4))


def test_what_is_no_source():
    with pytest.raises(InputError, match=r"list_iterator is no source.*batch_at\(step\)"):
        Feed(iter([1, 2]))
    with pytest.raises(InputError, match="does not say where the iterator"):
        Feed(Iterator(), position={"step": 3})


def test_a_recipe_with_grain():
    """As in docs/train.md."""
    grain = pytest.importorskip("grain")

    def source():
        examples = grain.MapDataset.source(range(100)).seed(7).shuffle().repeat(None)
        return iter(examples.batch(4).to_iter_dataset())

    feed = Feed(source())
    for _ in range(30):
        next(feed)
    resumed = Feed(source(), position=json.loads(json.dumps(feed.position)))
    assert next(resumed).tolist() == next(feed).tolist()
