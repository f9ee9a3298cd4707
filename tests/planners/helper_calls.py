"""Calls for two processes to share; they stand in a module because the second one imports them by
name.
"""

import os
import time


def add(first: int, second: int) -> int:
    """Their sum."""
    return first + second


def who(_: None, seconds: float) -> int:
    """The process that is asked, after a while."""
    time.sleep(seconds)
    return os.getpid()


def die_elsewhere(home: int, number: int) -> int:
    """The number; ends any process other than `home`."""
    if os.getpid() != home:
        os._exit(1)
    return number


def refuse(_: None, number: int) -> int:
    """An error for odd numbers."""
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


def say(_: None, number: int) -> int:
    """The number, and words on standard output."""
    print("no answer")
    return number


def apply(function, number: int) -> int:
    """Of the number."""
    return function(number)
