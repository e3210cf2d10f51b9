"""Distribution packages: first-boot work waited for, mirrors, what a node needs. Never `apt upgrade`:
that would move the kernel and the driver under a cluster that works.

Packages that a snapshot brought along are installed from /data: they lie there as a small archive of their own
(on_node/keep_packages.py), whose sums apt checks. The distribution's archive is asked only for what is missing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.server import Command
from pyinfra.operations import apt, systemd

from deploy.environment import NO_INTERNET
from deploy.managed import file_text, keep_file, managed, put_text
from deploy.node_files import REFUSED, refuse_unless, shell, text_of
from deploy.node_operation import Commands, known, node_operation
from deploy.on_node.keep_packages import PLACE
from deploy.on_node.reach import ARCHIVES
from inventory.node_program import argv
from inventory.settings import Settings

APT_GET = (
    "DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends"
    " -o Dpkg::Options::=--force-unsafe-io -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
)
APT_UPDATE = "apt-get -q -o Acquire::Languages=none update"
LISTS_LOCK = "/var/lib/apt/lists/lock"
_WAIT = f"import fcntl; fcntl.lockf(open('{LISTS_LOCK}', 'a'), fcntl.LOCK_EX)"
UPDATE = f"timeout 600 python3 -c {shlex.quote(_WAIT)}; {APT_UPDATE}"
"""`apt-get update` does not wait for the lock of its lists, whatever DPkg::Lock::Timeout says: a first boot has it."""


def install_commands(packages: Sequence[str], refresh: str = UPDATE, place: str = PLACE) -> tuple[str, str]:
    """Shell that installs what is kept of these packages and all they need, and shell that installs from the archive
    where one of them is still missing; `refresh` is what brings its index up to date."""
    wanted = shlex.join(packages)
    missing = f"dpkg-query -W -f '${{db:Status-Status}}\\n' {wanted} 2>&1 | grep -qvx installed"
    install_kept = shell(
        "install_kept.sh", place=place, packages=" ".join(packages), update=APT_UPDATE, apt_get=APT_GET
    )
    return install_kept, f"if {missing}; then {{ {refresh}; }} && {APT_GET} install {wanted}; fi"


_HOST = r"(?:[\w-]+\.)*(?:ubuntu\.com|debian\.org|huaweicloud\.com|[\w-]*mirrors?[\w-]*\.[\w.-]+)(?::\d+)?"
_OWN_ARCHIVES = rf"https?://{_HOST}"
"""The distribution's own archives: at its own hosts, or at those that call themselves mirrors. Other vendors have such
folders too (packages.microsoft.com/ubuntu/22.04/prod, archive.canonical.com/ubuntu), which no mirror has."""


_PARAGRAPH = re.compile(r"(?:.*\S.*\n?)+")


def _archives(*hosts: str) -> re.Pattern[str]:
    """Matches each archive at one of these hosts, its folder as the group; and comments, without a group."""
    folder = r"/(debian|debian-security|ubuntu)(?=/?(?:\s|$))"
    return re.compile(rf"^[ \t]*#.*|(?:{'|'.join(hosts) or '(?!)'}){folder}", re.MULTILINE)


def through_mirror(text: str, mirror: str, earlier: Sequence[str] = ()) -> str:
    """The sources file with the distribution's archives, and what an earlier mirror has, fetched from `mirror`.

    Mirrors are scheme and host. Only addresses change; comments stay.
    """
    archives = _archives(_OWN_ARCHIVES, *map(re.escape, earlier))
    return archives.sub(lambda match: f"{mirror.rstrip('/')}/{match[1]}" if match[1] else match[0], text)


def without_mirror(text: str, first: str, mirrors: Sequence[str]) -> str:
    """The sources file with what these mirrors have fetched from where `first` has it: the file before it had a mirror.

    Archives go back by their pockets, those of one pocket in their order; one of another goes where the first archive
    of its folder was.
    """
    own, mirrored = _archives(_OWN_ARCHIVES), _archives(*map(re.escape, mirrors))
    places = [
        (match[1], _pockets(paragraph, match), match[0])
        for paragraph in _PARAGRAPH.findall(first)
        for match in own.finditer(paragraph)
        if match[1]
    ]

    def place(paragraph: str, match: re.Match[str]) -> str:
        of_folder = [each for each in places if each[0] == match[1]]
        of_pocket = [each for each in of_folder if each[1] & _pockets(paragraph, match)]
        if len(of_pocket) > 1:  # the next one of this pocket goes to the next place
            places.remove(of_pocket[0])
        nearest = of_pocket or of_folder
        return nearest[0][2] if nearest else match[0]

    return _PARAGRAPH.sub(lambda paragraph: mirrored.sub(partial(place, paragraph[0]), paragraph[0]), text)


def _pockets(paragraph: str, match: re.Match[str]) -> set[str]:
    """What is fetched from an archive of a sources file, as `security` of noble-security, by its own line or by its
    paragraph; empty for the release itself, as another release of the same pocket has the same place."""
    named = re.search(r"^Suites:(.*(?:\n[ \t].*)*)", paragraph, re.MULTILINE | re.IGNORECASE)
    line = paragraph[match.end() :].partition("\n")[0]
    suites = named[1].split() if named else line.lstrip("/").split()[:1]
    return {suite.partition("-")[2] for suite in suites}


BASE_PACKAGES = [
    # what one works with on a node
    "git", "curl", "wget", "tmux", "htop", "ncdu", "unzip", "ca-certificates",
    # the launcher, and files from node to node
    "pdsh", "ninja-build", "rsync",
    # the data disk: made, grown, checked
    "e2fsprogs", "xfsprogs", "fdisk", "cloud-guest-utils",
    # the driver and its GPU
    "pciutils", "kmod",
]  # fmt: skip

COMPILERS = ["build-essential"]
"""Triton's kernels and DeepSpeed's own optimizers are compiled where they first run: on GPUs. Nothing is on a CPU node,
and they are two thirds of all the packages' bytes, on every new machine again.
"""

ORIGINALS = "/var/lib/spotune/apt-sources"
"""Below it each sources file as it was before it had a mirror, under its whole path, and the mirrors that were set."""
MIRRORS = managed(f"{ORIGINALS}/mirrors")
APT_LOCK = managed("/etc/apt/apt.conf.d/90spotune-lock")
NEEDRESTART = managed("/etc/needrestart/conf.d/spotune.conf")
UPGRADES = managed("/etc/systemd/system/apt-daily-upgrade.service.d/spotune.conf")
PDSH = managed("/etc/pdsh/rcmd_default")
FIRST_BOOT = "cloud-init status 2>/dev/null | sed -n 's/^status: *//p' | grep . || true"
"""Prints cloud-init's state in one word ("running", "done", ...), nothing where there is no cloud-init."""
FIRST_BOOT_FAILED = (
    "cloud-init ended with an error, which `cloud-init status --long` on the node names; "
    "the next deploy goes on without what it left undone"
)
REACH = Path(__file__).parent / "on_node" / "reach.py"
APT_SOURCES = r"find /etc/apt -maxdepth 2 \( -name '*.list' -o -name '*.sources' \) | sort"


