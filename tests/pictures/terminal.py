#!/usr/bin/env python3
"""Draws README's picture of a terminal into docs/pictures/terminal.svg: `memledger top` above, `memledger why` below.

The figures are an example in the shape of a training, and no such host exists. What is drawn is the program's own output for them: `top` runs
in tmux and receives the example from a control socket of this script, and the answer of `why` is tests/golden/why/report.txt, which a test
compares with the program, under another name. Needs tmux.

usage: terminal.py PROGRAM [FILE]
"""

import http.server
import json
import pathlib
import re
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME, HOST, GIB = "my-train", "gpu7", 1 << 30
COLUMNS, ROWS, DEADLINE_S = 100, 12, 20
# of a character and a line, in pixels, and the margin
WIDTH, HEIGHT, MARGIN = 8.4, 17, 16
COLORS = ["#484f58", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#b1bac4"]
TEXT, BACKGROUND = "#e6edf3", "#0d1117"


def container(name, used, limit, cores, gpu=None, vram=None, busy=None, **more):
    """A container that has run for five hours; sizes in GiB."""
    gpus = {"gpu_bytes": vram * GIB, "gpus": {gpu: vram * GIB}, "gpu_utilization_ratio": busy} if gpu else {}
    return {"name": name, "id": name.encode().hex().ljust(64, "0"), "runtime": "docker", "started": time.time() - 5 * 3600,
            "unreclaimable_bytes": used * GIB, "limit_bytes": limit * GIB, "headroom_bytes": (limit - used) * GIB,
            "limit_ratio": used / limit, "cpu_cores": cores, **gpus, **more}


def gpu(index, used, busy, holders):
    return {"gpu": index, "model": "NVIDIA H100 80GB HBM3", "memory_total_bytes": 80 * GIB, "memory_used_bytes": used * GIB,
            "unattributed_bytes": 0.4 * GIB, "utilization_ratio": busy, "holders": [[name, size * GIB] for name, size in holders]}


def overview():
    growth = 9.5 * GIB / 3600
    training = container(NAME, 38.2, 44, 11.6, "0", 71.3, 0.94, growth_bytes_per_second=growth, seconds_to_limit=5.8 * GIB / growth,
                         role_bytes={"trainer": 9.0 * GIB, "dataloader_worker": 28.9 * GIB})
    return {
        "at": time.time(),
        "host": {"memory_total_bytes": 251.6 * GIB, "memory_available_bytes": 143.1 * GIB, "swap_total_bytes": 0, "memory_waiting_ratio": 0},
        "gpus": [gpu("0", 71.7, 0.94, [(NAME, 71.3)]), gpu("1", 66.6, 0.88, [("llama-finetune", 58.1), ("notebook", 8.1)])],
        "containers": [training, container("llama-finetune", 61.0, 128, 8.2, "1", 58.1, 0.88, role_bytes={"trainer": 46.2 * GIB}),
                       container("notebook", 4.3, 32, 0.1, "1", 8.1, 0.88)],
    }


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path.startswith("/api/v1/overview")
        body = (json.dumps(overview()) if known else "").encode()
        self.send_response(200 if known else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "socket"

    def log_message(self, *_):
        pass


def top(program):
    """The lines of `top` down to its last container, with the codes of their colours."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/control.sock"
        server = socketserver.ThreadingUnixStreamServer(path, Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # neither the kills nor the containers of this machine
        flags = f"--local.socket={path} --state.path={folder} --oom.kernel-log=off --docker.socket= --podman.socket="
        tmux = ["tmux", "-L", f"memledger-picture-{folder.rsplit('/', 1)[1]}", "-f", "/dev/null"]
        command = f"env -u NO_COLOR LANG=C.UTF-8 TERM=screen-256color {program} top {flags}; sleep 60"
        subprocess.run([*tmux, "new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), command], check=True)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while True:
                screen = subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True).stdout
                lines = screen.splitlines()
                last = [number for number, line in enumerate(lines) if "notebook" in line and "GiB" in line]
                if len(last) > 1:
                    return [re.sub(r"\d\d:\d\d:\d\d", "12:00:00", lines[0].replace(socket.gethostname(), HOST)), *lines[1:last[-1] + 1]]
                if time.monotonic() > deadline:
                    sys.exit(f"top shows no container:\n{screen}")
                time.sleep(0.2)  # poll
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)
            server.shutdown()


def why():
    """The answer of `why`, and what is bold in it."""
    text = (ROOT / "tests/golden/why/report.txt").read_text().replace("piper1-gpl-train-1", NAME).replace("piper:", f"{NAME}:")
    lines = text.rstrip().splitlines()
    return [f"\x1b[1m{line}" if number in (1, 2) or re.match(r"(At the kill|Held before|What to try)", line) else line
            for number, line in enumerate(lines)]


def spans(line):
    """The parts of a line: first column, text, colour, and whether it is bold. The selected row is not shown in reverse."""
    column, color, bold = 0, None, False
    line = re.sub(r"38;5;([0-7])(?=[;m])", r"3\1", line)  # the same colour
    for code, part in re.findall(r"\x1b\[([\d;]*)m([^\x1b]*)", "\x1b[m" + line):
        for number in [int(number or 0) for number in code.split(";")]:
            if number == 0:
                color, bold = None, False
            elif number == 1:
                bold = True
            elif 30 <= number <= 37:
                color = COLORS[number - 30]
            elif number == 39:
                color = None
        if part.strip():
            yield column, part, color, bold
        column += len(part)


def svg(lines):
    width, height = round(COLUMNS * WIDTH + 2 * MARGIN), len(lines) * HEIGHT + 2 * MARGIN
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="14">')
    yield f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>'
    for number, line in enumerate(lines):
        for column, text, color, bold in spans(line):
            x, y, size = round(MARGIN + column * WIDTH, 1), MARGIN + number * HEIGHT, round(len(text) * WIDTH, 1)
            # bars are shapes: fonts leave gaps between their characters, or have none of them
            if set(text.strip()) and set(text.strip()) <= set("█░"):
                for run in re.finditer("█+|░+", text):
                    opacity = ' opacity="0.25"' if "░" in run[0] else ""
                    yield (f'<rect x="{round(x + run.start() * WIDTH, 1)}" y="{y + 3}" width="{round(len(run[0]) * WIDTH, 1)}" height="11" '
                           f'fill="{color or TEXT}"{opacity}/>')
                continue
            weight = ' font-weight="bold"' if bold else ""
            yield (f'<text x="{x}" y="{y + 13}" fill="{color or TEXT}"{weight} xml:space="preserve" textLength="{size}" '
                   f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>')
    yield "</svg>"


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    file = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "docs/pictures/terminal.svg")
    prompt = "\x1b[32m$\x1b[0m \x1b[1m"
    lines = [f"{prompt}sudo memledger top", *top(program), "", f"{prompt}sudo memledger why {NAME}", *why()]
    file.write_text("\n".join(svg(lines)) + "\n")


main()
