"""How often a step is analysed for micro-batches."""

from aliquot.sharding.micro_batches import _micro_batches


def record_analyses(monkeypatch):
    """A list that gets the number of parts of each analysis from now on."""
    analysed, of_parts = [], _micro_batches._analysed

    def recorded(graph, parts, groups, on_missing_rule):
        analysed.append(parts)
        return of_parts(graph, parts, groups, on_missing_rule)

    monkeypatch.setattr(_micro_batches, "_analysed", recorded)
    return analysed
