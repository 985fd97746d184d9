"""What both speed benchmarks share: timing, the machine's own limits measured in the same run, and the results file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results.jsonl"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(device: torch.device) -> dict:
    """Fields that every record carries: device, versions, commit (with + when the tree had changes)."""
    git = ["git", "-C", str(RESULTS.parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    code = [str(RESULTS.parent.parent / "kernels")]
    changed = subprocess.run([*git, "status", "--porcelain", "--", *code], capture_output=True, text=True).stdout.strip()
    return {
        "device": device_name(device), "torch": torch.__version__, "triton": _version("triton"),
        "commit": commit + ("+" if changed else "") or None,
    }


def append(record: dict) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call. On a GPU the call is recorded as a CUDA graph, so that launches cost what they cost in a
    model whose queue is full; where that fails, calls are queued and timed by events."""
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    for _ in range(3):
        function()
    torch.cuda.synchronize(device)
    replay = function
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
        replay = graph.replay
    except RuntimeError:
        torch.cuda.synchronize(device)
    replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a plain copy, read and write counted."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * size / 1e6 / milliseconds(lambda: target.copy_(source), device, 10)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large square product in this type."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / 1e9 / milliseconds(lambda: a @ b, device, 10)


def peak_mib(function: Callable[[], object], device: torch.device) -> float | None:
    """What one call allocates above what was there before; None on the CPU, where PyTorch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
