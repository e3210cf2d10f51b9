"""This machine's files over sftp, as a login user other than root sees them; a test may have them lied about, cut
off or kept back."""

import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

import paramiko


@dataclass
class Files:
    """What a server's sftp does otherwise than OpenSSH's, and what it did."""

    listed: dict[str, str] = field(default_factory=dict)
    """One more name in a folder of this last component."""
    announced: dict[str, int] = field(default_factory=dict)
    """The size that is told of files of this name."""
    cut_after: int | None = None
    """Bytes after which every connection is closed."""
    silent_after: int | None = None
    """Bytes after which nothing is answered any more."""
    absent: bool = False
    """There is no sftp."""
    ends: bool = False
    """The sftp server ends before it says a word, as where its program is missing."""
    full: bool = False
    """It takes no file."""
    served: int = 0
    """Bytes so far."""
    modes: dict[str, int] = field(default_factory=dict)
    """Mode that each file was given that was sent here."""
    back: threading.Event = field(default_factory=threading.Event)
    """Set once the server closes, for what is silent."""


class Sftp(paramiko.SFTPServerInterface):
    def __init__(self, door):
        super().__init__(door)
        self.server, self.files = door.server, door.server.files

    def list_folder(self, path):
        if not Path(path).is_dir():
            return paramiko.SFTP_NO_SUCH_FILE
        entries = [paramiko.SFTPAttributes.from_stat(entry.lstat(), entry.name) for entry in Path(path).iterdir()]
        if name := self.files.listed.get(Path(path).name):
            entries.append(paramiko.SFTPAttributes())
            entries[-1].filename, entries[-1].st_mode = name, stat.S_IFREG | 0o644
        return entries

    def stat(self, path):
        return self._attributes(path, follow=True)

    def lstat(self, path):
        return self._attributes(path, follow=False)

    def _attributes(self, path, follow):
        try:
            attributes = paramiko.SFTPAttributes.from_stat(Path(path).stat(follow_symlinks=follow))
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        attributes.st_size = self.files.announced.get(Path(path).name, attributes.st_size)
        return attributes

    def open(self, path, flags, attr):
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if writes and self.files.full:
            return paramiko.SFTP_FAILURE
        if not writes and not Path(path).is_file():
            return paramiko.SFTP_NO_SUCH_FILE
        if not writes and not Path(path).stat().st_mode & 0o004:
            return paramiko.SFTP_PERMISSION_DENIED
        try:
            descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        return _Handle(self.server, path, flags, os.fdopen(descriptor, "wb" if writes else "rb"))


class _Handle(paramiko.SFTPHandle):
    def __init__(self, server, path, flags, file):
        super().__init__(flags)
        self.server, self.files, self.path = server, server.files, path
        self.readfile = self.writefile = file

    def stat(self):
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))

    def chattr(self, attr):
        paramiko.SFTPServer.set_file_attr(self.path, attr)
        self.files.modes[self.path] = attr.st_mode
        return paramiko.SFTP_OK

    def read(self, offset, length):
        data = super().read(offset, length)
        self.files.served += len(data)
        if self.files.cut_after is not None and self.files.served > self.files.cut_after:
            self.server.cut()
        if self.files.silent_after is not None and self.files.served > self.files.silent_after:
            self.files.back.wait()
        return data
