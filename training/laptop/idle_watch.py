"""Starts the head's own watch for `hours_idle` (training/node/idle), which goes on with this laptop away."""

from __future__ import annotations

import shlex

from inventory.cloud.opening import open_cloud
from inventory.cloud.values import CLUSTER_TAG, RoleAccess
from inventory.errors import InventoryError
from inventory.renting import idle
from inventory.settings import Settings
from training.laptop.head_node import HeadError
from training.laptop.open_cluster import OpenCluster
from training.launch import Launch

UNIT = "spotune-idle"
ROLE_MISSING = (
    "hours_idle waits for the next command of this laptop; {key} in cluster.toml names a role by which the head does "
    "without (docs/aliyun.md)"
)


def role_of(settings: Settings | None) -> str:
    """The role by which the head lets idle machines go; empty where nothing is to watch."""
    if settings is None or not settings.is_rented:
        return ""
    return settings.rental.idle_role if settings.rental.hours_idle else ""


def said_beforehand(cluster: OpenCluster) -> str:
    """What becomes of the machines after a run that nobody follows, where `hours_idle` says anything of it."""
    settings = cluster.settings
    if settings is None or not settings.is_rented or not settings.rental.hours_idle:
        return ""
    if not role_of(settings):
        return ROLE_MISSING.format(key=settings.rental.key("idle_role"))
    try:
        watches = cluster.head.shell(f"systemctl is-active {UNIT}; true").strip() == "active"
    except HeadError:
        watches = False
    if not watches:
        return f"hours_idle waits for the next command of this laptop: {UNIT} does not run on {cluster.head.name}"
    return (
        "When no run, no program with a model and no ssh has used them for "
        f"{idle.idle_text(settings)}, the head lets them go sooner "
        "(hours_idle); its data disk stays as keep_data_disk says"
    )


def stop(cluster: OpenCluster) -> None:
    """Before a start moves the release time: the watch that an earlier one left ends, whatever is set by now. Raises
    HeadError."""
    if cluster.settings and cluster.settings.is_rented:
        cluster.head.shell(f"systemctl stop {UNIT} 2>/dev/null; true")


def start(cluster: OpenCluster, launch: Launch) -> None:
    """From now on the head watches by itself whether its machines idle. What keeps it from that is said, and ends
    nothing."""
    if not role_of(cluster.settings):
        return
    assert cluster.settings
    try:
        access = idle.let_head_release(open_cloud(cluster.settings), cluster.settings)
        cluster.head.shell(_restarted(cluster, cluster.settings, launch, access))
    except (InventoryError, HeadError) as error:
        print(f"hours_idle waits for the next command of this laptop: {error}")


def _restarted(cluster: OpenCluster, settings: Settings, launch: Launch, access: RoleAccess) -> str:
    """The shell command that starts the watch anew, from the run's own code."""
    log = f"append:{launch.run_dir}/logs/idle.log"
    properties = {"WorkingDirectory": launch.run_dir, "StandardOutput": log, "StandardError": log, "MemoryMax": "128M"}
    argv = [
        *("systemd-run", f"--unit={UNIT}", "--collect", "--quiet"),
        *(f"--property={key}={value}" for key, value in properties.items()),
        *(launch.python, "-u", "-m", "training.node.idle.watch"),
        *("--endpoint", access.endpoint, "--region", settings.rental.region, "--role", settings.rental.idle_role),
        *("--metadata", access.metadata, "--tag-key", CLUSTER_TAG, "--tag-value", settings.name),
        *("--hours-idle", f"{settings.rental.hours_idle:g}", "--port", str(cluster.nodes[0].port)),
        *("--nodes", *(node.name for node in cluster.nodes)),
        *("--own", *(node.private_address for node in cluster.nodes)),
    ]
    return f"systemctl stop {UNIT} 2>/dev/null; {shlex.join(argv)}"
