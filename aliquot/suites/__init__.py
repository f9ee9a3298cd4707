"""Suites of benchmarks as tables of cases, the plans that they give, and rows of results."""

from ._make_row import Timing as Timing
from ._make_row import failed_row as failed_row
from ._make_row import measured_row as measured_row
from ._make_row import predicted_row as predicted_row
from ._operations import operations as operations
from ._plan_case import build_case as build_case
from ._plan_case import part_of as part_of
from ._plan_case import plan_given as plan_given
from ._plan_case import plan_ours as plan_ours
from ._plan_case import stage_bounds as stage_bounds
from ._rows import GIVEN as GIVEN
from ._rows import HEADINGS as HEADINGS
from ._rows import OURS as OURS
from ._rows import Row as Row
from ._rows import as_tsv as as_tsv
from ._rows import shown_columns as shown_columns
from ._rows import throughput_series as throughput_series
from ._small import small_case as small_case
from ._suite import Case as Case
from ._suite import GivenStage as GivenStage
from ._suite import Suite as Suite
from ._suite import alpa_suites as alpa_suites
from ._suite import find_cases as find_cases
from ._suite import find_suite as find_suite
from ._suite import load_suites as load_suites
from ._suite import parse_suites as parse_suites
