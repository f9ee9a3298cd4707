"""The example in the documentation of how to add a rule works as it stands there."""

import re
from pathlib import Path

import numpy as np
import pytest
from sharding.rule_case import Case, floats
from sharding.splitting import assert_same, collectives, operators, splits

from aliquot.graph import _jax_compat as compat
from aliquot.graph import _rule

PAGE = Path(__file__).parents[2] / "docs" / "add-a-rule.md"


@pytest.fixture
def example(monkeypatch):
    """What the page's code defines; the table of rules is restored afterwards."""
    monkeypatch.setattr(_rule, "_declarations", dict(_rule._declarations))
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(code, names)
    return names


def test_the_example_splits_as_it_says(example, mesh):
    grid = mesh(4, 2)
    case = Case(primitive="row_norm", fn=example["row_norm_p"].bind, args=(floats(8, 4), floats(4)))
    ((op, rule, operands),) = operators(case)
    cuts = splits(op, rule, operands)
    assert [s.parts for s in cuts] == [{"x": "a"}, {"x": "a", "y": "a"}]
    assert collectives(cuts, grid) == set()
    want = compat.bind(op.eqn, operands)
    np.testing.assert_allclose(want[0], example["row_norm"](*operands), rtol=1e-6)
    for split in cuts:
        assert_same(split.by_hand(grid)(*operands), want, case, split)
