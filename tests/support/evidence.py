"""Everything that a test leaves behind where a secret could be: files, output, command lines; and the secrets."""

import os
import re
import threading
from pathlib import Path

LONGEST = 64 * 2**20
KEEPERS = ("credentials.ini", "id_rsa", "id_ed25519", "operator_key", "ssh_host_", "id_cluster")
"""Files whose purpose is to hold a secret, by the beginning of their names; they must be their owner's alone."""
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----\n(.*?)\n-----END", re.DOTALL)
SECRET_LINE = re.compile(r"^(?:access_key_secret|security_token)\s*=\s*(\S+)", re.MULTILINE)
NODE_KEYS = "cat /root/.ssh/id_cluster /etc/ssh/ssh_host_*_key 2>/dev/null; true"
NODE_LOGS = (
    "journalctl --no-pager -b; cat /data/runs/*/logs/* /var/log/cloud-init* /run/spotune/reclaim/* 2>/dev/null; "
    "cat /data/runs/*/*.json /etc/systemd/system/spotune* /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; true"
)


def _files(folder):
    """Every file below a folder but those inside the hosts' own file systems."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in {"root", "images", "checkpoints"}]
        yield from (path for name in names if (path := Path(parent) / name).is_file() and not path.is_symlink())


class Evidence:
    """Gathers while it is entered; `leaks` says where which secret was seen."""

    def __init__(self):
        self.secrets = {}
        self.texts = {}
        self.argvs = set()
        self.keepers = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _watch(self):
        """Thread: every command line there is, again and again."""
        while not self._over.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.argvs.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    continue

    def said(self, what, text):
        """What a command printed."""
        self.texts[f"{len(self.texts)} {what}"] = text

    def keep(self, where, text):
        """Remember the secrets in a text that may have some."""
        for body in PRIVATE_KEY.findall(text):
            # the first lines of every ed25519 key are alike
            for line in [line for line in body.splitlines() if len(line) > 40][1:] or body.splitlines()[-1:]:
                self.secrets[line] = f"a private key of {where}"
        for secret in SECRET_LINE.findall(text):
            self.secrets[secret] = f"a credential of {where}"

    def gather(self, folder):
        """Every file below a folder that is neither huge nor meant to hold a secret."""
        for path in _files(Path(folder)):
            if path.name.startswith(KEEPERS) and not path.name.endswith(".pub"):
                self.keepers.append(path)
                self.keep(path, path.read_text(errors="replace"))
            elif path.stat().st_size < LONGEST and path.suffix not in {".img", ".raw", ".safetensors", ".npy"}:
                self.texts[str(path)] = path.read_text(errors="replace")

    def gather_nodes(self, cluster, names):
        """The nodes' keys, and what they have logged."""
        self.keep("this machine", cluster.cluster.head.key.read_text())
        for name in names:
            self.keep(name, cluster.on(name, NODE_KEYS))
            self.texts[f"logs of {name}"] = cluster.on(name, NODE_LOGS, timeout=120)

    def leaks(self):
        """One phrase for each secret in each place it does not belong to."""
        places = {**self.texts, **{f"argv {argv[:60]}": argv for argv in self.argvs}}
        return [
            f"{whose} is in {place}"
            for secret, whose in self.secrets.items()
            for place, text in places.items()
            if secret in text
        ]
