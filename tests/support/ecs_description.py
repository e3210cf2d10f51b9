"""The vendor's own description of the API, in the form that the local cloud keeps it in (parameters.json)."""

import json

from inventory.localcloud.ecs.actions import ECS, STS, VPC
from tests.support.ecs_samples import FOLDER

VERSIONS = {"ecs": ECS, "vpc": VPC, "sts": STS}
KINDS = {"Integer": ":i", "Long": ":i", "Float": ":f", "Boolean": ":b"}


def words_of(parameters, above=""):
    """One word a parameter; a structure whose parts are named beside it has no word of its own."""
    names = [each["name"] for each in parameters]
    for each in parameters:
        name, needed = above + each["name"], "!" if each["required"] else ""
        is_list = each["type"] in ("RepeatList", "Array")
        if below := each.get("sub_parameters"):
            inner = f"{name}.N." if is_list else f"{name}."
            yield from words_of(below, inner)
        elif each["type"] == "RepeatList":
            yield f"{name}.N{needed}"
        elif each["type"] in ("Array", "Struct"):
            if not any(other.startswith(f"{each['name']}.") for other in names):
                yield f"{name}.N.*" if is_list else f"{name}.*"
        else:
            yield f"{name}{needed}{KINDS.get(each['type'], '')}"


def parameters_of(actions):
    """The lines of these (version, action), as the vendor describes them; none of one that it does not."""
    told = json.loads((FOLDER / "api" / "actions.json").read_text(encoding="utf-8"))
    found = {(VERSIONS[product], name): each for product in told for name, each in told[product].items()}
    lines = {}
    for version, name in sorted(actions & set(found)):
        lines.setdefault(version, {})[name] = " ".join(words_of(found[version, name]["parameters"]))
    return lines
