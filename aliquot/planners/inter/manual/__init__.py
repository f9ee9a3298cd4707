"""Stages as a user gives them."""

from ._manual import ManualStages as ManualStages
