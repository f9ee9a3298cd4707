"""Errors for users: each says what was asked, what was found and what to do next.

All floors raise these. The command line prints the message and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ._text import listing


class AliquotWarning(UserWarning):
    """Something that a person should know, and that ends nothing. The command line shows it as a
    remark.
    """


class AliquotError(Exception):
    """Base of all errors that the caller can act on; bugs of this package raise others.

    `exit_code` is the exit code of the command line: 2 for bad input, 1 if the answer itself is
    "no", 4 if a file would say less than it should. `about` is the model that it was met with,
    which the command line puts before a message that does not name it.
    """

    exit_code: int = 2
    about: str = ""


class InputError(AliquotError):
    """An argument, file or name that cannot be used; the general case, where no narrower class
    fits.
    """


class CaptureError(AliquotError):
    """A training step that cannot be turned into a graph, or cannot be cut into the requested
    micro-batches.
    """


class MissingRuleError(AliquotError):
    """A primitive without a sharding rule, which would say which dims may be split."""


class PlanFileError(AliquotError):
    """A plan file that is missing, truncated, of an unknown version, or not a consistent plan."""


class InfeasibleError(AliquotError):
    """No plan meets the constraints: an answer, with numbers, rather than a mistake.

    Args:
        message: What was tried, and what the smallest plan needs.
        advice: Changes with which it may fit.
        required_bytes: Memory per device of the smallest plan found, or the least that any plan
            needs where that is too much; None if no plan was completed.
        available_bytes: Memory per device that a plan may use.
        parts: `required_bytes` by component (`"parameters"`, `"activations"`, ...).
        found_with: what else the smallest plan found was tried with, such as `"8 micro-batches"`.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        advice: Sequence[str] = (),
        required_bytes: float | None = None,
        available_bytes: float | None = None,
        parts: Mapping[str, float] | None = None,
        found_with: Sequence[str] = (),
    ) -> None:
        changes = ", or ".join(advice)
        super().__init__(f"{message}\n  It could fit with {changes}." if advice else message)
        self.message, self.advice = message, tuple(advice)
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes
        self.parts: dict[str, float] = dict(parts or {})
        self.found_with = tuple(found_with)

    def reworded(self, message: str, advice: Sequence[str] = ()) -> InfeasibleError:
        """The same answer in other words."""
        error = InfeasibleError(
            message,
            advice=advice,
            required_bytes=self.required_bytes,
            available_bytes=self.available_bytes,
            parts=self.parts,
            found_with=self.found_with,
        )
        error.about = self.about
        return error


class TimeLimitError(AliquotError):
    """A search that reached its time limit before any plan was complete. A plan may exist."""

    exit_code = 1


class _ViolationsError(AliquotError):
    # `args` must hold just the positional argument, because pickling creates the exception anew
    # from `args`.
    _headline = "not valid"

    def __init__(
        self, violations: Iterable[str] | str, *, asked: str = "", advice: str = ""
    ) -> None:
        self.violations: tuple[str, ...] = (
            (violations,) if isinstance(violations, str) else tuple(violations)
        )
        self.asked = asked
        self.advice = advice
        super().__init__(self.violations)

    def __str__(self) -> str:
        return listing(self.asked or self._headline, self.violations, self.advice)


class PlanMismatchError(_ViolationsError):
    """A plan that does not fit the step, the arrays or the cluster it meets. Lists every violation,
    not the first.

    Args:
        violations: One sentence for each, naming the path and both values.
        asked: The opening of the message: what was being done.
        advice: What to do next.

    >>> print(PlanMismatchError(["batch.x is (8, 4), planned (16, 4)", "params.w is missing"]))
    the plan does not fit, 2 problems:
      - batch.x is (8, 4), planned (16, 4)
      - params.w is missing
    """

    _headline = "the plan does not fit"


class LossyExportError(_ViolationsError):
    """Settings of another framework that cannot express all that a plan decides. Lists what
    they lack.

    Args:
        violations: One sentence for each thing that is lost.
        asked: The opening of the message: what was being written.
        advice: What to do next.
    """

    exit_code = 4
    _headline = "the plan cannot be written without loss"


class ClusterError(_ViolationsError):
    """A cluster, device or link description that cannot be right. Lists every violation, not the
    first.

    Args:
        violations: One sentence for each, naming the key and the value found.
        asked: The opening of the message: which description was being read.
        advice: What to do next.
    """

    _headline = "the cluster description is not usable"


class MissingExtraError(AliquotError):
    """An optional dependency is needed and absent.

    Args:
        extra: Name of the extra of this package that installs it.
        package: The module or distribution that could not be imported.

    >>> print(MissingExtraError("plot", "matplotlib"))
    this needs matplotlib, which is not installed. Run: pip install ...
    """

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(extra, package)
        self.extra = extra
        self.package = package

    def __str__(self) -> str:
        return (
            f"this needs {self.package}, which is not installed. Run: {how_to_install(self.extra)}"
        )


#: For files that a newer release has written.
HOW_TO_UPDATE = "Update it: type `pip install .` in the folder of a newer release of aliquot"

# What each extra for users installs.
_EXTRAS = {
    "zoo": "flax optax",
    "plot": "matplotlib",
    "ray": "ray",
    "train": "orbax-checkpoint pillow tensorboardX tokenizers",
    "torch": "torch",
    "verify-gpu": "'jax[cuda12-local]' nvidia-cuda-nvcc-cu12",
    "verify-tpu": "'jax[tpu]'",
}


def how_to_install(extra: str) -> str:
    """The command that installs an extra: from the checkout that this package lies in, or else what
    the extra needs. It is that of the Python that runs.
    """
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return f"pip install {_EXTRAS[extra]}"
    where = "." if root == Path.cwd() else str(root)
    return f"pip install -e '{where}[{extra}]'"


_FILL_A_SCREEN = 60


def nearest(name: str, known: Iterable[str], listed_by: str = "") -> str:
    """The half-sentence to put after an unknown name: the closest known one, if any is close, and
    the whole list; or the closest three, and the command that lists all (`listed_by`).

    Names that begin with the unknown name win over those that only resemble it. Case does not
    count. Of a list that would fill a screen, such as the paths of a model's state, only the
    closest are shown.

    >>> nearest("gpt-1.4b", ["gpt-125m", "gpt-1.3b"])
    "did you mean 'gpt-1.3b'? Known: gpt-125m, gpt-1.3b."
    >>> nearest("gpt-1.4b", ["gpt-125m", "gpt-1.3b"], listed_by="aliquot models")
    "did you mean 'gpt-1.3b' or 'gpt-125m'? `aliquot models` lists all."
    """
    names = list(known)
    typed = name.casefold()
    by_folded = {candidate.casefold(): candidate for candidate in names}
    shown, others = names, ""
    if len(names) > _FILL_A_SCREEN:
        shown = []
        for folded in difflib.get_close_matches(typed, by_folded, n=8, cutoff=0.0):
            shown.append(by_folded[folded])
        others = f" and {len(names) - len(shown)} others"
    listing = f"Known: {', '.join(shown)}{others}." if names else "None is known."
    if listed_by:
        listing = f"`{listed_by}` lists all."
    begun = [folded for folded in by_folded if typed and folded.startswith(typed)][:3]
    similar = difflib.get_close_matches(typed, by_folded, n=3 if listed_by else 1, cutoff=0.5)
    close = begun or similar
    *others_close, last = [repr(by_folded[folded]) for folded in close] or [""]
    suggested = f"{', '.join(others_close)} or {last}" if others_close else last
    return f"did you mean {suggested}? {listing}" if close else listing
