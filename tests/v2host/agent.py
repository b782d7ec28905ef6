#!/usr/bin/python3
"""Runs commands inside the v2 guest for run.sh on the host.

The two sides share a folder and nothing else (the guest has no network). The host puts NAME.sh into it under that name
only when it is complete; the agent takes it by renaming it to NAME.run. Its output goes to NAME.out as it comes, and last
of all NAME.rc is made with the exit status. NAME.stop from the host kills what still runs of NAME. Commands run side by
side. Python, because every process that a shell loop starts costs a tenth of a second here.

The command itself makes NAME.rc, and its process id stands in NAME.pid: should the agent die in the midst, systemd starts
another one, and nothing is lost.
"""

import os
import signal
import subprocess
import time

FOLDER = "/host/cmd"
COMMAND = '/bin/bash "$0.run"; echo $? >"$0.rc.new"; mv "$0.rc.new" "$0.rc"'


def start(base):
    os.rename(base + ".sh", base + ".run")
    with open(base + ".out", "wb") as out:
        child = subprocess.Popen(
            ["/bin/bash", "-c", COMMAND, base], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            cwd="/", start_new_session=True, env={"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"})
    with open(base + ".pid", "w") as pid:
        pid.write(str(child.pid))
    return child


def stop(base):
    os.rename(base + ".stop", base + ".stopped")
    with open(base + ".pid") as pid:
        os.killpg(int(pid.read()), signal.SIGKILL)
    with open(base + ".rc", "w") as rc:
        rc.write("137\n")


def main():
    open("/host/ready", "w").close()
    children = []
    while True:
        for entry in sorted(os.listdir(FOLDER)):
            base, kind = os.path.splitext(os.path.join(FOLDER, entry))
            if kind == ".sh":
                children.append(start(base))
            elif kind == ".stop" and not os.path.exists(base + ".rc"):
                stop(base)
        children = [child for child in children if child.poll() is None]
        time.sleep(0.05)


main()
