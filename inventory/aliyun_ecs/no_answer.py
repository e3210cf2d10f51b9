"""What a call without an answer of the API says: the words of HTTP libraries, which quote URLs, in ours. Pure."""

from __future__ import annotations

from inventory.aliyun_ecs.errors import ADVICE
from inventory.cloud.errors import Kind

REASONS: tuple[tuple[tuple[str, ...], Kind, str], ...] = (
    (
        ("certificate_verify_failed", "certificate verify failed"),
        Kind.INPUT,
        "the certificate of {host} is not trusted by this machine (a proxy in between, or an old CA bundle?)",
    ),
    (("proxy",), Kind.PASSING, "the proxy that HTTP_PROXY or HTTPS_PROXY names cannot be used"),
    (
        ("failed to resolve", "name or service not known", "getaddrinfo", "temporary failure in name resolution"),
        Kind.PASSING,
        "{host} cannot be found: is there a network, and is the region's name right?",
    ),
    (("timed out", "timeout"), Kind.PASSING, "no answer from {host} within {read_s:.0f} s"),
    (("refused",), Kind.PASSING, "nothing answers at {host}"),
    (("expecting value", "json", "has no attribute"), Kind.PASSING, "{host} gave an answer that is not the API's"),
    (
        ("credential", "unable to load"),
        Kind.AUTH,
        "the credentials cannot be read any more (expired, or their source is gone)",
    ),
)
CUT = "the connection to {host} was cut before the answer came"


def no_answer(action: str, said: str, host: str, read_s: float) -> tuple[Kind, str]:
    """The class of a call without an answer, and the sentence about it; `said` is what the libraries said."""
    low = said.lower()
    known = (row for row in REASONS if any(word in low for word in row[0]))
    _, kind, reason = next(known, ((), Kind.PASSING, CUT))
    asks = reason.endswith("?")  # a name that cannot be found is looked at, not tried again
    advice = "" if kind is Kind.INPUT or asks else f"; {ADVICE[kind]}"
    return kind, f"{action}: {reason.format(host=host, read_s=read_s)}{advice}"
