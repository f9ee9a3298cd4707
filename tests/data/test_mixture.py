"""Batches of several texts."""

import numpy as np
import pytest

from aliquot.core import InputError
from aliquot.data import Mixture, Windows


def text(first, count=100, **options):
    tokens = np.arange(first, first + count * 4 + 1)
    return Windows(tokens=tokens, **({"seq_len": 4, "batch": 6, "seed": 1} | options))


def mixture(*weights, **options):
    texts = tuple(text(1000 * k, **options) for k in range(len(weights)))
    return Mixture(texts=texts, weights=weights)


def test_each_text_has_its_share_of_every_stretch():
    mixed = mixture(0.5, 0.3, 0.2)
    firsts = np.concatenate([mixed.batch_at(k)["inputs"][:, 0] for k in range(200)])
    for examples in (30, 300, 1200):
        counts = np.bincount(firsts[:examples] // 1000, minlength=3)
        assert np.abs(counts - examples * np.array([0.5, 0.3, 0.2])).max() <= 1.5


def test_each_text_has_epochs_of_its_own():
    mixed = mixture(3, 1, count=10)
    firsts = np.concatenate([mixed.batch_at(k)["inputs"][:, 0] for k in range(20)])
    for number, epochs in ((0, 9), (1, 3)):
        own = firsts[firsts // 1000 == number] % 1000
        assert len(own) == epochs * 10
        assert (np.sort(own.reshape(epochs, 10), axis=1) == np.arange(10) * 4).all()


@pytest.mark.parametrize("options", [{}, {"masked_share": 0.5}, {"target_len": 2}])
def test_processes_read_the_rows_of_one_batch(options):
    mixed = mixture(2, 1, **options)
    whole = mixed.batch_at(5)
    for rows in (slice(0, 2), slice(2, 6)):
        part = mixed.batch_at(5, rows)
        for name in ("inputs", "targets"):
            if not options.get("masked_share"):
                assert (part[name][rows] == whole[name][rows]).all()
            assert part[name].shape == whole[name].shape


def test_facts_name_texts_and_shares():
    facts = mixture(3, 1).facts
    assert facts["source"] == "0.75 of the text, 0.25 of the text"
    assert facts["tokens"] == 802 and facts["batch"] == 6


def test_texts_that_make_no_mixture_are_refused():
    with pytest.raises(InputError, match=r"weights must be positive, got \(1, 0\)"):
        mixture(1, 0)
    with pytest.raises(InputError, match="seq_len: 4, 8"):
        Mixture(texts=(text(0), text(0, seq_len=8)), weights=(1, 1))
