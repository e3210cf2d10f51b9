"""Before launch: will it run, will it teach? Pure: facts in, an estimate and a table of checks out.

`shape` counts a model's parameters, `memory` the bytes a GPU must hold, `pace` the seconds and the disk, `facts` reads
what `training.prepare` found, `teaching` and `running` judge it, `checks` is their table, `predict` joins all.
"""
