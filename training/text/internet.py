"""How this machine's clients reach the internet, by the environment variables that all programs read: through which
proxy, and with whose certificates."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass

CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
PLAIN, SOCKS = ("http", "https"), ("socks5", "socks5h")


class InternetError(ValueError):
    """A variable whose value cannot be used; the message says which and what is possible."""


def ca_bundle() -> str:
    """The certificates to trust, as a company's proxy needs: the file or folder that the first of `CA_VARIABLES` names;
    empty: the client's own. Raises InternetError where there is none."""
    name = next((name for name in CA_VARIABLES if os.environ.get(name)), "")
    if name and not Path(os.environ[name]).exists():
        raise InternetError(f"{name} = {os.environ[name]}: there is no such file; it names the certificates to trust")
    return os.environ[name] if name else ""


def is_direct(host: str) -> bool:
    """Whether NO_PROXY names it."""
    return bool(proxy_bypass(host))


def proxy(host: str = "") -> str:
    """The proxy that https addresses, or those of a host, are asked through; empty: none. Raises InternetError for one
    that not every client here can use, whatever addresses it is for: the hub's client refuses each."""
    if host and is_direct(host):
        return ""
    proxies = getproxies_environment()
    for key in ("https", "all", "http"):
        scheme, separator, _ = proxies.get(key, "").partition("://")
        variable = f"{key.upper()}_PROXY"
        if separator and scheme.lower() not in (*PLAIN, *SOCKS):
            possible = ", ".join(f"{each}://" for each in (*PLAIN, *SOCKS))
            raise InternetError(f"{variable} names a proxy with {scheme}://, but only {possible} are possible")
        if separator and scheme.lower() in SOCKS and not (find_spec("socks") and find_spec("socksio")):
            raise InternetError(
                f"{variable} names a proxy with {scheme}://, which needs more packages: pip install -e '.[socks]'; "
                "or name the proxy's http:// address"
            )
    return proxies.get("https") or proxies.get("all", "")
