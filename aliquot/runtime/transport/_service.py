"""Small values that processes leave for each other in JAX's coordination service.

Only processes that `initialize` has not connected use it: the service asks nobody who he is, and
lets everybody delete what is there. So names cannot be guessed, and values carry an HMAC, by a key
that only the processes of a run know.
"""

from __future__ import annotations

import hmac
import itertools
import time
from typing import Any

from ...graph import coordination_client
from ._messages import MOST_BYTES, MessageError, Value, decode, encode
from ._secret import digest

_PROOF_BYTES = 32
#: For a whole exchange. A process that dies meanwhile is noticed by JAX.
_WAIT_S = 24 * 3600
# Of the exchanges of this process.
_numbers = itertools.count(1)


def exchange_by(key: bytes, value: Value, kind: type[Value]) -> list[Value]:
    """The value that each process passes, in order of the processes; under a name."""
    if coordination_client() is None:
        return [value]
    # Numbered, as all processes call it in the same order.
    return exchange_under(key, f"exchange {next(_numbers)}", value, kind, _WAIT_S)


def exchange_under(
    key: bytes, name: str, value: Value, kind: type[Value], timeout_s: float
) -> list[Value]:
    """The value that each process passes under a name, which is used once."""
    joined = coordination_client()
    if joined is None:
        return [value]
    _, _, process, count = joined
    leave_value(key, f"{name} of {count}, process {process}", value)
    deadline = time.monotonic() + timeout_s
    values = []
    for k in range(count):
        values.append(find_value(key, f"{name} of {count}, process {k}", kind, deadline))
    return values


def leave_value(key: bytes, name: str, value: Any) -> None:
    """Leave a value for those who know the key and the name."""
    data = encode(value, MOST_BYTES)
    _client().key_value_set_bytes(_hidden(key, name), digest(key, "value", name, data) + data)


def find_value(key: bytes, name: str, kind: type[Value], deadline: float) -> Value:
    """The value of a name, waited for until a time.

    Raises:
        ConnectionError: there is none, or another one than a process of this run left.
    """
    left_ms = max(int((deadline - time.monotonic()) * 1000), 1)
    try:
        said: bytes = _client().blocking_key_value_get_bytes(_hidden(key, name), left_ms)
    except RuntimeError as error:
        raise ConnectionError(
            f"nothing came as {name} ({error}). Have all processes the same ALIQUOT_SECRET?"
        ) from error
    proof, data = said[:_PROOF_BYTES], said[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, digest(key, "value", name, data)):
        raise ConnectionError(f"what came as {name} was left by a stranger")
    try:
        return decode(data, kind)
    except MessageError as error:
        raise ConnectionError(f"what came as {name} is {error}: it runs something else") from None


def _hidden(key: bytes, name: str) -> str:
    return f"aliquot/{digest(key, 'name', name).hex()}"


def _client() -> Any:
    joined = coordination_client()
    assert joined is not None
    return joined[0]
