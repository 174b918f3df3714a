"""Runs a Python program in a process that has loaded most of what it imports; see `tests/support/forked.py`.

`launch.py SOCKET -m MODULE ARGS` and `launch.py SOCKET -c CODE ARGS` hand their streams, directory and environment
over, and end as the program does. Standard library only, and as little of it as possible: this runs for each program.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(sys.argv[1])
        task = {"words": sys.argv[2:], "environment": dict(os.environ), "directory": os.getcwd()}
        sent = json.dumps(task).encode()
        socket.send_fds(door, [len(sent).to_bytes(8, "big")], [0, 1, 2])
        door.sendall(sent)
        pid = int.from_bytes(door.recv(8), "big")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        os.close(0)
        os.close(1)
        code = int.from_bytes(door.recv(8), "big", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
