"""Two processes of 4 virtual devices each measure together: within, between, and what goes wrong in
one of them.
"""

from pathlib import Path

import pytest
from runtime.processes import last_lines, started

from aliquot.cluster import Cluster
from aliquot.core import InputError
from aliquot.profiling import ProfileDatabase, read_measured

WORKER = Path(__file__).with_name("measuring_worker.py")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What both processes say, and the database."""
    path = tmp_path_factory.mktemp("hosts") / "p.sqlite"
    with started(WORKER, 2, path) as processes:
        said = last_lines(processes, 240)
    with ProfileDatabase(path, must_exist=True) as database:
        yield said, database


def test_all_operators_are_measured_once_by_both(measured):
    (first, second), database = measured
    assert {**first, "refused": None} == {**second, "refused": None}
    assert first["first"]["num_measured"] == 9 and first["first"]["failures"] == []
    meshes = {f"{key.program} on {key.mesh}" for key, _ in database.rows()}
    assert {
        "all-reduce float32 1048576 along 0 on 2x4 on 2 hosts",
        "all-reduce float32 1048576 along 1 on 2x4 on 2 hosts",
        "transfer float32 1048576 on 8 on 2 hosts",
        "transfer float32 1048576 on 4",
    } <= meshes


def test_they_price_links_within_and_between_hosts(measured):
    _, database = measured
    found = read_measured(database, Cluster.preset("2x4xcpu"))
    assert {
        "all-reduce in host",
        "all-reduce between hosts",
        "collective-permute between hosts",
    } <= set(found.tables)
    assert found.transfer_link(crosses_hosts=True) and found.transfer_link(crosses_hosts=False)


def test_they_say_nothing_of_as_many_devices_of_one_host(measured):
    _, database = measured
    with pytest.raises(InputError, match=r"of 2 hosts x 4 x cpu.*, 4 x cpu.*none of 8 x cpu"):
        read_measured(database, Cluster.preset("8xcpu"))


def test_what_goes_wrong_in_one_is_known_in_all(measured):
    (first, second), _ = measured
    assert first["broken"]["failures"] == [
        "all-gather float32: 1.0 KiB along x,y of 2x4 failed: process 1: INTERNAL: no such kernel"
    ]
    assert (first["refused"], second["refused"]) == (
        "The disk is full.",
        "process 0: The disk is full.",
    )
    assert "processes 0 and 1 would measure different programs" in first["differs"]


def test_process_0_alone_decides_when_time_is_up(measured):
    (first, _), _ = measured
    assert (first["budget"]["num_known"], first["budget"]["missing"]) == (9, 1)
