"""Fine-tuning: what runs on the nodes, and what starts and watches it. Imports none of the other folders.

The modules are of three kinds, by where they run. On every rank: `finetune`, which is the training itself and the
place to begin reading, with `rank`, `data`, `loss`, `rng`, `metrics`, `checkpoint`, `heartbeat` and `strategies/`;
`commcheck` in its place for `fab check`; `rank_start` around either. On the head node, outliving every terminal:
`supervise`, with `failure`, `reach` and `sweep`, standard library only; `generate` and `tiny` when asked for. On your
machine: `tasks`, with `begin`, `runs`, `head`, `ship`, `attend`, `follow`, `show`, `fetch` and `comm_report`. All of
them share `recipe`, `launch`, `run_folder`, `sums` and `exit_codes`.
"""
