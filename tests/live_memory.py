"""The peak of live tensor memory on the CPU, counted at every operation: exact where resident memory is noise."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Context manager. now, peak: bytes of storages made inside that are alive, backward pass and optimizer included."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {id(s) for s in map(_storage, tree_leaves((args, kwargs))) if s is not None}
        for storage in map(_storage, tree_leaves(out)):
            if storage is None or id(storage) in self._alive or id(storage) in old:
                continue
            key, size = id(storage), storage.nbytes()
            self._alive[key] = weakref.ref(storage, lambda _, key=key, size=size: self._gone(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key, size):
        if self._alive.pop(key, None) is not None:
            self.now -= size


def _storage(x):
    return x.untyped_storage() if isinstance(x, torch.Tensor) and x.device.type == "cpu" else None
