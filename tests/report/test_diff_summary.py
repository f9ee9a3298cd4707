"""Two plans side by side on one screen."""

import msgspec
from sample_plans import sample_pipeline, sample_plan

from aliquot.core import format_bytes, format_seconds
from aliquot.plans import diff, idle_parts
from aliquot.report import as_text, summarised, summarised_as_markdown

replace = msgspec.structs.replace


def shown(before, after, width=120):
    return as_text(
        summarised(before, after, diff(before, after), ("a.json", "b.json")), width=width
    )


def rows(text):
    return {line[1:].split("  ")[0].strip(): line for line in text.splitlines() if "  " in line}


def test_two_methods_fit_on_a_screen_with_the_figures_of_the_plans():
    before = sample_plan()
    after = sample_pipeline(interface_fingerprint=before.interface_fingerprint)
    text = shown(before, after)
    assert len(text.splitlines()) <= 40 and "two different models" not in text
    found = rows(text)
    assert found["method"].split() == ["method", "shard", "pipeshard"]
    assert found["stages"].split("  ")[-1].strip() == "4, 1f1b"
    assert found["step time"].split()[2:] == ["11.0", "ms", "21.5", "ms", "+95%"]
    assert format_seconds(idle_parts(after)[1]) in found["bubble of the busiest stage"]
    p = after.prediction
    moved_s = format_seconds(p.communication_s + p.gradient_s)
    assert found["exposed communication"].split()[-3:-1] == moved_s.split()
    # Of stages, only what is exposed is known.
    assert "all communication" not in found
    assert "all communication" in rows(shown(before, replace(before, method="auto")))
    assert text.startswith(
        "a.json is faster: 11.0 ms a step, not 21.5 ms (-49%); memory on each device 2.9 KiB, not "
    )
    assert "--all lists every term" in text


def test_two_models_are_said_to_be_that():
    model = replace(sample_plan().model, name="gpt-1b", settings={"hidden_size": 2048})
    text = shown(sample_plan(), sample_plan(model=model, interface_fingerprint="0" * 64))
    assert text.startswith("These are plans for two different models or batches: a.json gpt-10m")
    assert "b.json gpt-1b, batch 8, hidden_size=2048" in " ".join(text.split())


def test_another_recomputation_is_the_same_model():
    plan = sample_plan()
    model = replace(plan.model, settings={**plan.model.settings, "recompute": "block"})
    text = shown(plan, replace(plan, model=model))
    assert "two different models" not in text


def test_equal_plans_are_said_to_be_equal():
    assert shown(sample_plan(), sample_plan()) == "a.json and b.json decide and predict the same."


def test_parts_of_the_memory_are_summed_as_a_pipeline_keeps_them():
    before = sample_plan()
    after = sample_pipeline(interface_fingerprint=before.interface_fingerprint)
    found = rows(shown(before, after))
    state = found["parameters, gradients and optimizer state"]
    p = before.prediction.memory_bytes
    kept = sum(p.get(name, 0.0) for name in ("parameters", "gradients", "optimizer state"))
    assert kept and format_bytes(kept) in state and "none" not in state
    assert "parameters" not in found and "optimizer state" not in found
    assert "parameters" in rows(shown(before, replace(before, method="auto")))


def test_only_what_is_split_differently_is_counted():
    other = replace(sample_plan(), method="auto")
    assert "Nothing is split differently; --all" in shown(sample_plan(), other)


def test_markdown_has_the_same_rows():
    before = sample_plan()
    after = sample_pipeline(interface_fingerprint=before.interface_fingerprint)
    text = summarised_as_markdown(before, after, diff(before, after), ("a_1.json", "b.json"))
    lines = text.splitlines()
    assert lines[0].startswith("**a\\_1.json is faster: 11.0 ms a step") and lines[0].endswith("**")
    assert "| what | a\\_1.json | b.json | change |" in lines
    assert "| step time | 11.0 ms | 21.5 ms | +95% |" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert all(line.count("|") - line.count("\\|") in (4, 5) for line in tables)
    same = summarised_as_markdown(before, before, diff(before, before), ("a", "b"))
    assert same == "a and b decide and predict the same."
