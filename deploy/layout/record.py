#!/usr/bin/env python3
"""Runs memledger and writes the names of the functions that it calls, each once: `record.sh` says what for.

It is started in memledger's place and becomes it, so that whoever started it can signal it. A child of it traces it: the first byte of
each function is replaced by a breakpoint, which is removed when it is hit. So each function costs one stop, and the program is as fast
as always after its first seconds.

$LAYOUT_PROGRAM  the program, with its symbols
$LAYOUT_SYMBOLS  its functions: address and name, a line each
$LAYOUT_FOLDER   where each run leaves a file with the symbols of the functions that were called

On x86-64 alone: breakpoints and registers are its.
"""

import bisect
import ctypes
import os
import signal
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
LIBC.ptrace.restype = ctypes.c_long
CONT, GET_REGISTERS, SET_REGISTERS, SEIZE, LISTEN = 7, 12, 13, 0x4206, 0x4208
# traces threads, children and the programs that they execute; if the tracer ends, they are killed, because breakpoints are left in them
OPTIONS = 2 | 4 | 8 | 0x10 | 0x100000
EVENT_EXEC, EVENT_STOP = 4, 128
WAIT_ALL = 0x40000000
INSTRUCTION_POINTER = 16  # of the 27 registers
BREAKPOINT = 0xCC


def ptrace(request, thread, address=None, data=None):
    """Returns whether it was possible: a thread may have ended meanwhile."""
    return LIBC.ptrace(request, thread, address, data) == 0


class Tracer:
    def __init__(self, program, symbols):
        self.program = os.path.realpath(program)
        self.functions = {}
        with open(symbols, encoding="utf-8") as file:
            for line in file:
                address, name = line.split()
                self.functions.setdefault(int(address, 16), []).append(name)
        self.addresses = sorted(self.functions)
        self.bytes = {}
        self.bases = {}
        self.called = set()

    def base_of(self, thread):
        """Returns where the program is mapped in a thread's process; `None` if it runs another one."""
        with open(f"/proc/{thread}/status", encoding="utf-8") as file:
            process = next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
        if process not in self.bases:
            self.bases[process] = None
            with open(f"/proc/{thread}/maps", encoding="utf-8") as file:
                for line in file:
                    fields = line.split(maxsplit=5)
                    if len(fields) == 6 and fields[5].strip() == self.program and int(fields[2], 16) == 0:
                        self.bases[process] = int(fields[0].split("-")[0], 16)
                        break
        return self.bases[process]

    def set_breakpoints(self, thread):
        """Replaces the first byte of each function."""
        with open(f"/proc/{thread}/status", encoding="utf-8") as file:
            process = next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
        self.bases.pop(process, None)
        base = self.base_of(thread)
        if base is None:
            return
        first, last = self.addresses[0], self.addresses[-1]
        with open(f"/proc/{thread}/mem", "r+b", buffering=0) as memory:
            memory.seek(base + first)
            text = bytearray(memory.read(last - first + 1))
            if len(text) != last - first + 1:
                raise OSError("the program ended while it was read")
            for address in self.addresses:
                self.bytes.setdefault(address, text[address - first])
                text[address - first] = BREAKPOINT
            # in blocks, so that those without a function stay shared
            for page in range(0, len(text), 4096):
                at = bisect.bisect_left(self.addresses, first + page)
                if at < len(self.addresses) and self.addresses[at] < first + page + 4096:
                    memory.seek(base + first + page)
                    memory.write(text[page : page + 4096])

    def hit(self, thread):
        """Removes the breakpoint that a thread has hit; returns whether it was one."""
        registers = (ctypes.c_ulonglong * 27)()
        if not ptrace(GET_REGISTERS, thread, None, ctypes.addressof(registers)):
            return True
        base = self.base_of(thread)
        if base is None:
            return False
        address = registers[INSTRUCTION_POINTER] - 1 - base
        if address not in self.functions:
            return False
        with open(f"/proc/{thread}/mem", "r+b", buffering=0) as memory:
            memory.seek(base + address)
            memory.write(bytes([self.bytes[address]]))
        self.called.add(address)
        registers[INSTRUCTION_POINTER] -= 1
        ptrace(SET_REGISTERS, thread, None, ctypes.addressof(registers))
        return True

    def run(self):
        """Follows all processes until they have ended."""
        while True:
            try:
                thread, status = os.waitpid(-1, WAIT_ALL)
            except ChildProcessError:
                return
            if not os.WIFSTOPPED(status):
                continue
            received, event = os.WSTOPSIG(status), status >> 16
            request, passed_on = CONT, 0
            try:
                if event == EVENT_EXEC:
                    self.set_breakpoints(thread)
                elif event == EVENT_STOP:
                    is_stopped = received in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
                    request = LISTEN if is_stopped else CONT
                elif event == 0 and not (received == signal.SIGTRAP and self.hit(thread)):
                    passed_on = received
            except (OSError, StopIteration):
                pass  # it has just been killed
            ptrace(request, thread, None, passed_on)


def main():
    program, folder = os.environ["LAYOUT_PROGRAM"], os.environ["LAYOUT_FOLDER"]
    is_traced, traced = os.pipe()
    memledger = os.getpid()
    if os.fork() == 0:
        os.close(is_traced)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        tracer = Tracer(program, os.environ["LAYOUT_SYMBOLS"])
        is_seized = ptrace(SEIZE, memledger, None, OPTIONS)
        os.write(traced, b"1" if is_seized else b"0")
        os.close(traced)
        if is_seized:
            tracer.run()
            path = os.path.join(folder, f"{memledger}.symbols")
            with open(f"{path}.unfinished", "w", encoding="utf-8") as file:
                for address in sorted(tracer.called):
                    file.writelines(f"{name}\n" for name in tracer.functions[address])
            os.rename(f"{path}.unfinished", path)
        os._exit(0)
    os.close(traced)
    if os.read(is_traced, 1) != b"1":
        sys.exit("record: cannot trace memledger: run it as root, where ptrace(2) is allowed")
    os.close(is_traced)
    os.execv(program, ["memledger", *sys.argv[1:]])


main()
