"""A trial import, then the stamp that says the environment is complete: run by its own Python with STAMP HASH."""

import datetime
import json
import os
import platform
import sys
from pathlib import Path

import deepspeed  # noqa: F401
import peft  # noqa: F401
import torch
import transformers  # noqa: F401

stamp, digest = Path(sys.argv[1]), sys.argv[2]
built = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
record = {"hash": digest, "torch": torch.__version__, "python": platform.python_version(), "built": built}
half = stamp.with_name(f"{stamp.name}.tmp")
with half.open("w") as file:
    json.dump(record, file)
    file.flush()
    os.fsync(file.fileno())
half.replace(stamp)
