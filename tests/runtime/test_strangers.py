"""Nobody who does not know the secret of a run takes part in it, ends it or holds it up."""

import contextlib
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from runtime.stranger_cases import BAR_S, CASES, COUNTS, MOMENTS, PORTS, run_case, wrong
from runtime.stranger_runs import ALL, train_among
from runtime.strangers import Target, new_secret, strangers, unknown_field

from aliquot.runtime.transport import _line, _meeting, _reception
from aliquot.runtime.transport._line import (
    HEAD_BYTES,
    Greeting,
    framed,
    open_line,
    receive_exactly,
)
from aliquot.runtime.transport._meeting import Hello, gather_in, join
from aliquot.runtime.transport._messages import MessageError
from aliquot.runtime.transport._reception import LOGGER, Reception, listen

# Each kind once, at some port, moment and number of processes; and (slow) twice more, so that it is
# seen at each port, moment and number. The benchmark runs all cases.
_SHORT = [case for k, case in enumerate(CASES) if k % 12 == k // 12 % 12]
_LONG = [
    (
        kind,
        PORTS[(PORTS.index(port) + more) % 2],
        MOMENTS[(MOMENTS.index(moment) + more) % 3],
        other,
    )
    for kind, port, moment, count in _SHORT
    for more, other in ((1, COUNTS[count == COUNTS[0]]), (2, count))
]


@pytest.mark.parametrize(
    "case",
    [*_SHORT, *(pytest.param(case, marks=pytest.mark.slow) for case in _LONG)],
    ids=lambda case: ", ".join(map(str, case)),
)
def test_strangers_are_dropped_and_nothing_waits_for_them(case, tmp_path):
    found = run_case(*case, tmp_path / "marker")
    assert not wrong(found), found


def test_each_kind_comes_to_each_port_at_each_moment_and_to_each_number():
    assert len(CASES) == len(ALL) * len(PORTS) * len(MOMENTS) * len(COUNTS) and len(ALL) >= 20
    assert {case[1:] for case in _SHORT} == {case[1:] for case in CASES}
    seen = {(case[0], place) for case in [*_SHORT, *_LONG] for place in case[1:]}
    assert seen == {(kind, place) for kind in ALL for place in (*PORTS, *MOMENTS, *COUNTS)}


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_processes_train_among_all_strangers(count, tmp_path):
    found = train_among(ALL, count, tmp_path)
    assert found["codes"] == [0] * count, found["errors"]
    assert not found["code ran"] and found["dropped"] >= len(ALL)
    assert max(found["steps_s"].values()) < BAR_S + found["steps_s"]["alone"]


@pytest.fixture
def reception():
    """One for processes that say a number; who has arrived, and the place where it listens."""
    listener, arrived = listen("127.0.0.1"), []
    opened = Reception(
        listener,
        key=b"key",
        purpose="meeting",
        kind=int,
        arrived=lambda *came: arrived.append(came),
        num_expected=2,
    )
    yield opened, arrived, listener.getsockname()
    opened.close()
    for _, line in arrived:
        line.close()


def strange(address, **more):
    """A port for strangers."""
    more = {"purpose": "meeting", "hello": Hello.own(1, 2, ""), "key": b"key"} | more
    return Target(address=address, marker=None, stop=threading.Event(), **more)


def wait_for(is_there):
    """Until something holds."""
    limit = time.monotonic() + 10
    while not is_there():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_who_is_slow_or_silent_is_dropped_in_time_and_named(reception, monkeypatch, caplog):
    monkeypatch.setattr(_line, "PROOFS_S", 0.3)
    opened, arrived, address = reception
    began = time.monotonic()
    with strangers(["says nothing", "one byte after the other"], strange(address, drip_s=0.1)):
        wait_for(lambda: opened.num_dropped == 2)
        assert 0.2 < time.monotonic() - began < 1.5
    assert [record.name for record in caplog.records] == [LOGGER.name] * 2
    assert "dropped stranger 1 at the port for the meeting: 127.0.0.1:" in caplog.text
    assert "has not proved in time that it knows the secret" in opened.strangers
    assert opened.strangers.startswith(" 2 strangers were dropped") and not arrived


def test_of_very_many_strangers_few_are_kept_and_few_are_named(reception, monkeypatch, caplog):
    opened, arrived, address = reception
    with strangers(["opens 300 connections"], strange(address)):
        wait_for(lambda: opened.num_dropped >= 200)
        line = open_line(*address, key=b"key", purpose="meeting", hello=5)
        wait_for(lambda: arrived)
        assert arrived[0][0] == 5 and len(opened._guests) <= 64
        line.send("word")
        assert arrived[0][1].receive(str, 5) == "word"
        line.close()
    wait_for(lambda: opened.num_dropped == 300)
    assert len(caplog.records) == 20
    # Then one at a time.
    monkeypatch.setattr(_reception, "_EVERY_S", 0)
    with strangers(["HTTP"], strange(address)):
        wait_for(lambda: len(caplog.records) == 21)
    assert "dropped stranger 301 at the port" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("kind", ["a long name with escape sequences", "an odd hello", "HTTP"])
def test_what_a_stranger_says_is_one_short_line_of_the_log(kind, reception, caplog):
    opened, _, address = reception
    with strangers([kind], strange(address)):
        wait_for(lambda: opened.num_dropped == 1)
    for said in (caplog.records[0].getMessage(), opened.strangers):
        assert len(said) < 400 and said.isprintable()


def test_a_false_process_0_cannot_fill_the_log(caplog, capsys):
    """It says something else each time."""
    with listen("127.0.0.1") as false_host:

        def pretend():
            with contextlib.suppress(OSError):
                for number in itertools.count():
                    connection, _ = false_host.accept()
                    with connection:
                        receive_exactly(connection, HEAD_BYTES, time.monotonic() + 5)
                        connection.sendall(unknown_field(f"{number}\n\x1b[2J" + "x" * 60_000))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(SystemExit):
            join(*false_host.getsockname(), Hello.own(1, 2, ""), b"secret", 1.5)
    (record,) = caplog.records
    said = capsys.readouterr().err.strip()
    assert all(len(text) < 600 and text.isprintable() for text in (record.getMessage(), said))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"key": b"other"}, "did not accept this process's proof of the secret"),
        ({"purpose": "arrays"}, "did not accept this process's proof of the secret"),
        ({"hello": "x"}, "did not accept this process's proof of the secret"),
        ({}, ""),
    ],
    ids=["secret", "purpose", "hello", "nothing"],
)
def test_both_ends_need_the_same_secret_and_purpose(reception, other, said):
    opened, arrived, address = reception
    options = {"key": b"key", "purpose": "meeting", "hello": 5} | other
    if said:
        with pytest.raises(ConnectionError, match=said):
            open_line(*address, **options)
        wait_for(lambda: opened.num_dropped)
    else:
        open_line(*address, **options).close()
        wait_for(lambda: arrived)


