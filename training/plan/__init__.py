"""Before launch: will it run, will it teach? Pure: facts in, an estimate and a table of checks out.

`facts` reads what `training.node.prepare` found, `data_checks` and `fits` judge it, `ladder` knows what would need less
memory, `predict` joins all. `options` reckons every strategy for some `machines` and chooses. What things cost is
counted in training/cost/.
"""
