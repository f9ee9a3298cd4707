"""`aliquot read`: settings of another framework, judged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from ..core import InputError
from ._devices import use_host_only
from ._groups import argument, option
from ._model_options import MemoryLimit, SeqLen, Settings, read_memory_limit
from ._options import Json, NetworkGbps, read_cluster, read_settings, read_time_limit, with_network
from ._progress import search_progress
from ._session import Session, session

if TYPE_CHECKING:
    from .._reading import Reading
    from ..cluster import Cluster

_DEVICES_PER_HOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices:
    """The devices of the run: so many of a kind, or a cluster."""

    world: int | None = option(
        "Devices of the whole run, where files do not say it.", metavar="N", min=1
    )
    device: str | None = option("Such as H100 or v5p.", metavar="NAME")
    devices_per_host: int | None = option("Devices in a host; 8 unless files say it.", min=1)
    cluster: str | None = option(
        "In place of --world and --device: a preset such as 8xH100, or a file."
    )
    network_gbps: NetworkGbps = None

    def read(self, files: list[str], framework: str | None, recipe: str | None) -> Cluster:
        """As a cluster.

        Args:
            files, framework, recipe: as for `aliquot.read`; they may say how many devices there
                are.

        Raises:
            ClusterError, InputError: what is missing or wrong.
        """
        world, each = self.world, self.devices_per_host
        if world is None and self.device is not None and self.cluster is None:
            from ..interop.frameworks import read_settings

            found = read_settings(files, framework=framework, recipe=recipe)
            world, hosts = found.num_devices, found.num_hosts
            if world and hosts and world % hosts == 0:
                each = each or world // hosts
        return with_network(self._cluster(world, each or _DEVICES_PER_HOST), self.network_gbps)

    def _cluster(self, world: int | None, each: int) -> Cluster:
        if self.cluster is not None:
            if self.world is not None or self.device is not None:
                raise InputError("--cluster says the devices: leave out --world and --device.")
            return read_cluster(self.cluster)
        if world is None or self.device is None:
            missing = "--world 64 --device H100" if self.device is None else "--world 64"
            raise InputError(
                f"aliquot read needs the devices of the run: add {missing}, or --cluster 8x8xH100."
            )
        hosts, left = divmod(world, each)
        if world < each:
            hosts, each = 1, world
        elif left:
            raise InputError(
                f"{world} devices do not fill hosts of {each}: add --devices-per-host N."
            )
        from ..cluster import wire

        name = read_cluster(self.device).device.name
        shown = f"{each}x{name}"
        return wire(shown if hosts == 1 else f"{hosts}x{shown}", name, hosts, each)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What is said of the settings beside the files, by the names of `aliquot.read`."""

    framework: str | None = option(
        "Whose settings they are, if that cannot be seen.", metavar="NAME"
    )
    recipe: str | None = option("The function to read of a Python file.", metavar="NAME")
    model: str | None = option("A model of the zoo, where files do not say it.", metavar="NAME")
    global_batch: int | None = option("Sequences of a step, in place of what files say.", min=1)
    micro_batch: int | None = option("Sequences that a data rank computes at once.", min=1)
    seq_len: SeqLen = None
    recompute: str | None = option(
        "none, fused, minimal, narrow, save_qkv, save_attention or block, where files say none."
    )
    settings: Settings = None


def read(
    files: list[str] = argument(
        "Megatron-LM's shell script, Megatron-Bridge's recipe, torchtitan's TOML or"
        " config_registry.py, MaxText's YAML or script, accelerate's YAML or DeepSpeed's JSON; a"
        " config.json of Hugging Face; and NAME=VALUE. Nothing is run.",
        metavar="FILE...",
    ),
    *,
    devices: _Devices,
    given: _Given,
    better: bool = option(
        "Look for faster settings in the same limits, and print what differs.", False
    ),
    time_limit: str = option("Of that search, such as 60s or 5m.", "60s", metavar="TIME"),
    memory_limit: MemoryLimit = None,
    as_json: Json = False,
) -> None:
    """Judge settings of another framework: layout, step time, memory and MFU, what to change, and
    what a plan does not follow.
    """
    with session(as_json) as say:
        use_host_only()
        where = devices.read(files, given.framework, given.recipe)
        from .._reading import read as judge

        said = asdict(given)
        with search_progress(say) as report:
            reading = judge(
                *files,
                cluster=where,
                overrides=read_settings(said.pop("settings") or ()),
                better=better,
                time_limit_s=read_time_limit(time_limit) or 60.0,
                memory_limit_bytes=read_memory_limit(memory_limit),
                progress=report,
                **said,
            )
        _show(reading, say)
        say.finish(reading.to_dict())
        if reading.plan is None or reading.fits == "no":
            raise typer.Exit(1)


def _show(reading: Reading, say: Session) -> None:
    from .._reading import facts_of, remarks_of
    from ..report import Facts, columns

    say.show(f"{reading.found.table.title} on {reading.cluster.name}")
    say.show(Facts(facts_of(reading)))
    for title, texts in remarks_of(reading):
        if texts:
            say.show(f"\n{title}")
            for text in texts:
                say.show(f"  - {text}")
    if reading.search is None:
        return
    search = reading.search
    others = f"{search.tried + search.ruled_out} others"
    if search.untried:
        others += f" ({search.untried} more were not reached in time: --time-limit)"
    if reading.better is None:
        say.show(f"\nNo faster settings were found among {others}.")
        return
    say.show(f"\nThe fastest of {others}:")
    changes = [(name, _text(now), _text(then)) for name, now, then in reading.changes]
    say.show(columns("settings to change", ("setting", "now", "then"), changes))
    say.show(Facts(facts_of(reading, of_better=True)))


def _text(value: object) -> str:
    return "not set" if value is None else str(value)
