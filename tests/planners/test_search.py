"""The search over families of plans: what is opened, in which order, and what is kept."""

import itertools
import math
import types
from dataclasses import dataclass, field

import pytest

from aliquot.core import CaptureError, InfeasibleError, InputError
from aliquot.planners import Decision, Interrupted, StageDecision
from aliquot.planners._search import AbstractFamily, Search


def task_on(hosts):
    cluster = types.SimpleNamespace(num_hosts=hosts)
    return types.SimpleNamespace(cluster=cluster, combine=lambda count: {"loss": "mean"})


WHOLE, HALF = task_on(4), task_on(2)


def plan_of(step_time_s, status="optimal"):
    """A plan of one program that knows its step time alone."""
    problem = types.SimpleNamespace(num_micro_batches=1)
    priced = types.SimpleNamespace(mesh=types.SimpleNamespace(shape=(8,)))
    picked = types.SimpleNamespace(priced=priced)
    return Decision(
        method="program",
        planner="",
        stages=(StageDecision(problem=problem, picked=picked),),
        step_time_s=step_time_s,
        lower_bound_s=step_time_s / 2,
        bound_holds_for="gap_within_folded_space",
        status=status,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Family(AbstractFamily):
    """Has given plans and families, or an error, and notes when it is opened."""

    name: str
    journal: list
    task: object = field(default_factory=lambda: WHOLE)
    plans: tuple = ()
    holds: tuple = ()
    error: BaseException | None = None
    lower_bound_s: float = 0.0
    expected_s: float = math.inf
    must_open: bool = False

    def open(self, search):
        self.journal.append(self.name)
        for plan in self.plans:
            search.add(plan, self.task)
        if self.error is not None:
            raise self.error
        return self.holds


def test_families_are_opened_in_the_order_of_what_they_promise():
    journal = []
    make = lambda name, expected_s, *holds: Family(  # noqa: E731
        name=name, journal=journal, expected_s=expected_s, holds=holds, plans=(plan_of(9.0),)
    )
    late = make("late", 3.0)
    found = Search(task=WHOLE).run(
        [make("middle", 2.0), make("early", 1.0, late), make("last", math.inf)], "auto"
    )
    assert journal == ["early", "middle", "late", "last"]
    assert found.method == "auto" and found.combine == {"loss": "mean"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_best_plan_does_not_depend_on_the_order(order):
    """A promise decides what is opened first and nothing else."""
    journal, times = [], (3.0, 2.0, 4.0)
    families = [
        Family(
            name=str(k),
            journal=journal,
            expected_s=float(order[k]),
            lower_bound_s=times[k] * 0.9,
            plans=(plan_of(times[k]),),
        )
        for k in range(3)
    ]
    found = Search(task=WHOLE).run(families, "auto")
    assert found.step_time_s == 2.0
    # What cannot be faster than the best so far stays closed.
    known = [times[int(name)] for name in journal]
    for k, bound_s in enumerate(0.9 * t for t in known[1:]):
        assert bound_s < min(known[: k + 1])


def test_of_families_of_which_nothing_is_known_those_on_more_hosts_come_first():
    journal = []
    fewer = Family(name="fewer", journal=journal, task=HALF)
    all_hosts = Family(name="all", journal=journal)
    Search(task=WHOLE).run([fewer, all_hosts], "auto")
    assert journal == ["all", "fewer"]


@pytest.mark.parametrize(("on_half_s", "idle"), [(0.9995, 0), (0.998, 2)])
def test_hosts_are_left_idle_only_for_a_clear_gain(on_half_s, idle):
    families = [
        Family(name="all", journal=[], plans=(plan_of(1.0),), expected_s=0.0),
        Family(name="half", journal=[], plans=(plan_of(on_half_s),), task=HALF),
    ]
    found = Search(task=WHOLE).run(families, "auto")
    assert found.idle_hosts == idle
    slower = [each for each in found.candidates if each.name.startswith("auto on")]
    assert [each.name for each in slower] == [f"auto on {4 if idle else 2} hosts"]
    assert found.bound_holds_for.endswith(" on 2 hosts") == bool(idle)


def test_a_program_that_was_paused_is_replaced_by_its_end():
    families = [
        Family(name="paused", journal=[], plans=(plan_of(2.0, "interrupted"),), expected_s=0.0),
        Family(name="finished", journal=[], plans=(plan_of(2.0),)),
    ]
    found = Search(task=WHOLE).run(families, "auto")
    assert found.status == "optimal" and found.candidates == ()
    assert (
        found.bound_holds_for
        == "plans without a pipeline in 1 micro-batch that split all repeated layers the same way"
    )


REFUSALS = [
    InfeasibleError("too large", required_bytes=2, available_bytes=1),
    InputError("not so"),
    CaptureError("not this step"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("must_open", [False, True])
def test_a_family_without_a_plan_is_no_obstacle_unless_it_was_asked_for(error, must_open):
    refused = Family(name="no", journal=[], error=error, expected_s=0.0, must_open=must_open)
    search = Search(task=WHOLE)
    families = [refused, Family(name="yes", journal=[], plans=(plan_of(1.0),))]
    if must_open and not isinstance(error, InfeasibleError):
        with pytest.raises(type(error)):
            search.run(families, "auto")
        return
    assert search.run(families, "auto").step_time_s == 1.0
    assert search.refusal_of(Family) is error
    assert Search(task=WHOLE).run([refused], "auto") is None


@pytest.mark.parametrize("plans", [(), (plan_of(1.0),)], ids=["nothing", "a plan"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted(plan_of(0.1))])
def test_ctrl_c_gives_the_best_plan_so_far(plans, stop):
    """What the search of a stage had found is no plan of the step."""
    families = [
        Family(name="first", journal=[], plans=plans, expected_s=0.0),
        Family(name="stopped", journal=[], error=stop),
    ]
    with pytest.raises(Interrupted) as caught:
        Search(task=WHOLE).run(families, "auto")
    best = caught.value.decision
    assert (best and (best.method, best.step_time_s)) == (("auto", 1.0) if plans else None)
