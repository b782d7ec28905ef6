"""The observers of out-of-memory errors that memledger's client attaches."""

observers = []


def _cuda_memoryStats(device):
    from torch.cuda import memory

    return memory.statistics()


def _cuda_resetPeakMemoryStats(device):
    from torch import cuda

    cuda.most, cuda.most_allocated = cuda.reserved, cuda.allocated


def _cuda_attach_out_of_memory_observer(observer):
    observers.append(observer)
