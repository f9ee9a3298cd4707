"""Which secrets are used, and what is asked of those who have none."""

import re
import socket
from types import SimpleNamespace

import pytest

from aliquot.core import InputError
from aliquot.runtime import initialize, make_secret
from aliquot.runtime.pipeline import compile_pipeline
from aliquot.runtime.transport import _service
from aliquot.runtime.transport._hosts import _service_address
from aliquot.runtime.transport._reception import listen
from aliquot.runtime.transport._secret import digest, known_secret, require_secret
from aliquot.runtime.transport._service import exchange_by, find_value, leave_value


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    monkeypatch.delenv("ALIQUOT_SECRET", raising=False)
    monkeypatch.delenv("ALIQUOT_SECRET_FILE", raising=False)


def test_secrets_are_long_and_new():
    assert make_secret() != make_secret()
    assert re.fullmatch(r"[\w-]{43}", make_secret())


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_secret_comes_from_the_environment_or_a_file(mode, tmp_path, monkeypatch):
    assert known_secret() is None
    secret, file = make_secret(), tmp_path / "secret"
    file.write_text(secret + "\n")
    file.chmod(mode)
    monkeypatch.setenv("ALIQUOT_SECRET_FILE", str(file))
    assert known_secret() == require_secret("10.0.0.1") == secret.encode()
    monkeypatch.setenv("ALIQUOT_SECRET", "another secret of mine")
    assert known_secret() == b"another secret of mine"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o644, r"other users can read or change \(mode 644\).*chmod 600"),
        (0o620, r"\(mode 620\)"),
        (0o602, r"\(mode 602\)"),
    ],
)
def test_a_file_that_others_can_read_or_change_is_refused(mode, said, tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text(make_secret())
    file.chmod(mode)
    monkeypatch.setenv("ALIQUOT_SECRET_FILE", str(file))
    with pytest.raises(InputError, match=said):
        known_secret()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read as text: .*No such file"),
        (b"", "is blank"),
        (b" \n", "is blank"),
        (b"short", "has 5 characters.*needs 16"),
        (b"\xff" * 40, "cannot be read as text"),
    ],
    ids=["missing", "empty", "blank", "short", "bytes"],
)
def test_a_file_without_a_secret_is_refused(content, said, tmp_path, monkeypatch):
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    monkeypatch.setenv("ALIQUOT_SECRET_FILE", str(file))
    with pytest.raises(InputError, match=said):
        known_secret()


def test_short_secrets_are_refused(monkeypatch):
    monkeypatch.setenv("ALIQUOT_SECRET", "password")
    with pytest.raises(InputError, match="in ALIQUOT_SECRET has 8 characters: whoever guesses it"):
        known_secret()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ALIQUOT_SECRET", "", "in ALIQUOT_SECRET is blank: the command that was to make it"),
        ("ALIQUOT_SECRET", " \t\n", "is blank"),
        ("ALIQUOT_SECRET_FILE", " ", "ALIQUOT_SECRET_FILE is set, and names no file"),
        (
            "ALIQUOT_SECRET",
            "abababababababababab",
            "has 2 different characters: whoever guesses it",
        ),
        ("ALIQUOT_SECRET", "0123456" * 3, "has 7 different characters: .*so it needs 8"),
    ],
)
def test_blank_and_weak_secrets_are_refused_on_one_machine_too(name, text, said, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match=said):
        require_secret("127.0.0.1")


def test_of_two_secrets_the_one_that_is_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ALIQUOT_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("ALIQUOT_SECRET", "password")
    with pytest.raises(InputError, match="in ALIQUOT_SECRET has 8 characters"):
        known_secret()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.3.4.5"])
def test_on_one_machine_no_secret_is_needed(address):
    assert require_secret(address) == b""


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "::", "", "fe80::1", "no.such.name."])
def test_with_other_machines_a_secret_is_needed(address):
    with pytest.raises(InputError, match="Set ALIQUOT_SECRET to the same text in all processes"):
        require_secret("127.0.0.1", address)


