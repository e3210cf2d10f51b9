"""Fine-tuning, in two rooms and what both read.

`node/` is shipped into a run's folder and runs on the nodes. On every rank: `node.finetune`, which is the training and
the place to begin reading, with the modules it imports: `model`, `attention` and `loss` make one micro-batch's loss of
the rows of `data/`, `strategies/` spread that over the ranks; `node.commcheck` in its place for `fab check`. On the
head and around the ranks, outliving every terminal: `node.supervision`.

`laptop/` is on your machine: the tasks, and what makes, starts, follows and fetches runs. It alone knows inventory.

Both read the rest, which is shipped too: `text/` (errors, counts, files), `recipe/`, `models/`, `run/` (a run's folder,
launch, events, causes), `data/`, `cost/` (what a run needs), `plan/` (whether it will fit and teach).
"""
