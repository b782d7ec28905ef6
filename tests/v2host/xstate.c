// Lets user-mode-linux 6.1 run on a processor whose vector state is larger than it knows (Intel AMX).
//
// It saves the state of a process in a buffer that ends before AMX's tiles, and gives that back with PTRACE_SETREGSET.
// A kernel of such a machine takes the whole state or none, and the guest panics in its first process. Loaded with
// LD_PRELOAD, this fills in the part that the guest does not know from the process's own state, which the guest never
// uses: it has no AMX. Where the kernel takes the buffer as it is, nothing is changed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifndef NT_X86_XSTATE
#define NT_X86_XSTATE 0x202
#endif

static long (*real)(int, pid_t, void *, void *);

__attribute__((constructor)) static void find(void) {
    real = (long (*)(int, pid_t, void *, void *))dlsym(RTLD_NEXT, "ptrace");
}

long ptrace(enum __ptrace_request request, ...) {
    static _Thread_local char whole[64 * 1024] __attribute__((aligned(64)));
    va_list arguments;
    va_start(arguments, request);
    pid_t pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *);
    void *data = va_arg(arguments, void *);
    va_end(arguments);
    long result = real(request, pid, address, data);
    if (result == 0 || request != PTRACE_SETREGSET || (long)address != NT_X86_XSTATE || errno != EFAULT) return result;
    struct iovec *known = data;
    struct iovec state = {whole, sizeof whole};
    if (real(PTRACE_GETREGSET, pid, address, &state) != 0 || known->iov_len > state.iov_len) {
        errno = EFAULT;
        return -1;
    }
    memcpy(whole, known->iov_base, known->iov_len);
    return real(PTRACE_SETREGSET, pid, address, &state);
}