def packages_for(settings: Settings) -> list[str]:
    """What the distribution is asked for on every node. Pure."""
    compiles, system_python = settings.torch_flavour == "cuda", settings.python_provider == "venv"
    return [
        *BASE_PACKAGES,
        *(COMPILERS if compiles else []),
        *(["python3-venv"] if system_python else []),
        *(["python3-dev"] if system_python and compiles else []),
    ]


@deploy("Packages")
def install_packages() -> None:
    """Everything the other deploys stand on."""
    wait_for_first_boot(name="First-boot package work is over", _timeout=1200)
    keep_file(name="apt waits for its lock", path=APT_LOCK, text='DPkg::Lock::Timeout "600";\n')
    set_apt_mirror(name="apt sources", mirror=host.data.settings.mirrors.resolved().apt)
    protect_runs()
    settings = host.data.settings
    packages = packages_for(settings)
    reach_archives(name="Package archives", packages=packages)
    present_packages(
        name="Base packages",
        packages=packages,
        index=settings.torch_flavour == "cuda",
        _retries=5,
        _retry_delay=10,
        _timeout=1800,
    )
    keep_file(name="pdsh calls over ssh", path=PDSH, text="ssh\n")


@deploy("Runs are not interrupted")
def protect_runs() -> None:
    """Neither unattended upgrades nor the restarts after any upgrade end a run."""
    keep_file(name="needrestart leaves runs alone", path=NEEDRESTART, text=text_of("needrestart.conf"))
    condition = keep_file(name="Upgrades wait for runs", path=UPGRADES, text=text_of("apt_daily_upgrade.conf"))
    systemd.daemon_reload(name="systemd reads that", _if=condition.did_change)


