"""Plan files with mistakes in them, of every kind that an editor, a script, a full disk or an
attacker makes.
"""

import copy
import json
import random

CANARY = "canary_of_mutated_plans"
NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    8,
    -8,
    10**6,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    -0.5,
    1e-300,
    1e60,
    1e300,
    10**400,
)
TEXTS = (
    "",
    " ",
    "x",
    "none",
    "layers[*]",
    "float32",
    "factory",
    "closure",
    "zoo",
    f"{CANARY}:run",
    "os:system",
    "\x1b[2J\x07",
    "\u202ereversed",
    "²",
    "9" * 400,
    "a" * 3000,
    "a" * 20_000,
    "[0:4]",
    "layers[99999999999999999999]",
    "../../etc/passwd",
    "{}",
    "%s%n",
    "\x00",
    "\ud83d",
)
OTHERS = (None, True, False, [], {}, [[]], [{}], {"": None}, [None] * 5, {"a": {"b": [1]}})


def mutated(text: str, random_: random.Random) -> str:
    """A plan's text with one to three changes."""
    kind = random_.random()
    if kind < 0.1:
        return _cut(text, random_)
    data = json.loads(text)
    for _ in range(random_.choice((1, 1, 1, 1, 2, 3))):
        _change(data, random_)
    changed = json.dumps(data)
    return _repeated(changed, random_) if kind < 0.15 else changed


def _cut(text: str, random_: random.Random) -> str:
    """Text changed as text: cut off, with a stretch missing or twice, or with some other
    character.
    """
    start, stop = sorted(random_.randrange(len(text)) for _ in range(2))
    stop = min(stop, start + 40)
    other = random_.choice(
        [
            "",
            "\x00",
            '"',
            "{",
            "}",
            "[" * 200_000,
            ",",
            "-",
            "9" * 5000,
            "NaN",
            "\ufeff",
            text[start:stop],
        ]
    )
    return random_.choice(
        [
            text[:start],
            text[start:],
            text[:start] + text[stop:],
            text[:start] + other + text[start:],
        ]
    )


def _repeated(text: str, random_: random.Random) -> str:
    """Some object with one of its names twice."""
    places = [
        place for place, character in enumerate(text) if character == "{" and text[place + 1] == '"'
    ]
    place = random_.choice(places) + 1
    name = text[place : text.index('"', place + 1) + 1]
    return f"{text[:place]}{name}: {random_.choice(['1', 'null', '[]'])}, {text[place:]}"


def _change(data, random_):
    """One change at a random place, as often near the top as deep inside."""
    holder, key = _place(data, random_)
    if holder is None:
        return
    old = holder[key]
    kind = random_.randrange(10)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[random_.choice(TEXTS)] = holder.pop(key)
    elif kind == 1:
        holder.insert(key, copy.deepcopy(old))
    elif kind == 2:
        for _ in range(random_.choice((1, 3, 40, 500))):
            old = [old] if random_.random() < 0.5 else {"a": old}
        holder[key] = old
    elif kind == 3:
        other, where = _place(data, random_)
        holder[key] = copy.deepcopy(other[where]) if other is not None else None
    elif kind == 4 and isinstance(old, int | float):
        holder[key] = random_.choice([old + 1, old - 1, -old, old * 2, str(old), float(old), [old]])
    elif kind == 5 and isinstance(old, str):
        at = random_.randrange(len(old) + 1)
        holder[key] = old[:at] + random_.choice(TEXTS) + old[at:]
    elif kind == 6 and isinstance(old, list) and old:
        holder[key] = random_.choice(
            [old[:-1], old[1:], old * 2, old[::-1], old * 300, [*old, None]]
        )
    else:
        holder[key] = copy.deepcopy(random_.choice(random_.choice((NUMBERS, TEXTS, OTHERS))))


def _place(data, random_):
    holder, key = None, None
    while isinstance(data, dict | list) and data and (holder is None or random_.random() < 0.75):
        holder, key = (
            data,
            random_.choice(list(data) if isinstance(data, dict) else range(len(data))),
        )
        data = data[key]
    return holder, key