@pytest.mark.parametrize("changed", [b"\x00\x00\x00\x01x" + bytes(32), b"\xff" * 40, b"\x00"])
def test_a_message_that_the_other_end_did_not_send_ends_the_line(reception, changed):
    opened, arrived, address = reception
    line = open_line(*address, key=b"key", purpose="meeting", hello=5)
    wait_for(lambda: arrived)
    line.socket.sendall(changed)
    with pytest.raises(OSError, match="did not send|bytes|too slow|timed out"):
        arrived[0][1].receive(int, 0.2)
    line.close()


def test_long_messages_pass_on_a_line_but_not_before(reception):
    opened, arrived, address = reception
    with pytest.raises(MessageError, match="at most 65536 can be sent"):
        open_line(*address, key=b"key", purpose="meeting", hello="x" * 70_000)
    line = open_line(*address, key=b"key", purpose="meeting", hello=5)
    wait_for(lambda: arrived)
    text = "x" * 2**20
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(line.send, text)
        assert arrived[0][1].receive(str, 5) == text
        sending.result()
    with pytest.raises(MessageError, match="at most 16777216 can be sent"):
        line.send("x" * 2**24)
    line.close()


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[" * 60_000, framed(Greeting(word=b"x" * 32)) * 2],
    ids=["silent", "HTTP", "brackets", "wrong proof"],
)
def test_who_listens_at_the_address_must_prove_the_secret_too(answer, monkeypatch, capsys):
    monkeypatch.setattr(_meeting, "PROOFS_S", 0.3)
    with listen("127.0.0.1") as false_host:

        def pretend():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = false_host.accept()
                    connection.sendall(answer)
                    held.append(connection)

        held = []
        threading.Thread(target=pretend, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            join(*false_host.getsockname(), Hello.own(1, 2, ""), b"secret", 0.5)
        assert ended.value.code == 3 and time.monotonic() - began < 3
        assert "process 1 found nobody of its run at 127.0.0.1:" in capsys.readouterr().err
    for connection in held:
        connection.close()


def test_who_is_gone_before_it_is_turned_away_leaves_no_open_connection(reception):
    _, arrived, address = reception
    open_line(*address, key=b"key", purpose="meeting", hello=5).close()
    wait_for(lambda: arrived)
    line = arrived[0][1]
    line.socket.shutdown(socket.SHUT_WR)
    _meeting._turn_away(line, "all have come")
    assert line.socket.fileno() == -1


def test_process_0_says_at_the_end_that_another_secret_came(capsys):
    listener = listen("127.0.0.1")
    with ThreadPoolExecutor() as pool:
        address = listener.getsockname()
        other = pool.submit(join, *address, Hello.own(1, 2, ""), b"other", 1)
        with pytest.raises(SystemExit):
            gather_in(listener, Hello.own(0, 2, ""), new_secret(), 1, None)
        assert other.exception().code == 3
    said = capsys.readouterr().err
    assert "of 2 processes 1 did not come within 1 s to 127.0.0.1, where process 0 awaited" in said
    assert "strangers were dropped; the last: 127.0.0.1:" in said
    assert "does not know the secret of this run, or has another one." in said
