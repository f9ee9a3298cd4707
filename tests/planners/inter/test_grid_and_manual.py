"""Regular grids and stages given by hand."""

from dataclasses import replace

import pytest
from planners.inter.chains import even_chain

from aliquot.core import InfeasibleError, InputError, PlanMismatchError
from aliquot.planners.inter import EqualStages, Grid, ManualStages, StageLimits


def test_a_grid_is_regular():
    plan = Grid().solve([even_chain(10, devices=4)])
    assert len({s.option for s in plan.stages}) == 1
    sizes = [s.last_unit - s.first_unit for s in plan.stages]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == 10
    assert plan.schedule == "1f1b" and plan.lower_bound_s is None and plan.gap is None


@pytest.mark.parametrize(
    ("names", "chunks", "wanted"),
    [
        # Megatron-LM's stages: as many layers each, the embedding in front, norm and head behind.
        ("embed l[0] l[1] norm loss head", 1, [(0, 2), (2, 6)]),
        ("embed table l[0] l[1] l[2] l[3] head", 1, [(0, 4), (4, 7)]),
        # A layer that is cut inside stays whole.
        ("l[0] l[0] l[0] l[1] head", 1, [(0, 3), (3, 5)]),
        ("h_0 h_1 h_2 h_3 h_4 head", 1, [(0, 2), (2, 6)]),
        ("embed l[0] l[1] l[2] norm head", 2, [(0, 2), (2, 3), (3, 6)]),
        # With too few layers, and without numbered ones, by units.
        ("embed l[0] norm head", 1, [(0, 2), (2, 4)]),
        ("stem w1 b c d x[2]", 1, [(0, 3), (3, 6)]),
    ],
)
def test_stages_have_equal_numbers_of_layers(names, chunks, wanted):
    units = tuple(names.split())
    chain = replace(even_chain(len(units), devices=2), unit_names=units)
    stages = EqualStages(data=1, tensor=1, num_submeshes=2, chunks=chunks).solve([chain]).stages
    assert [(s.first_unit, s.last_unit) for s in stages] == wanted


@pytest.mark.parametrize(
    ("stage_layers", "chunks", "wanted"),
    [((1, 3), 1, [(0, 2), (2, 6)]), ((1, 1, 2), 2, None), ((3, 2), 1, None)],
)
def test_stages_have_the_layers_that_are_given(stage_layers, chunks, wanted):
    units = tuple("embed l[0] l[1] l[2] l[3] head".split())
    chain = replace(even_chain(len(units), devices=2), unit_names=units)
    inter = EqualStages(data=1, tensor=1, num_submeshes=2, chunks=chunks, stage_layers=stage_layers)
    if sum(stage_layers) != 4:
        with pytest.raises(InputError, match="have 5 layers, and the step can be cut into 4"):
            inter.solve([chain])
        return
    stages = inter.solve([chain]).stages
    found = [(s.first_unit, s.last_unit) for s in stages]
    assert found == (wanted or [(0, 2), (2, 3), (3, 6)])


def test_a_grid_has_as_many_stages_as_are_asked_for():
    chains = [even_chain(8, devices=4, micro_batches=64)]
    for count in (1, 2, 4):
        found = Grid().solve(chains, limits=StageLimits(num_stages=count))
        assert len(found.stages) == count
    with pytest.raises(InputError, match=r"No grid has 3 stages; there are some of 1, 2, 4\."):
        Grid().solve(chains, limits=StageLimits(num_stages=3))
    with pytest.raises(InputError, match="schedule: a planner that searches"):
        Grid().check_limits(StageLimits(schedule="gpipe"))


def test_a_grid_takes_the_fastest_that_fits():
    """Splitting units over devices is a little inefficient, so without bubbles pipelines win; with
    one micro-batch not.
    """
    many, one = (Grid().solve([even_chain(8, devices=4, micro_batches=m)]) for m in (64, 1))
    assert (len(many.stages), len(one.stages)) == (4, 1)
    both = Grid().solve([even_chain(8, devices=4, micro_batches=m) for m in (1, 64)])
    assert both.num_micro_batches == 1
    # Four stages of two units keep 8 bytes of state, 1 working and up to 4 x 2 in flight.
    narrow = replace(
        even_chain(8, devices=4, micro_batches=64),
        memory_limit_bytes=16.0,
        options=_sizes_stated(4),
    )
    assert len(narrow.options) == 3
    with pytest.raises(InfeasibleError, match="The smallest, 4 stages of dp 1") as caught:
        Grid().solve([narrow])
    assert caught.value.required_bytes == 17 and sum(caught.value.parts.values()) == 17


def _sizes_stated(devices):
    """Options of which only that on one device states its degrees."""
    options = even_chain(1, devices=devices).options
    return tuple(o if o.num_devices == 1 else replace(o, dp=None) for o in options)


