"""The observers of out-of-memory errors that memledger's client attaches."""

observers = []


def _cuda_attach_out_of_memory_observer(observer):
    observers.append(observer)
