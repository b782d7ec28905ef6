"""The stand-in's ``torch._C``; see the package."""

observers = []
standin_queries = []  # devices that were asked for statistics. Not in torch
STANDIN_HISTORY = False  # set by tests: the program records its allocations


def _cuda_memoryStats(device):
    from torch.cuda import memory

    standin_queries.append(device)
    return memory.statistics(device)


def _cuda_resetPeakMemoryStats(device):
    from torch.cuda import memory

    memory.of(device).reset_peaks()


def _cuda_resetAccumulatedMemoryStats(device):
    from torch.cuda import memory

    memory.of(device).ooms = memory.of(device).retries = 0


# those of torch.accelerator, in torch 2.9 and later
def _accelerator_getDeviceStats(device):
    return _cuda_memoryStats(device)


def _accelerator_resetPeakStats(device):
    _cuda_resetPeakMemoryStats(device)


def _accelerator_resetAccumulatedStats(device):
    _cuda_resetAccumulatedMemoryStats(device)


def _cuda_hasPrimaryContext(device):
    from torch import cuda

    return device in cuda.standin_contexts


def _cuda_customAllocator(allocate, free):
    return (allocate, free)


def _cuda_isHistoryEnabled():
    return STANDIN_HISTORY


def _cuda_attach_out_of_memory_observer(observer):
    """The real one initialises CUDA, so the client must not call it before."""
    from torch import cuda

    if not cuda.is_initialized():
        raise AssertionError("the observer would initialise CUDA")
    if cuda.STANDIN_ALLOCATOR_IS_PLUGGABLE:
        raise RuntimeError("CUDAPluggableAllocator does not yet support attachOutOfMemoryObserver.")
    observers.append(observer)
