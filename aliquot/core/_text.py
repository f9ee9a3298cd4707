"""Text for readers: without control characters, wrapped and cut to fit."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence

# The most problems that a message lists.
_FIRST = 8
# Places to break a text: before a dot, after a space or a slash.
_BREAKS = re.compile(r"(?=\.)|(?<=[ /])")
# The most characters of one problem.
_LONG = 500
# `textwrap` does not break lines at this space.
_NO_BREAK = "\N{NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGTP]i?B|B|h|min|s|ms|us|ns)\b)")
# Categories of control and format characters (among them those that reverse the direction of
# writing), lone surrogates, and separators of lines and paragraphs.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str, keep: str = "\n") -> str:
    """The text with its control characters written as Python escapes, so that none reaches a
    terminal.

    Args:
        keep: control characters that may stay.

    >>> printable("a" + chr(27) + "[2Jb")
    'a\\\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(
        (
            c.encode("unicode_escape").decode()
            if unicodedata.category(c) in _HIDDEN and c not in keep
            else c
        )
        for c in text
    )


def shortened(text: str, most: int = _LONG) -> str:
    """The text on one line, cut in its middle if it has more than `most` characters.

    >>> shortened("abcdefghij", 8)
    'abc...ij'
    """
    # Cut first, since it takes long to escape a long text.
    return _cut(printable(_cut(text, most), keep=""), most)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    head = (most - 2) // 2
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"


def counted(count: int, noun: str) -> str:
    """A number with its noun, in the plural unless the number is 1.

    >>> counted(1, "stage"), counted(2, "stage"), counted(4, "micro-batch")
    ('1 stage', '2 stages', '4 micro-batches')
    """
    plural = f"{noun}es" if noun.endswith(("ch", "ss")) else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def listing(headline: str, problems: Sequence[str], advice: str = "") -> str:
    """A message that lists problems: a single one after the headline, several below it; of many
    only the first are listed.

    >>> print(listing("no plan", ["a is 1", "b is 2"], "Make it again."))
    no plan, 2 problems:
      - a is 1
      - b is 2
      Make it again.
    """
    headline = printable(headline)
    tail = f"\n  {printable(advice)}" if advice else ""
    if len(problems) == 1:
        return f"{headline}: {shortened(problems[0])}{tail}"
    # The line "and 1 more" would take as much space as the problem itself.
    shown = problems if len(problems) <= _FIRST + 1 else problems[:_FIRST]
    lines = "".join(f"\n  - {shortened(problem)}" for problem in shown)
    left = len(problems) - len(shown)
    more = f"\n  and {left} more" if left else ""
    return f"{headline}, {len(problems)} problems:{lines}{more}{tail}"


def broken(text: str, width: int) -> list[str]:
    """A text on lines of at most `width` characters, broken at spaces or before the dots of paths
    where that is possible.

    >>> broken("state.params.layers[*].attn.k.kernel", 24)
    ['state.params.layers[*]', '.attn.k.kernel']
    >>> broken("dot_general:8 linear.py:422", 16)
    ['dot_general:8', 'linear.py:422']
    """
    lines: list[str] = []
    rest = text
    while len(rest) > max(width, 1):
        places = []
        for match in _BREAKS.finditer(rest, 1, width + 1):
            if match.start() <= width:
                places.append(match.start())
        cut = places[-1] if places else max(width, 1)
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*lines, rest]


def wrapped(text: str, width: int) -> list[str]:
    """Prose on lines of at most `width` characters, broken at spaces, but not between a number and
    its unit.

    >>> wrapped("it takes 12.5 ms and 3.0 GiB", 25)
    ['it takes 12.5 ms and', '3.0 GiB']
    """
    joined = _BEFORE_UNIT.sub(_NO_BREAK, text)
    lines = textwrap.wrap(joined, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


def fitting_widths(
    cells: Sequence[Sequence[str]], flexible: Sequence[int], available: int
) -> list[int]:
    """Widths of a table's columns that together take no more than `available`, as far as that is
    possible.

    Args:
        cells: rows, including the heading.
        flexible: positions of columns whose texts may be broken; those with paths are narrowed
            first.

    >>> fitting_widths([["path", "bytes"], ["state.params.w", "4"]], [0], 14)
    [9, 5]
    """
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = {
        k: max(len(piece.strip()) for text in columns[k] for piece in _BREAKS.split(text))
        for k in flexible
    }
    paths = [k for k in flexible if any("." in text for text in columns[k])]
    for some in (paths, flexible):
        while sum(widths) > available and (wide := [k for k in some if widths[k] > least[k]]):
            widths[max(wide, key=lambda k: widths[k])] -= 1
    return widths
