"""The stand-in's ``torch._C``; see the package."""

observers = []


def _cuda_attach_out_of_memory_observer(observer):
    """The real one initialises CUDA, so the client must not call it before."""
    from torch import cuda

    if not cuda.is_initialized():
        raise AssertionError("the observer would initialise CUDA")
    if cuda.STANDIN_ALLOCATOR_IS_PLUGGABLE:
        raise RuntimeError("CUDAPluggableAllocator does not yet support attachOutOfMemoryObserver.")
    observers.append(observer)
