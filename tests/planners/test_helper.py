"""Two processes that share the calls of a search: the answers are those of one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from planners import helper_calls
from planners.test_pipeshard import plan_of

from aliquot.planners import _helper, _search
from aliquot.planners._helper import HelperProcess


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(_helper, "num_cores", lambda: 2)


def _wait_until_ready(helper):
    """Until it has answered once."""
    shared = helper.share(helper_calls.add)
    shared.add(1, [1])
    for _ in range(600):
        if not isinstance(shared._answers[0], _helper._Nothing):
            assert shared.answers() == [2]
            return
        time.sleep(0.1)
    raise AssertionError("the second process does not answer")


@pytest.mark.parametrize("wanted", [False, True])
def test_answers_come_in_order(wanted):
    with HelperProcess(wanted=wanted) as helper:
        shared = helper.share(helper_calls.add)
        shared.add(10, range(200))
        shared.add(1000, range(3))
        assert shared.answers() == [*range(10, 210), 1000, 1001, 1002]


def test_both_processes_answer_calls_and_the_helper_ends_with_the_block():
    with HelperProcess(wanted=True) as helper:
        process = helper.process
        _wait_until_ready(helper)
        shared = helper.share(helper_calls.who)
        shared.add(None, [0.05] * 20)
        answers = shared.answers()
        assert len(set(answers)) == 2
        assert answers[0] != os.getpid() == answers[-1]
    assert process.poll() is not None


def test_progress_covers_all_calls():
    heard = []
    shared = HelperProcess(wanted=False).share(helper_calls.add)
    shared.add(1, range(3))
    assert shared.answers(lambda begun, of: heard.append((begun, of))) == [1, 2, 3]
    assert heard == [(0, 3), (1, 3), (2, 3)]


def test_the_helper_ends_when_the_block_is_interrupted():
    with pytest.raises(KeyboardInterrupt), HelperProcess(wanted=True) as helper:
        process = helper.process
        helper.share(helper_calls.who).add(None, [60.0])
        raise KeyboardInterrupt
    assert process.poll() is not None


def test_calls_do_not_wait_for_a_helper_that_is_not_ready(monkeypatch, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    with HelperProcess(wanted=True) as helper:
        shared = helper.share(helper_calls.add)
        shared.add(1, range(5))
        assert shared.answers() == [1, 2, 3, 4, 5]


def test_the_helper_ends_when_interrupted_with_unread_answers():
    with pytest.raises(KeyboardInterrupt), HelperProcess(wanted=True) as helper:
        _wait_until_ready(helper)
        helper.share(helper_calls.add).add(1, [1])
        time.sleep(0.2)
        raise KeyboardInterrupt


def test_calls_of_a_dead_helper_are_made_in_this_process():
    with HelperProcess(wanted=True) as helper:
        _wait_until_ready(helper)
        shared = helper.share(helper_calls.die_elsewhere)
        shared.add(os.getpid(), range(50))
        time.sleep(0.2)
        assert shared.answers() == list(range(50))
        shared = helper.share(helper_calls.add)
        shared.add(1, range(5))
        assert shared.answers() == [1, 2, 3, 4, 5]


def test_unread_answers_are_not_taken_for_those_of_other_calls():
    with HelperProcess(wanted=True) as helper:
        _wait_until_ready(helper)
        helper.share(helper_calls.add).add(1, range(1000))
        shared = helper.share(helper_calls.add)
        shared.add(5, range(3))
        assert shared.answers() == [5, 6, 7]


def test_calls_that_cannot_be_pickled_are_made_in_this_process():
    with HelperProcess(wanted=True) as helper:
        _wait_until_ready(helper)
        shared = helper.share(helper_calls.apply)
        shared.add(lambda number: 2 * number, [1, 2, 3])
        assert shared.answers() == [2, 4, 6]


def test_errors_are_raised_in_this_process():
    with HelperProcess(wanted=True) as helper:
        _wait_until_ready(helper)
        shared = helper.share(helper_calls.refuse)
        shared.add(None, [1, 2, 4])
        with pytest.raises(ValueError, match="1 is odd"):
            shared.answers()


def test_output_of_calls_does_not_mix_with_answers():
    with HelperProcess(wanted=True) as helper:
        _wait_until_ready(helper)
        shared = helper.share(helper_calls.say)
        shared.add(None, range(3))
        time.sleep(0.2)
        assert shared.answers() == [0, 1, 2]


def test_no_helper_is_started_on_one_core(monkeypatch):
    monkeypatch.setattr(_helper, "num_cores", lambda: 1)
    assert HelperProcess(wanted=True).process is None


def test_the_helper_does_not_import_the_main_module(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from aliquot.planners import _helper\n"
        "_helper.num_cores = lambda: 2\n"
        "print('begun')\n"
        f"sys.path.append({str(Path(helper_calls.__file__).parents[1])!r})\n"
        "from planners import helper_calls\n"
        "with _helper.HelperProcess(wanted=True) as helper:\n"
        "    shared = helper.share(helper_calls.add)\n"
        "    shared.add(1, range(3))\n"
        "    print(shared.answers())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "begun\n[1, 2, 3]\n"


def test_a_pipeline_does_not_depend_on_the_helper(monkeypatch):
    here = []

    class Ready(HelperProcess):
        def __enter__(self):
            if self.process is not None:
                _wait_until_ready(self)
            here.append(0)
            return self

    def counted(share, number):
        here[-1] += 1
        return call(share, number)

    call = _helper.SharedQueue._call
    monkeypatch.setattr(_helper.SharedQueue, "_call", counted)
    monkeypatch.setattr(_search, "HelperProcess", Ready)
    plans = []
    for fewest in (10**9, 0):
        monkeypatch.setattr(_search, "_MANY_OPS", fewest)
        plans.append(plan_of(num_stages=3, num_micro_batches=8, recompute="none"))
    assert plans[0] == plans[1]
    assert 0 < here[1] < here[0]