@pytest.mark.parametrize(
    "options", [{}, {"listen_address": "0.0.0.0"}], ids=["the others' address", "all interfaces"]
)
@pytest.mark.parametrize("process", [0, 1])
def test_initialize_says_what_to_set(options, process):
    address = "127.0.0.1:1" if options else "192.0.2.1:12345"
    with pytest.raises(InputError) as refusal:
        initialize(address, 2, process, **options)
    said = str(refusal.value)
    assert f"meet at {options.get('listen_address', '192.0.2.1')}, which other machines" in said
    assert "ALIQUOT_SECRET_FILE" in said and "make_secret" in said


def test_a_pipeline_of_processes_that_jax_alone_has_connected_says_what_to_call():
    """Between such processes there are no connections of ours."""
    with pytest.raises(InputError, match=r"aliquot\.runtime\.initialize makes: call it"):
        compile_pipeline(SimpleNamespace(is_shared=True))


def test_only_the_interface_that_was_asked_for_is_listened_at():
    with listen("127.0.0.1") as one, listen("0.0.0.0") as all_of_them:
        assert one.getsockname()[0] == "127.0.0.1"
        assert all_of_them.getsockname()[0] == "0.0.0.0"
        port = one.getsockname()[1]
        # Another address of this machine, which nobody asked for.
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=1):
            pass
    with pytest.raises(OSError):
        listen("192.0.2.77")


def test_the_service_of_jax_listens_at_the_same_interface():
    assert _service_address("0.0.0.0", "host:7", []) == "0.0.0.0:7"
    assert _service_address("::1", "[::1]:7", []) == "[::1]:7"
    with listen("localhost") as found:
        address = _service_address("localhost", "localhost:7", [found])
        assert address in ("127.0.0.1:7", "[::1]:7")


def test_digests_tell_parts_apart():
    assert digest(b"k", "ab", "c") != digest(b"k", "a", "bc")
    assert digest(b"k", 1, b"") != digest(b"k", 1)
    assert digest(b"k", "a") != digest(b"l", "a")


class Service:
    """As much of JAX's as values need."""

    def __init__(self):
        self.values = {}

    def key_value_set_bytes(self, name, value):
        assert name not in self.values
        self.values[name] = value

    def blocking_key_value_get_bytes(self, name, _):
        if name not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.values[name]


@pytest.fixture
def service(monkeypatch):
    found = Service()
    monkeypatch.setattr(_service, "coordination_client", lambda: (found, "host:1", 0, 1))
    return found


def test_values_in_the_service_are_those_that_were_left(service):
    leave_value(b"key", "name", {"a": "b"})
    assert find_value(b"key", "name", dict[str, str], 0) == {"a": "b"}
    assert exchange_by(b"key", 7, int) == [7]
    assert not any("name" in name or "exchange" in name for name in service.values)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda value: b"", int, "what came as name was left by a stranger"),
        (lambda value: value[:-1] + b"\x08", int, "left by a stranger"),
        (lambda value: bytes(32) + value[32:], int, "left by a stranger"),
        (lambda value: value, str, "no such message as was expected: Expected `str`, got `int`"),
        (None, int, "nothing came as name .*the same ALIQUOT_SECRET"),
    ],
    ids=["nothing", "value", "proof", "type", "missing"],
)
def test_values_that_were_changed_are_refused(service, change, kind, said):
    leave_value(b"key", "name", 7)
    for name, value in [*service.values.items()]:
        if change is None:
            del service.values[name]
        else:
            service.values[name] = change(value)
    with pytest.raises(ConnectionError, match=said):
        find_value(b"key", "name", kind, 0)


def test_values_cannot_stand_for_others(service):
    leave_value(b"key", "one", 1)
    leave_value(b"key", "two", 2)
    first, second = service.values
    service.values[first], service.values[second] = service.values[second], service.values[first]
    with pytest.raises(ConnectionError, match="what came as one was left by a stranger"):
        find_value(b"key", "one", int, 0)
