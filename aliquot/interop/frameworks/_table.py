"""Tables of settings, one for each framework and version, and the words of a file by its table."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ...core import shortened
from ._syntax import Setting, Text, Unknown

# Values of settings that a plan has, too.
_USUAL = ("default_adamw", "cudnn_flash_te", "flash", "fused", "alltoall", "autoselected")
# Words for how many devices a run has.
_DEVICES = ("world", "hosts", "devices_per_host")
# How alike two names are of which one is a slip of the pen for the other.
_A_SLIP = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The settings of one version of a framework.

    Attributes:
        framework, version, source: whose they are, and where they were read.
        kinds: kinds of files that hold them; empty for all.
        layout, model: a word for each setting that is read.
        defaults: what a setting is where a file does not give it.
        changes: settings that change memory or time and that a plan does not follow, with what it
            has in their place.
        harmless: shell patterns of the others.
        base_model: of MaxText, sizes of a model without a name.
        memory_share: the least share of predicted memory that a published run took.
        tensor_splits_sequence: whether its tensor ranks split residual streams, too.
        kernels_fuse: whether its kernels compute norms and activation functions again where nothing
            is recomputed, which is `fused`; if it says whether it compiles, then only compiled.
        reported: what `ReportedSteps` calls the framework.
    """

    framework: str
    version: str
    source: str
    kinds: tuple[str, ...]
    layout: Mapping[str, str]
    model: Mapping[str, str]
    defaults: Mapping[str, Any]
    changes: Mapping[str, str]
    harmless: tuple[str, ...]
    base_model: Mapping[str, Any]
    memory_share: float
    tensor_splits_sequence: bool
    kernels_fuse: bool
    reported: tuple[str, ...]

    @property
    def title(self) -> str:
        """Framework and version."""
        return f"{self.framework} {self.version}"

    def name_of(self, word: str) -> str:
        """What the framework calls a word of this package."""
        known = {**self.model, **self.layout}
        return next((name for name, each in known.items() if each == word), word)

    def canonical(self, name: str) -> str:
        """A name as the table writes it: arguments may have underscores for dashes."""
        dashed = name.replace("_", "-")
        known = (self.layout, self.model, self.changes)
        return dashed if any(dashed in each for each in known) else name

    def knows(self, name: str) -> bool:
        """Whether the table has the setting."""
        name = self.canonical(name)
        return (
            name in self.layout or name in self.model or name in self.changes or self.ignores(name)
        )

    def ignores(self, name: str) -> bool:
        """Whether the setting changes neither memory nor time."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.harmless)


@functools.cache
def tables() -> tuple[Table, ...]:
    """All tables, in the order of their files' names."""
    folder = resources.files(__package__) / "tables"
    files = {
        file.name: tomllib.loads(file.read_text(encoding="utf-8"))
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml") and file.name != "models.toml"
    }
    return tuple(_table(data, files.get(data.get("like", ""))) for data in files.values())


def _table(data: Mapping[str, Any], base: Mapping[str, Any] | None) -> Table:
    """A table from its file; with `like`, what it changes in another version's."""
    if base is not None:
        merged = {**base, **data}
        for part in ("layout", "model", "defaults"):
            kept = {k: v for k, v in base[part].items() if k not in data["without"]}
            merged[part] = {**kept, **data.get(part, {})}
        data = merged
    changes: dict[str, str] = {}
    for why, names in data["changes"].items():
        changes |= dict.fromkeys(names, why)
    return Table(
        framework=data["framework"],
        version=data["version"],
        source=data["source"],
        kinds=tuple(data.get("kinds", ())),
        layout=data["layout"],
        model=data["model"],
        defaults=data["defaults"],
        changes=changes,
        harmless=tuple(data["harmless"]["names"]),
        base_model=data.get("base_model", {}),
        memory_share=float(data["memory_share"]),
        tensor_splits_sequence=data.get("tensor_splits_sequence", False),
        kernels_fuse=data.get("kernels_fuse", False),
        reported=tuple(data.get("reported", ())),
    )


@functools.cache
def _models() -> Mapping[str, Any]:
    file = resources.files(__package__) / "tables" / "models.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def model_named(name: str) -> dict[str, Any]:
    """Fields of the model that a framework calls by this name: `like`, a name of the zoo, or its
    sizes; empty if the name is not known.

    >>> model_named("llama3_70b_pretrain_config"), model_named("Llama-3.1-405B")
    ({'like': 'llama3-70b'}, {'like': 'llama3.1-405b'})
    """
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    known = {**_models()["names"], **_models()["sizes"]}
    longest = max((each for each in known if bare.startswith(each)), key=len, default=None)
    if longest is None or ("debug" in bare and "debug" not in longest):
        return {}
    found = known[longest]
    return dict(found) if isinstance(found, dict) else {"like": found}


def _similar(name: str, table: Table) -> str:
    """A question for the setting that an unknown name may stand for; empty if none is as close as a
    slip of the pen, since new settings often resemble old ones.
    """
    known = {each.replace("_", "-"): each for each in (*table.layout, *table.model, *table.changes)}
    close = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=_A_SLIP)
    return f". Did you mean {known[close[0]]}?" if close else ""


