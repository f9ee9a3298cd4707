"""The table that every rule must stand in: small calls that produce each primitive.

Dims that may be split have at least 8 elements where it matters, so that they divide on the 4x2
mesh of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sharding import (
    rule_cases_algebra,
    rule_cases_elementwise,
    rule_cases_products,
    rule_cases_shapes,
    rule_cases_whole,
)
from sharding.rule_case import Case

RULE_CASES: list[Case] = [
    *rule_cases_elementwise.CASES,
    *rule_cases_products.CASES,
    *rule_cases_algebra.CASES,
    *rule_cases_shapes.CASES,
    *rule_cases_whole.CASES,
]


def one_of_each(cases: Sequence[Case]) -> list[Any]:
    """Cases as parameters of a test, of which all but the first of each primitive are slow."""
    first = {case.primitive: case for case in reversed(cases)}
    return [
        pytest.param(case, marks=() if first[case.primitive] is case else pytest.mark.slow)
        for case in cases
    ]
