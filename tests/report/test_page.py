"""The page of a plan: well-formed, complete, and free of anything from elsewhere."""

import base64
import json
import re
from html import unescape
from xml.etree import ElementTree

import pytest
from command_line import run
from msgspec.structs import replace
from planners.small_steps import mlp
from sample_plans import PREDICTION, sample_pipeline, sample_plan

import aliquot as aq
from aliquot.cluster import Cluster, HostPrice, ReportedSteps
from aliquot.cluster import _reported as reported
from aliquot.core import format_seconds
from aliquot.report import (
    Candidate,
    Comparison,
    as_text,
    compare_page,
    comparison_table,
    page,
    planned_trace,
)
from aliquot.report._asked import command_of
from aliquot.report._drawings import _spaced, areas, round_ticks, time_marks
from aliquot.report._page import table

SLOWER = replace(PREDICTION, step_time_s=0.014, communication_s=0.006, hidden_s=0.003)
COMPARISON = Comparison(
    model="gpt-10m",
    candidates=(
        Candidate(method="auto", cluster="8xH100", plan=sample_plan()),
        Candidate(method="<fsdp>", cluster="8xH100", plan=sample_plan(prediction=SLOWER)),
        Candidate(method="ddp", cluster="8xH100", refusal="too large", required_bytes=2.0**40),
    ),
    prices=(HostPrice(device="H100", devices_per_host=8, price_per_hour=36.0, currency="USD"),),
    prices_from="mine.csv",
)


@pytest.mark.parametrize("plan", [sample_plan(), sample_pipeline()], ids=["program", "pipeline"])
def test_page_is_whole_and_stands_alone(plan):
    text = page(plan)
    body = ElementTree.fromstring(text[text.index("<body>") : text.index("</html>")])
    titles = [heading.text for heading in body.iter("h2")]
    assert any(title.startswith("Memory on each device") for title in titles)
    assert ("Stages (predicted)" in titles) == (len(plan.stages) > 1)
    # Besides the name of SVG, the one address is that of a program which opens the schedule.
    alone = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    alone = alone.replace('<a href="https://ui.perfetto.dev">', "")
    assert not any(word in alone for word in ("http:", "https:", "<script", "src=", "@import"))
    assert ("Save the schedule" in text) == (len(plan.stages) > 1)
    assert len(list(body.iter("svg"))) >= 2


def test_tasks_of_a_schedule_say_how_long_they_take():
    plan = sample_pipeline()
    text = unescape(page(plan))
    events = [event for event in planned_trace(plan).events if event.lane == "compute"]
    assert len(events) > 4
    for event in events:
        assert f", stage {event.stage}: {format_seconds(event.end_s - event.start_s)}" in text


def test_texts_of_a_plan_file_are_escaped_in_html():
    assert "<img" not in page(sample_plan(notes=("<img onerror=1>",)))


def test_explain_writes_the_page(tmp_path):
    sample_plan().save(tmp_path / "plan.json")
    found = run(
        "explain", tmp_path / "plan.json", "--no-alternatives", "--html", tmp_path / "page.html"
    )
    assert found.exit_code == 0 and "The page is in" in found.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_memory_of_a_program_and_of_a_pipeline_is_drawn_over_the_step():
    plan = aq.plan(*mlp((64, 128, 64), 32), cluster=Cluster.preset("8xH100"))
    assert "Memory over the course of a step (predicted)" in page(plan)
    assert "Memory over the course of a step of stage 0, the fullest" in page(sample_pipeline())
    assert "Memory over the course" not in page(sample_plan())


def test_a_limit_far_above_is_written_down():
    def drawn(limit):
        return areas(
            (0.0, 1.0),
            {"parameters": (1.0, 2.0)},
            limit=(limit, "limit"),
            format_value=str,
            marks=(),
            label="memory",
        )

    assert 'class="limit"' in drawn(4.0) and "above the picture" not in drawn(4.0)
    assert 'class="limit"' not in drawn(40.0) and "above the picture" in drawn(40.0)


def test_a_long_schedule_is_drawn_from_its_beginning():
    text = page(sample_pipeline(4, num_micro_batches=4000))
    assert "The beginning of a step of" in text and len(text) < 1_000_000


