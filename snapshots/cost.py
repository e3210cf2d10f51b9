"""What snapshots and scratch disks cost. Pure.

The API tells no price of snapshots: it stands in cluster.toml. Billing is by written block and incremental, so what
is computed from a disk's used bytes is the most one snapshot adds.
"""

from __future__ import annotations

from inventory.cloud.values import HOURS_A_MONTH, Price


def money(amount: float, currency: str = "") -> str:
    """An amount as a table shows it."""
    return f"{amount:.2f}{f' {currency}' if currency else ''}"


def before_creating(used_gib: float, price_gib_month: float, key: str) -> str:
    """What a snapshot of so much will cost, in one sentence. `key`: the setting that says the price."""
    price = money(used_gib * price_gib_month)
    return (
        f"{used_gib:.1f} GiB are written on /data: the snapshot costs at most {price} a month at "
        f"{price_gib_month:g} a GiB ({key}); unchanged blocks of earlier snapshots are shared"
    )


def scratch_sentence(gib: int, month: Price | None) -> str:
    """What a disk that lives for the length of a check costs."""
    if month is None:
        return f"a scratch disk of {gib} GiB is billed while it is there; the cloud told no price"
    hour = month.trade / HOURS_A_MONTH
    return f"a scratch disk of {gib} GiB costs {money(hour, month.currency)} for each hour that has begun"
