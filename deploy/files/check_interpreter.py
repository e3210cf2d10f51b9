"""Prints a line where this Python is not the one its environment was built with, as STAMP, its argument, says."""

import json
import sys
from pathlib import Path

built = json.loads(Path(sys.argv[1]).read_text())["python"]
if built.split(".")[:2] != [str(part) for part in sys.version_info[:2]]:
    print(f"built with Python {built}, run by {sys.version.split()[0]}")
