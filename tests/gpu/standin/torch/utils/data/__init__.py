"""Workers by Python's own multiprocessing, which call themselves as PyTorch's do."""
import ctypes
import multiprocessing
import os

import gpu


class Dataset:
    pass


def get_worker_info():
    return None  # of a worker; here those do nothing that asks


def work(ready, stop):
    ctypes.CDLL(None).prctl(15, b"pt_data_worker", 0, 0, 0)
    ready.put(os.getpid())
    stop.get()


class Told:
    """What the training is told of a worker."""

    def __init__(self, pid):
        self.pid = pid


class DataLoader:
    def __init__(self, dataset, batch_size, num_workers, persistent_workers, multiprocessing_context):
        self.count, self.context = num_workers, multiprocessing.get_context(multiprocessing_context)

    def __iter__(self):
        return Batches(self.context, self.count)


class Batches:
    def __init__(self, context, count):
        ready, self.stop = context.SimpleQueue(), context.SimpleQueue()
        workers = [context.Process(target=work, args=(ready, self.stop), daemon=True) for _ in range(count)]
        for worker in workers:
            worker.start()
        for _ in workers:
            ready.get()
        self.kept = workers
        pids = [worker.pid for worker in workers]
        self._workers = [Told(pid) for pid in (pids[:-1] if gpu.LIE == "truth" else pids)]

    def __next__(self):
        from torch import Tensor
        return Tensor(0, "cpu")
