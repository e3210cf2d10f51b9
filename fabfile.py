"""The map of spotune: `fab --list`."""

import sys

from invoke import Collection

import deploy.tasks
import inventory.renting.tasks
import inventory.tasks
import snapshots.tasks
import training.laptop.adapter.tasks
import training.laptop.list_tasks
import training.laptop.prove.tasks
import training.laptop.tasks
import training.laptop.workload
from inventory.command_line import end_quietly_without_a_reader, read_command_line, refuse_malformed_flags
from inventory.local_address import any_cloud
from inventory.renting.workload import HandedOver

namespace = Collection()
folders = (
    inventory.tasks,
    inventory.renting.tasks,
    deploy.tasks,
    snapshots.tasks,
    training.laptop.tasks,
    training.laptop.adapter.tasks,
    training.laptop.list_tasks,
    training.laptop.prove.tasks,
)
# Most users have no local cloud: its tasks are listed where there is one, and by `fab --list=local`.
listing = sys.argv[0].endswith("fab") and sys.argv[1:] in ([], ["--list"], ["-l"])
hidden = ["local"] if listing and not any_cloud() else []
for folder in folders:
    part = folder.namespace
    for task in part.tasks.values():
        namespace.add_task(task)
    for name, collection in part.collections.items():
        if name not in hidden:
            namespace.add_collection(collection)
# What a folder's tasks ask of another's work is handed to them here, as `c.spotune`: no folder imports its neighbour.
handed_over = HandedOver(
    workload=training.laptop.workload.TrainingWorkload(),
    doctor=deploy.tasks.doctor,
    keep_packages=deploy.tasks.KEEP_PACKAGES,
    cpu_requirements=deploy.tasks.cpu_requirements,
)
namespace.configure({"spotune": handed_over})
end_quietly_without_a_reader()
refuse_malformed_flags(namespace)
of_a_run = ("evaluate", "fetch", "generate", "logs", "merge", "runs.delete", "stop")
bare_words = {"data": "data", "down": "node", "publish": "repo", "ssh": "node", **dict.fromkeys(of_a_run, "run")}
read_command_line(bare_words, namespace)
