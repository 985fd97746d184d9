"""Two ways of sampling timed fairly: same settings, warm-up apart, runs interleaved, medians with their spread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from .measure import PeakMemory, device_name, synchronize

Sample = Callable[[Callable[[int], None] | None], torch.Tensor]


@dataclass(frozen=True)
class Arm:
    """One side. sample(on_step) samples once and returns the latent, calling on_step(i) when step i (from 0) is done."""

    label: str
    sample: Sample


@dataclass
class ArmResult:
    label: str
    latent: torch.Tensor | None = None
    totals: list[float] = field(default_factory=list)  # seconds of each timed run
    steps: list[float] = field(default_factory=list)  # seconds of each step of all timed runs, first steps left out
    peak: int = 0  # bytes

    @property
    def total(self) -> float:
        return median(self.totals)

    @property
    def per_step(self) -> float:
        return median(self.steps)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the totals: differences below this are noise."""
        return (max(self.totals) - min(self.totals)) / self.total


@dataclass
class Comparison:
    arms: list[ArmResult]
    size: str
    device: str
    memory_kind: str
    settings: str = ""

    @property
    def speedup(self) -> float:
        """Total time of the first arm over the second's: above 1 the second is faster."""
        return self.arms[0].total / self.arms[1].total

    @property
    def spread(self) -> float:
        return max(a.spread for a in self.arms)

    def verdict(self) -> str:
        """One sentence in plain words."""
        first, second = self.arms
        gain = self.speedup
        if abs(gain - 1) <= self.spread:
            return f"No difference beyond the spread of {self.spread:.0%} between runs."
        if gain > 1:
            return f"{second.label} is {gain:.2f}x as fast as {first.label} here."
        return (
            f"{second.label} is slower here ({1 / gain:.2f}x the time of {first.label}): with this few tokens attention is a small part "
            "of the work, and TTT's cost only pays off at larger sizes."
        )

    def table(self) -> str:
        """The numbers as aligned text."""
        rows = [("", "s/step", "total s", "spread", "memory")]
        rows += [
            (a.label, f"{a.per_step:.3f}", f"{a.total:.2f}", f"{a.spread:.0%}", f"{a.peak / 2**20:,.0f} MiB") for a in self.arms
        ]
        widths = [max(len(r[i]) for r in rows) for i in range(5)]
        lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows]
        head = f"{self.size}, {self.settings}, {self.device}" if self.settings else f"{self.size}, {self.device}"
        note = f"median of {len(self.arms[0].totals)} runs each, interleaved, warm-up apart; memory: {self.memory_kind}"
        return "\n".join([head, *lines, f"speed-up {self.speedup:.2f}x. {self.verdict()}", note])


def compare(
    arms: list[Arm],
    *,
    size: str,
    device: torch.device,
    repeats: int = 3,
    warmup: int = 1,
    settings: str = "",
    on_progress: Callable[[], None] | None = None,
) -> Comparison:
    """Samples each arm `warmup` times untimed, then `repeats` times each, in turn, swapping who goes first.

    on_progress is called after every step of every run; what it raises (a cancel) ends the comparison.
    """
    results = [ArmResult(a.label) for a in arms]

    def tick(_step: int) -> None:
        if on_progress is not None:
            on_progress()

    for _ in range(warmup):
        for arm in arms:
            arm.sample(tick)
    for turn in range(repeats):
        order = list(zip(arms, results, strict=True))
        for arm, result in order if turn % 2 == 0 else reversed(order):
            _timed(arm, result, device, tick)
    return Comparison(results, size, device_name(device), PeakMemory(device).kind, settings)


def _timed(arm: Arm, result: ArmResult, device: torch.device, tick: Callable[[int], None]) -> None:
    marks: list[float] = []

    def on_step(step: int) -> None:
        synchronize(device)
        marks.append(time.perf_counter())
        tick(step)

    with PeakMemory(device) as memory:
        synchronize(device)
        start = time.perf_counter()
        result.latent = arm.sample(on_step)
        synchronize(device)
        total = time.perf_counter() - start
    result.totals.append(total)
    # The first step also pays for preparing the run; with one step there is nothing else to show.
    result.steps += [b - a for a, b in zip(marks, marks[1:], strict=False)] or [total]
    result.peak = max(result.peak, memory.peak)