def test_a_page_begins_with_what_most_readers_look_for():
    text = page(sample_plan(), date="2026-11-28")
    said = " ".join(unescape(re.sub("<[^>]*>", " ", text[text.index("<h1>") :])).split())
    assert said.startswith("gpt-10m on 8xH100, by method shard Combine 4-way sharding")
    assert (
        "11.0 ms a step, 2.9 of 9.8 KiB on each GPU, expected error 9% (one step compared). Asked"
        in said
    )
    asked = said.partition("Asked")[2].partition("Memory on each device, to the limit")[0]
    for part in ("batch 8 sequences of 16 tokens", "cluster 8xH100 (8 devices)", "2026-11-28"):
        assert part in asked
    assert asked.endswith(
        "version aliquot 0.1.0 aliquot plan gpt-10m --cluster 8xH100 --global-batch 8 --method"
        " shard --micro-batches 2 "
    )
    assert 'name="viewport"' in text


def test_the_command_of_a_page_makes_the_same_plan(tmp_path):
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    args = "plan gpt-10m --cluster 2xH100 --global-batch 8 --set num_layers=1 --dtype float32"
    found = run(*args.split(), "--method", "zero3", "--scan", "--out", first)
    assert found.exit_code == 0, found.stderr
    command = command_of(aq.Plan.load(first))
    assert run(*command.split()[1:], "--out", again).exit_code == 0
    assert aq.Plan.load(again).decisions() == aq.Plan.load(first).decisions()


def test_schedules_can_be_saved_from_the_page():
    data = re.search(r'href="data:application/json;base64,([^"]+)"', page(sample_pipeline()))
    assert json.loads(base64.b64decode(data[1]))["traceEvents"]


def test_candidates_are_points_with_their_errors():
    text = compare_page(COMPARISON)
    assert text.count("<circle") == 2 and text.count('class="error"') == 2
    # Rows of the table have the numbers of their points.
    numbered = re.findall(r'<td[^>]*data-label="number">(\d*)<', text)
    assert numbered == ["1", "2", ""]
    unknown = sample_plan(cluster=Cluster.preset("8xMI300X").to_dict())
    other = Candidate(method="auto", cluster="8xMI300X", plan=unknown)
    both = compare_page(Comparison(model="m", candidates=(COMPARISON.candidates[0], other)))
    assert both.count('class="error"') == 1 and "known by its data sheet alone" in both


def test_labels_of_an_axis_never_meet():
    marks = [(k / 10, f"{k * 100}.0 ms") for k in range(11)]
    kept = _spaced(marks, 700.0, 16)
    assert kept[-1] == marks[-1] and 3 <= len(kept) < len(marks)
    places = [16 + 700 * place for place, _ in kept[:-1]]
    assert all(b - a >= 12 * len("100.0 ms") for a, b in zip(places, places[1:]))
    # The last one ends at the right edge, 108 to the left of which others must end.
    assert [place for place, _ in _spaced(marks, 828.0, 16)][-2:] == [0.7, 1.0]


def test_paths_may_be_broken_and_words_and_numbers_never():
    cells = table((), [["state.params.layers[*].w"], ["recomputation 9.0 ms <b>"]])
    assert ">state.<wbr/>params.<wbr/>layers[*].<wbr/>w<" in cells
    assert ">recomputation 9.0 ms &lt;b&gt;<" in cells
    assert "overflow-wrap:anywhere" not in page(sample_plan())


def test_ticks_are_round():
    for top in (0.0123, 0.9, 7.3, 61.0):
        ticks = round_ticks(top)
        assert 4 <= len(ticks) <= 11 and ticks[0] == 0.0 and ticks[-1] <= top
        assert all(float(f"{tick:.1g}") == pytest.approx(tick) or tick > 9 for tick in ticks[:3])
    assert round_ticks(3 * 2**30, binary=True) == [0.0, 2**30, 2 * 2**30, 3 * 2**30]
    assert [text for _, text in time_marks(0.0335)] == ["0 s", "10.0 ms", "20.0 ms", "33.5 ms"]


@pytest.fixture
def record(monkeypatch):
    """Two reported steps on H100."""
    found = ReportedSteps(
        framework="MaxText", reason="", device="H100", kind="data, FSDP", errors=(-0.08, 0.12)
    )
    monkeypatch.setattr(reported, "_record", lambda: (found,))


