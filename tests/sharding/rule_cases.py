"""The table that every rule must stand in: small calls that produce each primitive.

Dims that may be split have at least 8 elements where it matters, so that they divide on the 4x2
mesh of the tests.
"""

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
