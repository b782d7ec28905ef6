"""Runs a program that sees a folder through FUSE: `passthrough.py ROOT PROGRAM ARGUMENT...`.

The folder is ROOT/folder, and the program sees it as ROOT/mount, in a mount namespace of its own. Once the file ROOT/hang exists,
requests for files whose path contains its text get no response until ROOT/hang is removed, as on a disk or in a kernel file that
hangs. The server ends when the file ROOT/end exists, and when the program has ended. A killed program first closes its files and
waits for a response, so a test with hanging files writes ROOT/end before it kills the program.
"""
import ctypes
import errno
import os
import select
import signal
import stat
import struct
import sys

CLONE_NEWNS, MS_NOSUID_NODEV, MS_REC_PRIVATE, PR_SET_PDEATHSIG = 0x20000, 6, 0x44000, 1
libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), what)


class Server:
    def __init__(self, device, root):
        self.device, self.folder = device, os.path.join(root, "folder")
        self.hang, self.end = os.path.join(root, "hang"), os.path.join(root, "end")
        self.paths, self.ids, self.waiting = {1: ""}, {"": 1}, []

    def real(self, path):
        return os.path.join(self.folder, path) if path else self.folder

    def id_of(self, path):
        if path not in self.ids:
            self.ids[path] = len(self.paths) + 1
            self.paths[self.ids[path]] = path
        return self.ids[path]

    def attributes(self, path):
        s = os.stat(self.real(path))
        times = [int(s.st_atime), int(s.st_mtime), int(s.st_ctime)]
        return struct.pack("=6Q10I", self.id_of(path), s.st_size, s.st_blocks, *times, 0, 0, 0, s.st_mode, s.st_nlink, s.st_uid,
                           s.st_gid, 0, 4096, 0)

    def entry(self, path):
        return struct.pack("=QQQQII", self.id_of(path), 0, 0, 0, 0, 0) + self.attributes(path)

    def is_hanging(self, paths):
        try:
            with open(self.hang) as file:
                pattern = file.read()
        except FileNotFoundError:
            return False
        return any(pattern in path for path in paths)

    def serve(self):
        while not os.path.exists(self.end):
            self.waiting = [request for request in self.waiting if not self.handle(request)]
            if not select.select([self.device], [], [], 0.05)[0]:
                continue
            try:
                request = os.read(self.device, 1 << 17)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return  # unmounted
                continue
            if not self.handle(request):
                self.waiting.append(request)

    def handle(self, request):
        """Responds to a request; returns False if it hangs."""
        operation, unique, node = struct.unpack("=4xIQQ", request[:24])
        if operation in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET have no response
            return True
        body, path = request[40:], self.paths.get(node, "")
        name = body[{9: 8, 12: 8, 35: 16, 45: 16}.get(operation, 0):].split(b"\0")[0].decode(errors="replace")
        child = os.path.join(path, name)
        named = operation in (1, 9, 10, 11, 12, 35, 45)
        if self.is_hanging([child if named else path]):
            return False
        code, response = 0, b""
        try:
            response = self.respond(operation, body, path, child)
        except OSError as error:
            code = -error.errno
        try:
            os.write(self.device, struct.pack("=IiQ", 16 + len(response), code, unique) + response)
        except OSError:
            pass  # the request was interrupted
        return True

    def respond(self, operation, body, path, child):
        if operation == 26:  # INIT
            return struct.pack("=IIIIHHIIHHI7I", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1, 16, *[0] * 9)
        if operation == 1:  # LOOKUP
            return self.entry(child)
        if operation == 3:  # GETATTR
            return struct.pack("=QII", 0, 0, 0) + self.attributes(path)
        if operation == 4:  # SETATTR
            valid, size, mode = struct.unpack("=I12xQ", body[:24]) + struct.unpack("=I", body[68:72])
            if valid & 1:
                os.chmod(self.real(path), stat.S_IMODE(mode))
            if valid & 8:
                os.truncate(self.real(path), size)
            return struct.pack("=QII", 0, 0, 0) + self.attributes(path)
        if operation == 9:  # MKDIR
            os.mkdir(self.real(child), 0o755)
            return self.entry(child)
        if operation == 10:  # UNLINK
            os.unlink(self.real(child))
            return b""
        if operation in (12, 45):  # RENAME, RENAME2
            names = body[8 if operation == 12 else 16:].split(b"\0")
            os.rename(self.real(child), self.real(os.path.join(self.paths[struct.unpack("=Q", body[:8])[0]], names[1].decode())))
            return b""
        if operation == 14:  # OPEN
            # files of a folder are mapped into memory; those at the top are read anew each time, as kernel files are
            # (1, DIRECT_IO); an open must not drop the pages that are mapped, as none does on a disk (2, KEEP_CACHE)
            return struct.pack("=QII", os.open(self.real(path), os.O_RDWR), 2 if "/" in path else 1, 0)
        if operation == 35:  # CREATE
            file = os.open(self.real(child), os.O_RDWR | os.O_CREAT, 0o644)
            return self.entry(child) + struct.pack("=QII", file, 0, 0)
        if operation == 15:  # READ
            file, offset, size = struct.unpack("=QQI", body[:20])
            return os.pread(file, size, offset)
        if operation == 16:  # WRITE
            file, offset, size = struct.unpack("=QQI", body[:20])
            return struct.pack("=II", os.pwrite(file, body[40:40 + size], offset), 0)
        if operation == 17:  # STATFS
            return struct.pack("=5Q4I6I", *[1 << 30] * 5, 4096, 255, 4096, 0, *[0] * 6)
        if operation == 18:  # RELEASE
            os.close(struct.unpack("=Q", body[:8])[0])
            return b""
        if operation == 20:  # FSYNC
            os.fsync(struct.unpack("=Q", body[:8])[0])
            return b""
        if operation == 27:  # OPENDIR
            return struct.pack("=QII", 0, 0, 0)
        if operation == 28:  # READDIR
            offset, names = struct.unpack("=Q", body[8:16])[0], sorted(os.listdir(self.real(path)))
            response = b""
            for number, each in enumerate(names[offset:], offset + 1):
                name = each.encode()
                kind = stat.S_IFMT(os.lstat(os.path.join(self.real(path), each)).st_mode) >> 12
                entry = struct.pack("=QQII", 1 << 20, number, len(name), kind) + name
                response += entry + bytes(-len(entry) % 8)
            return response[:struct.unpack("=I", body[16:20])[0]] if len(response) < 4096 else response[:0]
        if operation in (25, 29, 30, 38):  # FLUSH, RELEASEDIR, FSYNCDIR, DESTROY
            return b""
        raise OSError(errno.ENOSYS, "not implemented")


root, *program = sys.argv[1:]
check(libc.unshare(CLONE_NEWNS), "unshare")
check(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "private mounts")
device = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % device
check(libc.mount(b"passthrough", os.path.join(root, "mount").encode(), b"fuse", MS_NOSUID_NODEV, options), "mount FUSE")
if os.fork() == 0:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for stream in (0, 1, 2):
        os.dup2(os.open("/dev/null", os.O_RDWR), stream)
    Server(device, root).serve()
    os._exit(0)
os.close(device)
os.execv(program[0], program)
