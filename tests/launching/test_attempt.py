"""What is passed on of processes, and which of them failed, without any process."""

import threading
from signal import SIGINT

import pytest

from aliquot.launching import _attempt
from aliquot.launching._engine import Ending, News


class Said:
    """Stands for a process that says these news, one after another."""

    place = "here"

    def __init__(self, *lines, code=0):
        self._news = [News(lines=((False, line),)) for line in lines]
        self._news.append(News(ending=Ending.of(code)))
        self.killed = False

    def news(self):
        return self._news.pop(0)

    def send(self, number):
        raise AssertionError(number)

    def kill(self):
        self.killed = True


def followed(*processes, logs=None):
    """The failure and all lines; in time, as what is not heard would be waited for for ever."""
    shown, signals = [], []
    timer = threading.Timer(20, signals.extend, [[SIGINT, SIGINT]])
    timer.start()
    failure = _attempt.follow(processes, lambda *line: shown.append(line), logs, signals, SIGINT)
    timer.cancel()
    assert not signals
    return failure, shown


def test_all_lines_are_shown_and_kept(tmp_path):
    processes = Said("one", "two"), Said("three")
    failure, shown = followed(*processes, logs=tmp_path / "logs")
    assert failure is None and all(process.killed for process in processes)
    assert [line for line in shown if line[0] == 0] == [(0, False, "one"), (0, False, "two")]
    assert (1, False, "three") in shown and len(shown) == 3
    assert (tmp_path / "logs" / "process-0.log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("codes", [(3, 7), (7, 3)])
def test_the_cause_is_who_did_not_end_because_of_another(codes):
    failure, _ = followed(*(Said(f"last words of {code}", code=code) for code in codes))
    assert (failure.process, failure.ending.code) == (codes.index(7), 7)
    assert "ended with exit code 7" in str(failure) and "last words of 7" in str(failure)
