"""cluster.toml as frozen, typed settings. Every problem in the file is reported at once, with its key."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationError

from inventory.aliyun_settings import Aliyun
from inventory.aliyun_settings import contradictions as aliyun_contradictions
from inventory.rental_settings import Rental
from inventory.setting_types import (
    CLUSTER_NAME,
    AptMirror,
    HostName,
    IpAddress,
    Mirror,
    NoCluster,
    Port,
    Reachable,
    Section,
    SettingsError,
    UserName,
    UserPath,
    address_text,
    is_address,
    network_text,
    of_another_width,
    of_quotes,
    sentences,
    spelled,
)
from training.text.problems import EncodingError, text_of

DEFAULT_PATH = Path("cluster.toml")
PATH_VARIABLE = "SPOTUNE_CLUSTER"
"""Environment variable that names another file than ./cluster.toml."""


class Ssh(Section):
    """How this machine reaches the nodes."""

    user: UserName = "root"
    port: Port = 22
    key: UserPath = Field(default=Path("~/.ssh/id_ed25519"), validate_default=True)
    known_hosts: UserPath = Field(default=Path("~/.ssh/known_hosts"), validate_default=True)
    """Host keys are always verified against this file; `fab trust` adds to it after showing fingerprints."""


class StaticNode(Section):
    """One machine you can already reach by ssh. Its place in the list is its rank; the first is the head."""

    name: HostName
    address: Reachable
    private_address: IpAddress | None = None
    """How the nodes reach each other; the address itself where it is left out."""
    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    card: str = ""
    """What kind its GPUs are, as in "A10" or "A100 40GB", for `fab plan`; without it only `fab prove` can say."""
    disk_serial: str | None = None
    """Serial of the data disk, as in /dev/disk/by-id/; without it /data must already be mounted."""
    user: UserName | None = None
    port: Port | None = None
    key: UserPath | None = None
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What an hour of it costs, for `fab status` and the report of a run; without it a run's cost is not known."""
    currency: Annotated[str, spelled(r"([A-Z]{3})?", 'three capital letters are expected, as "CNY"')] = ""
    """Of the price, as in "CNY"."""


class LocalCloud(Section):
    """Where the cloud on this machine has its hosts, for trying spotune out and for its tests."""

    subnet: Annotated[str, AfterValidator(network_text)] = "10.213.77.0/24"
    metadata_address: IpAddress = "100.100.100.200"
    """Where the hosts ask about themselves, as on Alibaba Cloud; an address on their own bridge."""
    wait_factor: Annotated[float, Field(gt=0, le=1)] = 1
    """How long is waited for the local cloud and between two calls of its API, as a part of what is usual; tests wait
    little."""


class DiskSettings(Section):
    """The data disk of every node, mounted at /data."""

    format: Literal["if-blank", "never"] = "if-blank"
    """A disk that holds anything at all is never formatted, whatever stands here."""
    filesystem: Literal["ext4", "xfs"] = "ext4"


class Mirrors(Section):
    """Where packages, wheels and models come from; empty means the usual places."""

    preset: Literal["", "china"] = ""
    apt: AptMirror = ""
    pypi: Mirror = ""
    conda: Mirror = ""
    miniforge: Mirror = ""
    hub: Mirror = ""

    def resolved(self) -> Mirrors:
        """The preset's values, each overridden by what the table itself says."""
        if not self.preset:
            return self
        own = {key: value for key, value in self.model_dump().items() if value}
        return Mirrors(**{**MIRROR_SETS[self.preset], **own, "preset": ""})


MIRROR_SETS: dict[str, dict[str, str]] = {
    "china": {
        "apt": "https://mirrors.aliyun.com",
        "pypi": "https://mirrors.aliyun.com/pypi/simple/",
        "conda": "https://mirrors.tuna.tsinghua.edu.cn/anaconda/cloud",
        "miniforge": "https://mirrors.tuna.tsinghua.edu.cn/github-release/conda-forge/miniforge",
        "hub": "https://hf-mirror.com",
    }
}


