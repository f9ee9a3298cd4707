"""A command that takes long says what it is doing, off a terminal, too."""

import time

from command_line import run

from aliquot.cli import _voice
from aliquot.cli._progress import compiling_progress, search_progress, training_progress
from aliquot.cli._session import session


def spoken_lines(monkeypatch, capsys, work, first_s=0.05):
    monkeypatch.setattr(_voice, "FIRST_S", first_s)
    monkeypatch.setattr(_voice, "EVERY_S", 0.1)
    monkeypatch.setattr(_voice, "_TICK_S", 0.01)
    with session() as say:
        work(say)
    return capsys.readouterr().err.splitlines()


def test_what_takes_long_is_said_again_and_again(monkeypatch, capsys):
    def work(say):
        say.voice.doing = "building gpt"
        time.sleep(0.4)

    lines = spoken_lines(monkeypatch, capsys, work)
    assert len(lines) >= 2 and all(line.startswith("building gpt ... ") for line in lines)
    assert lines[0].endswith(" s")


def test_what_is_quick_is_not_said(monkeypatch, capsys):
    def work(say):
        for what in ("a", "b", "c"):
            say.voice.doing = what

    assert spoken_lines(monkeypatch, capsys, work, first_s=5.0) == []


def test_nothing_is_said_while_something_else_shows_what_is_going_on(monkeypatch, capsys):
    def work(say):
        with say.voice.quiet():
            time.sleep(0.3)

    assert spoken_lines(monkeypatch, capsys, work) == []


def test_it_speaks_again_after_that(monkeypatch, capsys):
    def work(say):
        say.voice.doing = "building gpt"
        with say.voice.quiet():
            pass
        time.sleep(0.3)

    assert spoken_lines(monkeypatch, capsys, work)


def test_searching_compiling_and_training_have_lines(monkeypatch, capsys):
    def work(say):
        with search_progress(say) as report:
            report("shard on 4x2, best so far 1.20 s a step", 3, 9)
            time.sleep(0.2)
        with compiling_progress(say) as tell:
            tell("compiling for H100 (1 s)")
            time.sleep(0.2)
        with training_progress("gpt", 4, say) as show:
            show(0, 0.0, 0.0)
            time.sleep(0.2)

    text = "\n".join(spoken_lines(monkeypatch, capsys, work))
    assert "searching (at shard on 4x2, best so far 1.20 s a step, 3 of 9) ... " in text
    assert "compiling for H100 ... " in text
    assert "gpt: compiling the step ... " in text


def test_a_command_that_plans_says_so(monkeypatch):
    monkeypatch.setattr(_voice, "FIRST_S", 0.0)
    monkeypatch.setattr(_voice, "EVERY_S", 0.02)
    monkeypatch.setattr(_voice, "_TICK_S", 0.01)
    found = run(
        *"plan gpt-125m --cluster 2xH100 --global-batch 2 --set num_layers=1".split(),
        *"--method zero3 --attention plain --recompute none".split(),
    )
    assert found.exit_code == 0
    assert "searching (at " in found.stderr or "tracing the step ... " in found.stderr