def test_a_grid_needs_stated_degrees():
    chain = even_chain(4, devices=2)
    with pytest.raises(InputError, match="state their degrees dp and tp"):
        Grid().solve([replace(chain, options=tuple(replace(o, tp=None) for o in chain.options))])


def test_given_stages_are_priced():
    chain = even_chain(6, devices=4)
    plan = ManualStages(boundaries=((0, 4), (4, 6)), options=("dp 2", 1)).solve([chain])
    assert [(s.first_device, s.option) for s in plan.stages] == [(0, 1), (2, 1)]
    per_unit = 3 / 2**0.9
    # An edge takes 0.01 bytes over two links of 1 byte/s.
    slow, fast = 4 * per_unit, 2 * per_unit + 2 * 0.005
    assert plan.closed_form_s == pytest.approx(slow + fast + 3 * slow + 0.4 / 2**0.9)
    assert plan.num_micro_batches == 4 and plan.step_time_s <= plan.closed_form_s


def test_given_stages_may_be_interleaved():
    chain = even_chain(8, devices=2)
    plan = ManualStages(
        boundaries=((0, 2), (2, 4), (4, 6), (6, 8)),
        options=(0,) * 4,
        schedule="interleaved-1f1b",
        num_submeshes=2,
    ).solve([chain])
    assert [s.first_device for s in plan.stages] == [0, 1, 0, 1] and plan.num_submeshes == 2
    straight = ManualStages(boundaries=((0, 4), (4, 8)), options=(0, 0)).solve([chain])
    assert plan.step_time_s < straight.step_time_s


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ({"boundaries": ((0, 4),), "options": (2,)}, ["the stages end at unit 4, the chain at 6"]),
        (
            {
                "boundaries": ((0, 2), (3, 3), (2, 7)),
                "options": (1, 0, 0),
                "first_devices": (0, 1, 4),
            },
            [
                "stage 1 has no units",
                "units 2 to 2 are in no stage before stage 1",
                "stage 2 begins at unit 2, but units before 3 are taken",
                "the stages end at unit 7, the chain at 6",
                "device 1 is used by 2 stages",
                "stage 2 on devices 4 to 4 reaches outside the cluster's 4",
            ],
        ),
        (
            {"boundaries": ((0, 3), (3, 6)), "options": (1, 0)},
            ["1 of the 4 devices are in no stage"],
        ),
        (
            {"boundaries": ((0, 6),), "options": ("dp 3",)},
            ["stage 0 has an unknown option 'dp 3': did you mean"],
        ),
        ({"boundaries": ((0, 6),), "options": (3,)}, ["there are 3, from 0 on"]),
    ],
)
def test_all_faults_at_once(given, faults):
    with pytest.raises(PlanMismatchError) as caught:
        ManualStages(**given).solve([even_chain(6, devices=4)])
    assert len(caught.value.violations) == len(faults)
    for fault in faults:
        assert fault in str(caught.value)


def test_submeshes_that_straddle_hosts_are_refused():
    chain = even_chain(6, devices=4)
    sizes = ((1, 1), (1, 2), (2, 2))
    options = tuple(replace(o, submesh=size) for o, size in zip(chain.options, sizes))
    chain = replace(chain, num_hosts=2, devices_per_host=2, options=options)
    with pytest.raises(PlanMismatchError, match="stage 1 on devices 1 to 2 straddles hosts of 2"):
        ManualStages(boundaries=((0, 2), (2, 4), (4, 6)), options=(0, 1, 0)).solve([chain])


def test_given_stages_that_do_not_fit_are_reported():
    chain = replace(even_chain(6, devices=2), memory_limit_bytes=18.0)
    with pytest.raises(InfeasibleError, match="do not fit") as caught:
        ManualStages(boundaries=((0, 3), (3, 6)), options=(0, 0)).solve([chain])
    assert "stage 0 needs 19 B of 18 B" in str(caught.value) and "stage 1" not in str(caught.value)
    assert (caught.value.required_bytes, caught.value.available_bytes) == (19, 18)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "1f2b"}, "did you mean '1f1b'"),
        ({"options": (0,)}, "2 stages have 1 options"),
        ({"first_devices": (0,)}, "2 stages have 1 first devices"),
        ({"num_submeshes": 1}, "try interleaved-1f1b"),
        ({"num_submeshes": 0, "schedule": "interleaved-1f1b"}, "there is at least 1"),
    ],
)
def test_wrong_settings(wrong, message):
    with pytest.raises(PlanMismatchError, match=message):
        ManualStages(**{"boundaries": ((0, 3), (3, 6)), "options": (0, 0), **wrong})


def test_a_number_of_micro_batches_without_a_chain_is_refused():
    with pytest.raises(InputError, match="there are chains for 4"):
        ManualStages(boundaries=((0, 6),), options=(0,), num_micro_batches=3).solve(
            [even_chain(6, devices=1)]
        )
