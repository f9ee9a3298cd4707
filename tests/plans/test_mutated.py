"""Whatever a plan file says, it is read as a valid plan or refused in a few lines, soon, and runs
nothing.
"""

import json
import random
import sys
import time
from pathlib import Path

import pytest
from mutated_plans import CANARY, mutated
from sample_plans import sample_pipeline, sample_plan

from aliquot.cli._explain import priced_alternatives
from aliquot.cli._session import Session
from aliquot.core import AliquotError
from aliquot.plans import Plan, chrome_trace, diff, violations
from aliquot.report import as_text, difference, explained, explanation, planned_trace

HERE = Path(__file__).parent
LONGEST_S = 10.0


@pytest.fixture(scope="module")
def originals():
    """Valid plan files: one program and pipelines."""
    own = [
        sample_plan(),
        sample_pipeline(4),
        sample_pipeline(16, 8),
        sample_pipeline(4, num_submeshes=4, layers="4"),
    ]
    return [
        *(plan.to_json() for plan in own),
        *(path.read_text() for path in sorted(HERE.glob("golden*.json"))),
    ]


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A module that leaves a mark if anything imports it."""
    (tmp_path / f"{CANARY}.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ran"


def read(text, original):
    """All that reads plans without running them. Returns whether the plan was taken."""
    plan = Plan.from_json(text)
    assert violations(plan) == []
    assert Plan.from_json(plan.to_json()) == plan
    str(plan)
    plan.partition_specs()
    as_text(explanation(plan))
    json.dumps(explained(plan))
    for found in (diff(plan, original), diff(original, plan)):
        as_text(difference(found, "a", "b"))
        json.dumps(found.to_dict())
    if plan.schedule != "none":
        json.dumps(chrome_trace(planned_trace(plan)))
    if plan.model != original.model:
        priced_alternatives(plan, Session(as_json=True))


@pytest.mark.parametrize(
    "seeds",
    [range(200), pytest.param(range(200, 2000), marks=pytest.mark.slow)],
    ids=["200", "the other 1800"],
)
def test_mutated_plans_are_read_or_refused(seeds, originals, canary):
    taken = 0
    for seed in seeds:
        text = originals[seed % len(originals)]
        changed, started = mutated(text, random.Random(seed)), time.process_time()
        try:
            read(changed, Plan.from_json(text))
            taken += 1
        except AliquotError as error:
            said = str(error)
            assert len(said.splitlines()) <= 12, f"seed {seed}: {said}"
            assert max(map(len, said.splitlines())) <= 1000, f"seed {seed}: {said}"
            assert all(c.isprintable() or c == "\n" for c in said), f"seed {seed}: {said!r}"
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        assert time.process_time() - started < LONGEST_S, f"seed {seed}"
    assert len(seeds) / 50 < taken < len(seeds) / 2
    assert not canary.exists() and CANARY not in sys.modules
