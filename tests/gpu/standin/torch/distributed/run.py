"""Starts the ranks as torchrun does: one process each, with its number in the environment."""
import os
import subprocess
import sys

arguments = sys.argv[1:]
ranks = next(int(word.split("=")[1]) for word in arguments if word.startswith("--nproc_per_node="))
while arguments[0].startswith("-"):
    arguments.pop(0)
children = [subprocess.Popen([sys.executable, "-u", *arguments], env={**os.environ, "RANK": str(rank)})
            for rank in range(ranks)]
sys.exit(max(child.wait() for child in children))
