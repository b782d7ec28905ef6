#!/usr/bin/python3
"""Runs commands inside the v2 guest for run.sh on the host.

The two sides share a folder and nothing else (the guest has no network). The host puts NAME.sh into it under that name
only when it is complete; the agent takes it by renaming it to NAME.run, writes output to NAME.out as it comes, and last
of all makes NAME.rc with the exit status. NAME.stop from the host kills what still runs of NAME. Commands run side by
side. Python, because every process that a shell loop starts costs a tenth of a second here.
"""

import os
import signal
import subprocess
import threading
import time

FOLDER = "/host/cmd"


def run(name):
    base = os.path.join(FOLDER, name)
    with open(base + ".out", "wb") as out:
        child = subprocess.Popen(
            ["/bin/bash", base + ".run"], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            cwd="/", start_new_session=True, env={"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"})
        while True:
            try:
                status = child.wait(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                if os.path.exists(base + ".stop"):
                    os.killpg(child.pid, signal.SIGKILL)
    # A shell's way to say that a signal ended it.
    status = 128 - status if status < 0 else status
    with open(base + ".rc.new", "w") as rc:
        rc.write(f"{status}\n")
    os.rename(base + ".rc.new", base + ".rc")


def main():
    open("/host/ready", "w").close()
    while True:
        for entry in sorted(os.listdir(FOLDER)):
            if entry.endswith(".sh"):
                name = entry[:-3]
                os.rename(os.path.join(FOLDER, entry), os.path.join(FOLDER, name + ".run"))
                threading.Thread(target=run, args=(name,), daemon=True).start()
        time.sleep(0.05)


main()
