"""Before launch: will it run, will it teach? Pure: facts in, an estimate and a table of checks out.

`facts` reads what `training.node.prepare` found, `teaching` and `running` judge it, `checks` is their table, `ladder`
knows what would need less memory, `predict` joins all. `options` reckons every strategy for some `machines` and
chooses; `deciding` lets it choose for a run. What things cost is counted in training/cost/.
"""
