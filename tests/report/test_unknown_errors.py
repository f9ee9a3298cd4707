"""How far predictions are off is said of every device of the catalogue from its own steps, or the
steps are named, or it is called unknown; wherever it is said.
"""

import pytest
from sample_plans import sample_plan

from aliquot.cluster import DEVICES, Cluster, reported_steps, same_chip
from aliquot.plans import (
    DATA_SHEET_ALONE,
    UNKNOWN_ERROR,
    expected_error,
    said_error,
    spoken,
    step_time_range_s,
)
from aliquot.report import (
    Candidate,
    ClusterOption,
    Comparison,
    Sizing,
    as_text,
    compare_page,
    comparison_table,
    explanation,
)


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_an_error_is_of_the_device_or_named_or_unknown(device):
    plan = sample_plan(cluster=Cluster.preset(f"8x{device}").to_dict())
    of_jax = [steps for steps in expected_error(plan) if steps.is_jax]
    is_own = of_jax and all(same_chip(name, device) for name in of_jax[0].device.split(", "))
    said = said_error(plan)
    candidate = Candidate(method="auto", cluster=f"8x{device}", plan=plan)
    comparison = Comparison(model="m", candidates=(candidate,))
    option = ClusterOption(
        cluster=f"1x8x{device}", num_hosts=1, devices_per_host=8, plan=plan, training_s=1.0
    )
    sizing = Sizing(model="m", tokens=1.0, by_s=9.0, global_batch=8, options=(option,))
    texts = [
        spoken(plan)[2],
        as_text(explanation(plan), width=160),
        as_text(comparison_table(comparison), width=160),
        str(sizing),
    ]
    if step_time_range_s(plan):
        # A range of step times, and where it comes from, in place of an error.
        assert said == DATA_SHEET_ALONE
        assert said in texts[0] and all("data sheet" in text for text in texts[1:])
    elif not of_jax:
        # Steps of other frameworks are told with their reasons, and are no error of ours.
        told = bool(expected_error(plan))
        assert (said == UNKNOWN_ERROR) is not told
        assert all("not known" in text or (told and "than predicted" in text) for text in texts)
        assert "expected error 9%" not in "".join(texts)
    else:
        assert said in texts[0]
        assert is_own or f"by steps on {of_jax[0].device}" in said
    assert said in compare_page(comparison)


def test_a_device_without_steps_borrows_none():
    assert reported_steps("MI300X", "data, FSDP") == ()
    assert any(steps.device == "H100" for steps in reported_steps("H100", "data, FSDP"))
