"""Peak memory and honest waiting on any device."""

from __future__ import annotations

import threading

import torch


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what was asked of it, so that a clock read next means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type in ("mps", "xpu"):
        getattr(torch, device.type).synchronize()


class PeakMemory:
    """Context manager: `peak` in bytes. On CUDA the allocator's peak, model included; elsewhere the growth of the
    process's resident memory, sampled every few milliseconds (pages the allocator reuses do not show, so it is a
    lower bound)."""

    PERIOD = 0.005  # seconds

    def __init__(self, device: torch.device):
        self.device, self.peak = device, 0

    def __enter__(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            import psutil

            process = psutil.Process()
            start, self._stop = process.memory_info().rss, threading.Event()

            def sample():
                while not self._stop.wait(self.PERIOD):
                    self.peak = max(self.peak, process.memory_info().rss - start)

            self._thread = threading.Thread(target=sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
        else:
            self._stop.set()
            self._thread.join()
        return False

    @property
    def kind(self) -> str:
        return "peak GPU memory" if self.device.type == "cuda" else "growth of process memory"


def device_name(device: torch.device) -> str:
    """What to write beside a measured number, e.g. 'NVIDIA H200' or 'CPU x86_64, 2 threads'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    import platform

    return f"{device.type.upper()} {platform.machine()}, {torch.get_num_threads()} threads"
