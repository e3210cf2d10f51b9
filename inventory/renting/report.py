"""`fab cost` and the machines of `fab status`: the cloud asked, and what it said in tables."""

from __future__ import annotations

from contextlib import nullcontext, suppress

from inventory.cloud.errors import CloudError
from inventory.cloud.opening import open_cloud
from inventory.cloud.port import Cloud
from inventory.renting import bill, budgets, cost, elsewhere, kept_disks, ledger, members, show, tags
from inventory.renting.disks import waiting_for
from inventory.renting.holdings import holdings
from inventory.renting.way_back import WayBack, newest
from inventory.settings import Settings


def report_cost(cloud: Cloud, settings: Settings) -> None:
    """Machines so far and until they are released, disks and snapshots a month, past machines, the budget; what is
    there is written into the ledger."""
    there = holdings(cloud, settings)
    instances, disks, snapshots = there.machines, there.disks, there.snapshots
    with suppress(CloudError):  # then there is no price to show
        instances = cost.with_price_tags(cloud, settings, instances)
    now = cloud.now()
    book = ledger.Ledger.of(cloud, settings)
    past, currency = book.record(instances, now), book.currency
    book.record_kept(disks, snapshots, now)
    outlive = [d for d in ledger.stays(disks) if d.instance_id]
    months = cost.disk_months(cloud, cost.loose(disks))
    with nullcontext() if settings.rental.budget else suppress(CloudError):  # without one it is said, not summed up
        months |= cost.disk_months(cloud, outlive)
    spent = cost.spent(instances, past, cost.month_shares(cost.loose(disks), months, past, now), now, currency)
    show.show(*there.notes)
    if instances:
        show.show(bill.cost_table(instances, now))
    else:
        left = WayBack(waiting_for(disks, {1}).get(1), newest(snapshots))
        show.show(f"the cluster {settings.name!r} has no machines in {cloud.region_id}; {left.without_machines()}")
    show.show(*bill.stays_lines(cost.loose(disks), months, snapshots, settings, currency))
    show.show(*(each.line for each in elsewhere.left_elsewhere(cloud, settings)))
    if table := bill.past_table(past, settings.name, now):
        show.show(table)
    show.show(bill.month_line(spent, currency))
    budget = settings.rental.budget
    if budget:
        show.show(budgets.left(budget, spent, currency))
    outliving = kept_disks.of_machines(outlive, months, instances, now)
    more = kept_disks.beyond(budget, spent.committed, outliving, currency)
    if said := more or kept_disks.after_release(outliving, currency):
        show.show(said)


def show_machines(settings: Settings) -> None:
    """The rented machines' states and release times, and what is billed elsewhere. Raises CloudError."""
    cloud = open_cloud(settings)
    instances = cloud.instances(tags=tags.of_cluster(settings.name))
    if instances:
        show.show(show.machines_table(instances, settings, cloud.now()))
        if stopped := [members.label(each) for each in instances if each.status == "Stopped"]:
            show.show(f"stopped: {', '.join(stopped)}; fab up starts what is stopped")
        if lacking := members.lacking(members.names(members.present(instances)), settings):
            show.show(f"{lacking.message}: {lacking.mend}")
        show.show(*elsewhere.lines(cloud, settings))  # where there are none, why the command ends says it


def elsewhere_lines(settings: Settings) -> tuple[str, ...]:
    """The same of what is billed elsewhere, for a command that works on the machines; none where none are rented."""
    return elsewhere.lines(open_cloud(settings), settings) if settings.is_rented else ()
