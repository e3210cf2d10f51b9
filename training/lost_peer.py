"""The words in which torch, gloo and NCCL say that a partner went away. Standard library only.

Whoever says them is a witness: the cause is to be found on the one that went. NCCL's watchdog ends its own process
with SIGABRT after such words, minutes or milliseconds after the partner did.
"""

from __future__ import annotations

import re

WORDS = re.compile(
    r"Connection (was )?(closed|reset|refused) by (remote )?peer|Connection closed by (localRank|remote)|"
    r"Connection (closed|reset|timed out|refused)|Broken pipe|recvValueWithTimeout failed|failed to recv, got 0 bytes|"
    r"ncclRemoteError|ncclSystemError|remote process exit(ed|ing)|collective operation timeout|"
    r"communicator was aborted|[Tt]imed out waiting|[Tt]imed? ?out after|Socket Timeout|"
    r"TCPStore server has shut down",
    re.IGNORECASE,
)


def said(text: str) -> bool:
    """Whether a text has such words."""
    return WORDS.search(text) is not None
