"""Fine-tuning: what runs on the nodes, and what starts and watches it. Imports none of the other folders.

On every rank: `finetune`, which is the training itself and the place to begin reading, with the modules it
imports: `data/` gives rows, `model`, `attention` and `loss` make one micro-batch's loss of them, `strategies/` spread
that over the ranks; `commcheck` in its place for `fab check`. On the head and around the ranks, outliving every
terminal: `supervision/`. On your machine: `tasks` and `control/`. All of them share `recipe`, `launch`, `run_folder`,
`sums`, `exit_codes`, `causes` (why a run ended) and `events` (what ranks tell).
"""
