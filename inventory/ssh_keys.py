"""Which keys a node is offered, the settings' own and then the agent's, and why it takes none of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import paramiko
from paramiko.pkey import UnknownKeyType

from inventory.nodes import Node


class LoginRefused(paramiko.AuthenticationException):
    """The reason, in words for people."""


@dataclass(frozen=True)
class OfferedKeys:
    """AuthStrategy in place of paramiko's own order, which ends at a key of the agent that paramiko does not know."""

    node: Node

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Log in with the first key that will do. Raises LoginRefused."""
        own, reason = self._own_key()
        with closing(paramiko.Agent()) as agent:
            # Of a kind that paramiko does not know (FIDO) the agent signs all the same, once somebody touches it: last.
            others = sorted(agent.get_keys(), key=lambda key: getattr(key, "inner_key", None) is None)
            for key in (*own, *others):
                vars(key).setdefault("public_blob", getattr(key, "public_blob", None))  # paramiko 4 asks all for it
                try:
                    left = transport.auth_publickey(self.node.user, key)
                except paramiko.AuthenticationException:
                    if transport.is_active():
                        continue
                    break  # sshd hangs up after MaxAuthTries
                if left:
                    raise LoginRefused(
                        f"it accepts the key and wants a second factor ({', '.join(left)}), which no command can give: "
                        f"let {self.node.user} in by key alone (AuthenticationMethods in its sshd_config)"
                    )
                return []
        raise LoginRefused(reason)

    def _own_key(self) -> tuple[Sequence[paramiko.PKey], str]:
        """The settings' key where it can be used from here, and what is to be said where no key will do."""
        path, user = self.node.key, self.node.user
        add = f"add it to your agent: ssh-add {shlex.quote(str(path))}"
        try:
            return [paramiko.PKey.from_path(path)], f"it refuses the key {path} for user {user}; [ssh] key says which"
        except (paramiko.PasswordRequiredException, TypeError):  # cryptography's own word for it, which comes through
            return [], f"the key {path} has a passphrase; {add}"
        except UnknownKeyType as error:
            return [], f"only an agent can use keys like {path} ({error.key_type}, a security key?); {add}"
        except FileNotFoundError:
            raise
        except (paramiko.SSHException, OSError, ValueError) as error:
            return [], f"the key {path} cannot be read: {error}"
