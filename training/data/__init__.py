"""From the user's files to what the ranks train on: checked, tokenised, packed, prepared once before launch.

`readers` and `shapes` need the standard library alone, so the control side checks data before anything is shipped;
`encode`, `packing` and `prepared` are used on the head by training.node.prepare; `order`, `prepared` and `collate` on
every rank.
"""
