"""Pictures of the benchmark of Aceso."""

from types import SimpleNamespace

from aliquot.suites._aceso import _draw_family


def test_times_of_searches_are_drawn_on_a_logarithmic_axis():
    is_logarithmic, rows = {}, {}

    def bars(name, title, unit, groups, series, logarithmic=False):
        is_logarithmic[name] = logarithmic
        rows[name] = series

    results = SimpleNamespace(bars=bars, table=lambda *_: None)
    published = SimpleNamespace(table=lambda name: {"aceso": {"1_3B": 1.5}})
    found = {"1_3B": {"megatron_ms": 3.0, "iteration_time_ms": 2.0, "search_s": 7.0}}
    _draw_family(results, published, "gpt", found)
    assert is_logarithmic == {"figure7_gpt": False, "figure8_gpt": True}
    assert [[*series.values()][-1] for series in rows.values()] == [[1.5], [7.0]]
