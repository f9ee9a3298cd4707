"""Kinds of numbers that name parts of a problem; those of its step are defined in `graph`."""

from __future__ import annotations

from typing import NewType

NodeId = NewType("NodeId", int)
"""Position of a node in `NodeGraph.nodes`: products and groups in program order."""

NO_NODE = NodeId(-1)
"""Stands where an array depends on no node, as scalars and constants do."""

SlotId = NewType("SlotId", int)
"""Number of a slot: one split of one class of arrays; see `Slots`."""