class Python(Section):
    """The Python environment at /data/env."""

    provider: Literal["auto", "conda", "venv"] = "auto"
    """auto: venv (the system's Python, 3.11 or newer) on the local cloud, conda (Miniforge, Python 3.12) elsewhere."""
    torch: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cpu on the local cloud, cuda elsewhere."""
    wheelhouse: str = ""
    """A folder of wheels on every node, looked into before the index (`pip --find-links`)."""


class Driver(Section):
    """The NVIDIA driver, on nodes that have a GPU."""

    branch: Annotated[int, Field(ge=580, le=999)] = 580
    """torch's CUDA 13 wheels need 580 or newer."""
    reboot: bool = True
    """Reboot a node when the loaded driver differs from the installed one."""


class LaunchSettings(Section):
    """How a run's ranks are started."""

    launcher: Literal["spotune", "deepspeed", "torchrun", "mpirun"] = "spotune"
    """spotune: one process a node imports everything once and forks the ranks; deepspeed: DeepSpeed's launcher, over
    pdsh; torchrun: one on each node; mpirun: Open MPI's, which the base deploy then installs."""


class Models(Section):
    """Base models to have at /data/models before training, by recipe, by id (OWNER/NAME) or folders of this machine."""

    names: Annotated[tuple[str, ...], Field(strict=False)] = ("tiny",)


class Network(Section):
    """What the provider promises between the nodes."""

    line_rate_gbps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    """In Gbit/s; 0: unknown. `fab check` compares what it measures with it."""


NotifyKind = Literal["ended", "failed", "reclaimed", "healed", "waiting", "budget"]


class Notify(Section):
    """What of a run is told to people, and where the addresses are. They are secrets: none stands here."""

    file: UserPath = Field(default=Path("~/.config/spotune/notify"), validate_default=True)
    """One apprise URL a line, readable by its owner alone; SPOTUNE_NOTIFY in the environment takes its place."""
    on: Annotated[tuple[NotifyKind, ...], Field(strict=False)] = get_args(NotifyKind)


RENTED = ("aliyun",)
"""Providers that rent; each has a table of its name, an inventory file and an adapter (inventory/cloud/opening.py)."""


class Settings(Section):
    """The whole of cluster.toml."""

    name: Annotated[
        str, spelled(CLUSTER_NAME, "one to eight small letters and digits are expected, a letter first")
    ] = "spotune"
    """Names what belongs to this cluster: bridge, hosts, run state."""
    provider: Literal["aliyun", "static"] = "aliyun"
    language: Literal["", "en", "zh"] = ""
    """Of the report of a run; empty: the terminal's, by LC_ALL and LANG."""
    ssh: Ssh = Ssh()
    nodes: Annotated[tuple[StaticNode, ...], Field(strict=False)] = ()
    aliyun: Aliyun = Aliyun()
    local: LocalCloud = LocalCloud()
    disk: DiskSettings = DiskSettings()
    network: Network = Network()
    notify: Notify = Notify()
    mirrors: Mirrors = Mirrors()
    python: Python = Python()
    driver: Driver = Driver()
    launch: LaunchSettings = LaunchSettings()
    models: Models = Models()

    @property
    def is_rented(self) -> bool:
        """Whether the machines come and go with `fab up` and `fab down`."""
        return self.provider in RENTED

    @property
    def is_listed(self) -> bool:
        """Whether the machines are the [[nodes]] of this file."""
        return self.provider == "static"

    @property
    def rental(self) -> Rental:
        """The table of the provider that rents the machines. Raises SettingsError where none does."""
        if not self.is_rented:
            known = " or ".join(f'provider = "{name}"' for name in RENTED)
            raise SettingsError(f'cluster.toml says provider = "{self.provider}"; renting and snapshots need {known}')
        table: Rental = getattr(self, self.provider)
        return table

    @property
    def on_this_machine(self) -> bool:
        """Whether the nodes are hosts of the local cloud."""
        return self.is_rented and self.rental.is_local

    @property
    def inventory(self) -> str:
        """The pyinfra inventory that lists these machines, as it is typed."""
        return f"inventory/{self.provider}.py"

    @property
    def deploy_command(self) -> str:
        """The base deploy of these machines, as it is typed."""
        return f"pyinfra -y {self.inventory} deploy/base.py"

    @property
    def python_provider(self) -> Literal["conda", "venv"]:
        """The provider with "auto" resolved."""
        if self.python.provider != "auto":
            return self.python.provider
        return "venv" if self.on_this_machine else "conda"

    @property
    def torch_flavour(self) -> Literal["cuda", "cpu"]:
        """The torch wheel's flavour with "auto" resolved."""
        if self.python.torch != "auto":
            return self.python.torch
        return "cpu" if self.on_this_machine else "cuda"


