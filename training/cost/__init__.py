"""What a run costs, each figure defined once: parameters, FLOPs, bytes, seconds, money. Pure, and without torch.

The plan, the engine, the ladder after out of memory and the report all ask here: pace.py for a run, zero.py and
pipeline.py for a step, memory.py for what a rank holds, shape.py for a model's layers.
"""