@pytest.mark.usefixtures("record")
def test_a_comparison_is_one_page_with_time_memory_money_and_a_recommendation():
    text = compare_page(COMPARISON)
    body = ElementTree.fromstring(text[text.index("<body>") : text.index("</html>")])
    said = " ".join("".join(body.itertext()).split())
    assert "Take auto: 11.0 ms a step (predicted)." in said
    assert "<fsdp> is next, 27.3% slower: beyond that error." in said
    assert "2 steps of MaxText on H100: median 10%, worst 12%" in said and "mine.csv" in said
    # Eight sequences of 128 tokens in 11 ms, on a host of 36 USD an hour.
    tokens = aq.plans.tokens_per_step(sample_plan())
    cost = 36 * 0.011 / 3600 / (tokens / 1e9)
    assert COMPARISON.cost(COMPARISON.candidates[0]) == pytest.approx(cost)
    # Of two hosts one is idle, and paid for.
    assert COMPARISON.cost(
        Candidate(method="auto", cluster="2x8xH100", plan=sample_plan(idle_hosts=1))
    ) == pytest.approx(2 * cost)
    assert f"It is the cheapest, too: {cost:.3g} USD/1B tokens." in said
    assert "does not fit" in said and "1.0 TiB" in said and "too large" in said
    assert not any(word in text for word in ("http:", "https:", "<script", "<fsdp>"))
    assert "Asked" in text and "aliquot compare gpt-10m --cluster 8xH100 --global-batch 8" in text
    nothing = Comparison(model="m", candidates=COMPARISON.candidates[2:])
    assert "No candidate fits." in compare_page(nothing)


@pytest.mark.usefixtures("record")
def test_a_lead_within_the_error_is_said_to_be_no_lead():
    near = replace(PREDICTION, step_time_s=PREDICTION.step_time_s * 1.02)
    second = Candidate(method="fsdp", cluster="8xH100", plan=sample_plan(prediction=near))
    two = Comparison(model="m", candidates=(COMPARISON.candidates[0], second))
    assert "fsdp is next, 2.0% slower: within that error, so measure both" in compare_page(two)


def test_candidates_as_fast_as_the_fastest_are_not_ranked():
    near = replace(PREDICTION, step_time_s=PREDICTION.step_time_s * 1.001)
    second = Candidate(method="ddp", cluster="8xH100", plan=sample_plan(prediction=near))
    best, third = COMPARISON.candidates[:2]
    said = compare_page(Comparison(model="m", candidates=(best, second, third)))
    assert "As fast within 0.2%: ddp; any of these will do." in said
    assert "ddp is next" not in said and "fsdp&gt; is next" in said
    assert "as fast as the fastest, within 0.2%" in said


def test_colours_are_told_for_dark_and_light():
    assert "prefers-color-scheme:dark" in page(sample_plan())


def test_a_lead_over_a_candidate_of_unknown_error_is_no_lead():
    unknown = sample_plan(
        cluster=Cluster.preset("8xMI300X").to_dict(), prediction=replace(PREDICTION, step_time_s=9)
    )
    second = Candidate(method="auto", cluster="8xMI300X", plan=unknown)
    two = Comparison(model="m", candidates=(COMPARISON.candidates[0], second))
    assert "how far predictions are off here is not known, so measure both" in compare_page(two)


def test_few_reported_steps_have_no_percentile():
    told = {"framework": "MaxText", "reason": "", "device": "H100", "kind": "pipeline"}
    few = ReportedSteps(errors=(-0.07, 0.02, 0.05), **told)
    assert "90th" not in str(few) and "3 steps of MaxText" in str(few)
    assert "90th percentile" in str(ReportedSteps(errors=(-0.05, *[0.05] * 11), **told))


def test_a_host_without_a_price_is_said_to_have_none():
    other = sample_plan(cluster=Cluster.preset("8xB200").to_dict())
    second = Candidate(method="auto", cluster="8xB200", plan=other)
    two = Comparison(
        model="m", candidates=(COMPARISON.candidates[0], second), prices=COMPARISON.prices
    )
    assert compare_page(two).count(">no price<") == 1
    assert as_text(comparison_table(two), width=160).count("no price") == 1
