"""Options of XLA that a release may lack."""

from __future__ import annotations

from aliquot.core import with_xla_flags

COUNT = "--xla_force_host_platform_device_count"


def test_options_that_xla_has_are_set():
    assert with_xla_flags("", {COUNT: "8"}) == f"{COUNT}=8"


def test_options_that_xla_lacks_are_left_out():
    assert with_xla_flags("", {"--xla_no_release_has_this": "1", COUNT: "8"}) == f"{COUNT}=8"


def test_present_values_are_replaced_and_others_kept():
    assert (
        with_xla_flags(f"--xla_dump_to=here {COUNT}=2", {COUNT: "8"})
        == f"--xla_dump_to=here {COUNT}=8"
    )
