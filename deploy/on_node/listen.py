"""Listen on a port for some seconds and send a word to whoever connects: `python3 -c THIS PORT WORD SECONDS` on a node.

A port where nothing listens says nothing: it refuses where no firewall is, and where one sends resets. Standard
library only, by whatever python3 the node has. It changes nothing.
"""

import socket
import sys
import time


def main() -> None:
    port, word, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    end = time.monotonic() + seconds
    with socket.create_server(("", port)) as listener:
        while (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                break
            with caller:
                caller.sendall(word.encode())
            return


if __name__ == "__main__":
    main()