def _contradictions(content: Mapping[str, Any]) -> Iterable[str]:
    """What does not fit together in a file, also in one where some keys cannot be read."""
    provider, nodes = content.get("provider", "aliyun"), content.get("nodes", [])
    if isinstance(rented := content.get("aliyun", {}), dict):
        yield from aliyun_contradictions(rented)
    if not isinstance(nodes, list):
        return
    if provider != "static" and nodes:
        yield 'nodes: the list is read only with provider = "static"; remove it or change provider'
    if provider == "static":
        if not nodes:
            yield 'nodes: provider = "static" needs at least one [[nodes]] table with name and address'
        ssh = content.get("ssh", {})
        yield from _static_contradictions(
            [node for node in nodes if isinstance(node, dict)], ssh if isinstance(ssh, dict) else {}
        )


def _static_contradictions(nodes: list[dict[str, Any]], ssh: Mapping[str, Any]) -> Iterable[str]:
    names = [node.get("name") for node in nodes]
    addresses = [node.get("address") for node in nodes]
    ports = [node.get("port", ssh.get("port", Ssh().port)) for node in nodes]
    privates = [node.get("private_address", node.get("address")) for node in nodes]
    yield from _repeated("nodes.name", names)
    yield from _repeated("nodes.address", [a and f"{a}:{p}" for a, p in zip(addresses, ports, strict=True)])
    yield from _repeated("nodes.private_address", privates)
    for node in nodes:
        if node.get("card") and node.get("gpus") == 0:
            yield f"nodes.card: {node.get('name')} has gpus = 0, and says card = {node['card']!r}; one of them is wrong"
    if len(currencies := sorted({str(node["currency"]) for node in nodes if node.get("currency")})) > 1:
        yield f"nodes.currency: {', '.join(currencies)}; prices are added up, give them all in one currency"


def _repeated(key: str, values: list[Any]) -> Iterable[str]:
    """One sentence for each text that is there more than once; two spellings of an address are one."""
    texts = [address_text(v) if is_address(v) else v for v in values if isinstance(v, str)]
    for text in sorted({t for t in texts if texts.count(t) > 1}):
        yield f"{key}: {text!r} is listed {texts.count(text)} times; each node needs its own"


def load_settings(path: Path | None = None) -> Settings:
    """Read and check a settings file; without a path $SPOTUNE_CLUSTER, else ./cluster.toml.

    Raises SettingsError with one line a problem: key, value, what is possible instead.
    """
    path = path or settings_path()
    try:
        text = text_of(path)
    except FileNotFoundError:
        raise NoCluster(
            f"{path}: there is no such file; run spotune from its checkout, or name another file by ${PATH_VARIABLE}"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except EncodingError as error:
        raise SettingsError(str(error)) from None
    return settings_in(text, path)


def settings_path() -> Path:
    """Of the file that is read where none is named."""
    return Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)


def settings_in(text: str, path: Path) -> Settings:
    """The settings in a file's text; `path` is what it is called. Raises SettingsError as `load_settings`."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = of_another_width(text) or of_quotes(text)
        raise SettingsError(f"{path}: not valid TOML: {error}{where}") from None
    contradictions = list(_contradictions(content))
    try:
        settings, unreadable = Settings(**content), []
    except ValidationError as error:
        settings, unreadable = None, list(sentences(error, content, _known_keys()))
    if settings is None or contradictions:
        lacks_nodes = content.get("provider") == "static" and not content.get("nodes")
        kind = NoCluster if lacks_nodes else SettingsError
        raise kind("\n".join(f"{path}: {line}" for line in [*unreadable, *contradictions]))
    return settings


def _known_keys() -> list[str]:
    """Tables and, dotted, what is in them."""
    tables: dict[str, type[Section]] = {
        name: type(field.default) for name, field in Settings.model_fields.items() if isinstance(field.default, Section)
    }
    tables["nodes"] = StaticNode
    return [*Settings.model_fields, *(f"{name}.{key}" for name, table in tables.items() for key in table.model_fields)]
