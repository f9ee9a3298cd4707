"""Options and progress of the verbs that measure."""

from __future__ import annotations

import jax
import pytest
from command_line import refused, run

from aliquot.cli import _measuring
from aliquot.cli._session import Session
from aliquot.profiling import ProfileRun, Timing

TINY = (
    "gpt-10m --global-batch 8 --set num_layers=1 --set hidden_size=32 --set num_heads=4 --seq-len"
    " 16 --devices 4".split()
)
OPTIONS = (
    "--warm-up 3 --repeats 4 --most-repeats 9 --least-s 0.5 --retries 2 --noisy 0.1 --budget-s 7"
).split()


@pytest.fixture(autouse=True, scope="module")
def eight_devices():
    """Start JAX, or a command that asks for fewer devices would, for all later tests."""
    assert len(jax.devices()) == 8


@pytest.mark.parametrize(
    ("verb", "measures", "more", "stops_at"),
    [
        ("profile run", "profile_operators", [], 1.5),
        ("blocks profile", "profile_segments", ["--early-stop", "2"], 2.0),
    ],
)
def test_options_say_how_often_programs_run(tmp_path, monkeypatch, verb, measures, more, stops_at):
    asked = []

    def note(what, database, *more, **options):
        asked.append(options)
        return ProfileRun(
            num_programs=3,
            num_measured=1,
            num_known=1,
            seconds=2.0,
            failures=("p failed: no link",),
        )

    monkeypatch.setattr(f"aliquot.profiling.{measures}", note)
    found = run(*verb.split(), *TINY, "--database", tmp_path / "p.sqlite", *OPTIONS, *more)
    assert found.exit_code == 0, found.output
    (options,) = asked
    assert options["budget_s"] == 7 and options["share"] == (1, 1)
    assert options["timing"] == Timing(
        warm_up=3, repeats=4, most_repeats=9, least_s=0.5, retries=2, noisy=0.1, early_stop=stops_at
    )
    assert (
        "1 of them failed, and are tried again by the next run:\n  p failed: no link"
        in found.stdout
    )
    assert (
        "1 measured in 2.0 s, 1 known before, 1 missing." in found.stdout
        and "Run the same command again to go on." in found.stdout
    )


@pytest.mark.parametrize("verb", ["profile run", "blocks profile"])
def test_more_repetitions_than_there_may_be_are_refused(tmp_path, verb):
    here = [*verb.split(), *TINY, "--database", tmp_path / "p.sqlite"]
    refused(
        run(*here, "--repeats", "9", "--most-repeats", "5"),
        "--repeats 9",
        "Give --most-repeats 9 or more",
    )
    assert not (tmp_path / "p.sqlite").exists()


def test_progress_says_what_is_left_and_how_long_it_takes(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(_measuring.time, "monotonic", lambda: now_s[0])
    say, lines = Session(as_json=False), []
    with _measuring.measuring_progress(say) as report:
        report("measuring programs", 10, 40)
        for done in range(11, 21):
            now_s[0] += 6.0
            report(f"measured {done}", done, 40)
            lines.append(say.voice.doing)
    assert lines[2] == "measuring (13 of 40 programs known, 27 left, about 3 min: measured 13)"
    assert lines[-2] == "measuring (19 of 40 programs known, 21 left, about 2 min: measured 19)"
    assert _measuring._Left().text(0, 5) == "5 left"
    left = _measuring._Left()
    assert (left.text(0, 3), left.text(0, 3)) == ("3 left", "3 left")
    now_s[0] += 10
    assert left.text(1, 3) == "2 left, about 20 s"