@node_operation
def wait_for_first_boot() -> Commands:
    """Wait for cloud-init: its package work holds apt's lock, and it may still rewrite /etc/hosts."""
    if host.get_fact(Command, FIRST_BOOT) in ("running", "not started", "not run"):
        # Exit code 2 is "done, with recoverable errors": no reason to stop here.
        yield refuse_unless("{ cloud-init status --wait >/dev/null; [ $? -ne 1 ]; }", FIRST_BOOT_FAILED)
    else:
        host.noop("no first-boot work is running")


@node_operation
def set_apt_mirror(mirror: str) -> Commands:
    """Point the distribution's archives to a mirror; with an empty one, back to where they were. All else stays."""
    mirrors = (file_text(MIRRORS) or "").split()
    if mirror and mirror.rstrip("/") not in mirrors:
        mirrors.append(mirror.rstrip("/"))
        yield from put_text(MIRRORS, "\n".join([*mirrors, ""]))  # before any address changes
    for path in (host.get_fact(Command, APT_SOURCES) or "").splitlines():
        current, first = file_text(path) or "", file_text(f"{ORIGINALS}{path}")
        restored = without_mirror(current, first or "", mirrors)
        wanted = through_mirror(restored, mirror, mirrors) if mirror else restored
        if wanted == current:
            continue
        if first is None:
            yield from put_text(f"{ORIGINALS}{path}", current, mode=None)
        yield from put_text(path, wanted, mode=None)
        yield f"rm -f {apt.APT_UPDATE_FILENAME}"


def reach_command(place: str, failure: str) -> str:
    """Shell that fails with one sentence where nothing at `place`, as reach.py has it, takes a connection."""
    why = f"{failure} ($(echo $far)): {NO_INTERNET}"
    return f'{{ far=$({shlex.join(argv(REACH, place))}) || {{ echo "{why}" >&2; exit {REFUSED}; }}; }}'


@node_operation
def reach_archives(packages: Sequence[str]) -> Commands:
    """Whether a node that lacks packages reaches any archive: said at once, where apt would try for minutes."""
    if missing_packages(packages):
        why = f"{host.data.node.name} reaches no package archive"
        yield f"ls {PLACE}/*/Packages >/dev/null 2>&1 || {reach_command(ARCHIVES, why)}"
    else:
        host.noop("no package is missing")


def missing_packages(packages: Sequence[str]) -> list[str]:
    """Those of them that this node has not."""
    installed = known(DebPackages)
    return [package for package in packages if package not in installed]


@node_operation
def present_packages(packages: Sequence[str], index: bool) -> Commands:
    """Install what is missing, from /data where it was kept; a second run touches nothing.

    index: whether apt's index is to be fresh even where all was kept, for the driver that is looked up in it
    """
    missing = missing_packages(packages)
    if not missing:
        host.noop("the packages are installed")
        return
    install_kept, archive = install_commands(missing, refresh="true" if index else UPDATE)
    if index:  # first: where it fails something is still missing, and the next deploy asks again
        yield UPDATE
    yield install_kept
    yield archive
