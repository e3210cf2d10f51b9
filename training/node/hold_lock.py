"""Take a folder's lock, and keep it while a line comes now and then; sent as text to a head that may have nothing else.

    python3 -c TEXT FOLDER WAIT_S SILENCE_S

prints {"held": true}, again for each line "still", or {"held": false} where another has it for that long.
"""

import fcntl
import os
import select
import sys
import time

folder, wait_s, silence_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
lock, until = os.open(folder, os.O_RDONLY), time.monotonic() + wait_s
while True:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        if time.monotonic() > until:
            print('{"held": false}')
            sys.exit()
        time.sleep(0.05)
print('{"held": true}', flush=True)
with open(0, "rb", buffering=0) as lines:  # unbuffered: `select` sees every line
    while select.select([lines], [], [], silence_s)[0] and (line := lines.readline()):
        if line == b'"still"\n':
            print('{"held": true}', flush=True)