@dataclass(slots=True)
class Words:
    """The settings of files by the words of a table, and what is noticed while they are read."""

    table: Table
    texts: Sequence[Text]
    num_devices: int | None
    said: dict[str, Setting] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for text in self.texts:
            self.assumed += text.remarks
            if text.title and "title" in self.table.model:
                self.said["model"] = Setting(name="title", value=text.title)
            elif text.title and "recipe" in self.table.model:
                self.said["like"] = Setting(name="recipe", value=text.title)
            own = dict[str, Setting]()
            for setting in text.settings:
                self._sort(setting, own if text.kind != "python" else None)
        layout = set(self.table.layout.values())
        for word, why in self.open.items():
            if word in _DEVICES:
                continue  # Whoever reads the file says these.
            if word in layout and word not in self.said:
                self.faults.append(f"{why}: give it as NAME=VALUE")
            elif word not in ("model", "tokenizer"):
                self.unknown.append(why)

    def _sort(self, setting: Setting, own: dict[str, Setting] | None) -> None:
        """Put a setting where it belongs.

        Args:
            own: the settings of the same file so far, where a second one is a contradiction.
        """
        table, name = self.table, self.table.canonical(setting.name)
        shown = f"{setting.name} ({setting.place})" if setting.place else setting.name
        word = table.layout.get(name) or table.model.get(name)
        if word:
            if name == "recipe" and "like" in self.said and not model_named(str(setting.value)):
                return
            value = setting.value
            if value == "auto":
                self.assumed.append(f"{shown} = auto: what the Trainer's arguments say is not read")
                return
            if isinstance(value, Unknown):
                self.open[word] = f"{shown} = {value}: the file does not give its value"
                return
            self.open.pop(word, None)
            before = own.get(name) if own is not None else None
            if before is not None and before.value != value and word != "tokenizer":
                self.assumed.append(
                    f"{setting.name} is {before.value} ({before.place}) and {value}"
                    f" ({setting.place}): the later one is taken"
                )
            if own is not None:
                own[name] = setting
            self.said[word] = setting
        elif name in table.changes:
            why = table.changes[name]
            off = setting.value in (False, None, "none", "None", 0, 0.0, "0", "", "no", "default")
            usual = str(setting.value).lower() in ("adamw", "adam", "float32", "fp32", "auto")
            usual = usual or str(setting.value).partition("(")[0] in _USUAL
            if not off and not usual:
                self.lost.append(f"{shown} = {shortened(str(setting.value), 40)}: {why}")
        elif not table.ignores(name):
            others = [
                each.title
                for each in tables()
                if each.framework == table.framework
                and each is not table
                and (name in each.layout or name in each.model)
            ]
            if others:
                of, meant = f"belongs to {', '.join(others)}", ""
            else:
                of, meant = f"{table.title} has none in its table", _similar(name, table)
            self.unknown.append(f"{shown}: {of}; what it does is not priced{meant}")

    def run(self) -> tuple[int | None, int | None]:
        """Devices and hosts of the whole run; None for what is not said as a number."""
        world, hosts, each = (
            setting.value if setting is not None and type(setting.value) is int else None
            for setting in map(self.said.get, _DEVICES)
        )
        if each and "hosts" not in self.said and "hosts" not in self.open:
            hosts = 1
        return world or (hosts * each if hosts and each else None), hosts

    def name(self, word: str) -> str:
        """What the file, or else the framework, calls a word, with its place."""
        setting = self.said.get(word)
        if setting is None:
            return self.table.name_of(word)
        return f"{setting.name} ({setting.place})" if setting.place else setting.name

    def value(self, word: str, default: Any = None) -> Any:
        """What is said, or the framework's default, which is then noted, or `default`."""
        if word in self.said:
            return self.said[word].value
        for name, each in {**self.table.layout, **self.table.model}.items():
            if each == word and name in self.table.defaults:
                return self.table.defaults[name]
        return default

    def number(self, word: str, default: int | None = None) -> int | None:
        """A whole number of at least 1; others are faults. None and "None" are the default."""
        value = self.value(word, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or isinstance(value, bool) and not value:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.faults.append(f"{self.name(word)} = {shortened(str(value), 40)}: write 1 or more")
            return default
        return value

    def degree(self, word: str) -> int:
        """A degree of parallelism; 1 where none is given."""
        return self.number(word, 1) or 1

    def flag(self, word: str, default: bool = False) -> bool:
        """Whether something is on."""
        value = self.value(word, default)
        return value is True or str(value).lower() in ("true", "yes", "1", "on")

    def text(self, word: str, default: str = "") -> str:
        """A name, in lower case."""
        value = self.value(word, default)
        return "" if value is None or value is False else str(value).lower()

    def not_said(self, word: str, taken: Any, meaning: str = "") -> None:
        """Note that a value is the framework's default."""
        if word not in self.said:
            meant = f": {meaning}" if meaning else ""
            self.assumed.append(f"{self.table.name_of(word)} = {taken}, the default{meant}")

    def parts(self) -> Iterator[tuple[str, Any, str]]:
        """What was understood."""
        for setting in self.said.values():
            yield setting.name, setting.value, setting.place
