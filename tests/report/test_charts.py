"""Charts of measurements: plain numbers on their axes, and one colour for one name."""

from aliquot.report import _charts, draw_profiles


def test_axes_have_numbers_of_their_unit_and_names_one_colour(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(_charts, "_finish", lambda figure, axes, path: drawn.append(axes))
    slow, fast = {1.0: 0.2, 64.0: 0.5}, {1.0: 2.0, 64.0: 50.0}
    curve = {"horizontal": "bytes", "unit": "GB/s"}
    draw_profiles(
        [
            {**curve, "file": "a", "title": "A", "series": {"all-gather": slow, "copy": fast}},
            {**curve, "file": "b", "title": "B", "series": {"copy": fast}},
        ],
        tmp_path,
    )
    assert drawn[0].yaxis.get_major_formatter()(0.2) == "0.2"
    copies = [
        line.get_color() for axes in drawn for line in axes.lines if line.get_label() == "copy"
    ]
    others = [line.get_color() for line in drawn[0].lines if line.get_label() != "copy"]
    assert len(set(copies)) == 1 and len(copies) == 2 and others != copies[:1]
