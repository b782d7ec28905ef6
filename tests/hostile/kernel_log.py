"""Floods the kernel log from user space with forged OOM kills of the cgroup argv[1], until an input line; prints their number.

The kernel accepts ten lines in five seconds from each open file: the device is opened again for every ten. One line in a
thousand has the level of a real kill, which the kernel writes to the console too: that is slow.
"""
import os
import select
import sys

cgroup = sys.argv[1].encode()
forged = [
    b"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=%s,task_memcg=%s,"
    b"task=python3,pid=1,uid=0\n" % (cgroup, cgroup),
    b"Memory cgroup out of memory: Killed process 1 (python3) total-vm:1kB, anon-rss:1kB, file-rss:1kB, shmem-rss:0kB, "
    b"UID:0 pgtables:1kB oom_score_adj:0\n",
]
print("ready", flush=True)
count = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(100):
        device = os.open("/dev/kmsg", os.O_WRONLY)
        for _ in range(10):
            level = b"<3>" if count % 1000 < 2 else b"<6>"
            os.write(device, level + forged[count % 2])
            count += 1
        os.close(device)
sys.stdin.readline()
print(count, flush=True)
sys.stdin.readline()
