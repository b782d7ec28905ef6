from . import parallel  # noqa: F401


class Linear:
    def __init__(self, *sizes):
        pass

    def cuda(self):
        return self

    def __call__(self, batch):
        return batch
