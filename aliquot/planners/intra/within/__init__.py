"""Restrictions of a search for pipelines, and the intra planner that keeps to them."""

from ._restricted import Restricted as Restricted
from ._within import Within as Within
