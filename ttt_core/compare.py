"""Ways of sampling timed fairly: same settings, warm-up apart, runs interleaved, medians with their spread."""

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
    """One side. sample(on_step) samples once and returns the latent, calling on_step(i) when step i (from 0) is done.

    renew: for an arm whose compiled code cannot be trusted after another arm ran: called before each of its timed runs,
    which then get an untimed run of their own first.
    """

    label: str
    sample: Sample
    renew: Callable[[], None] | None = None


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
    """All arms at one size. tokens: image tokens, 0 if not known. reason: what is known about why TTT gains much or little."""

    arms: list[ArmResult]
    size: str
    device: str
    memory_kind: str
    settings: str = ""
    tokens: int = 0
    reason: str = ""

    @property
    def speedup(self) -> float:
        """Total time of the first arm over the second's: above 1 the second is faster."""
        return self.speedup_of(1)

    def speedup_of(self, arm: int) -> float:
        """Median total of the first arm over that of arm number `arm`."""
        return self.arms[0].total / self.arms[arm].total

    def speedup_range(self, arm: int) -> tuple[float, float]:
        """What the speed-up would be with the least and the most favourable pair of runs; one run each gives no range."""
        first, other = self.arms[0].totals, self.arms[arm].totals
        return min(first) / max(other), max(first) / min(other)

    def is_noise(self, arm: int) -> bool:
        """Whether the runs of both arms overlap, so that the difference may be chance."""
        low, high = self.speedup_range(arm)
        return low <= 1 <= high

    def verdict(self, with_reason: bool = True) -> str:
        """One plain sentence for each arm after the first, and the reason once if any of them is not faster."""
        sentences = [self._verdict_of(i) for i in range(1, len(self.arms))]
        gained = all(self.speedup_of(i) > 1 and not self.is_noise(i) for i in range(1, len(self.arms)))
        return " ".join(sentences if gained or not self.reason or not with_reason else [*sentences, self.reason])

    def _verdict_of(self, arm: int) -> str:
        first, other, gain = self.arms[0].label, self.arms[arm].label, self.speedup_of(arm)
        low, high = self.speedup_range(arm)
        if len(self.arms[0].totals) < 2:
            return f"{other} took {1 / gain:.2f}x the time of {first}, but one run each says nothing about noise; set repeats to 3 or more."
        if self.is_noise(arm):
            return f"{other} and {first}: no difference beyond the spread between runs ({gain:.2f}x, runs from {low:.2f}x to {high:.2f}x)."
        if gain > 1:
            return f"{other} is {gain:.2f}x as fast as {first} here (runs from {low:.2f}x to {high:.2f}x)."
        return f"{other} is slower here: {1 / gain:.2f}x the time of {first} (runs from {1 / high:.2f}x to {1 / low:.2f}x)."

    def table(self) -> str:
        """The numbers as aligned text."""
        rows = [("", "s/step", "total s", "spread", "memory", "speed-up")]
        for i, a in enumerate(self.arms):
            speed = f"{self.speedup_of(i):.2f}x" if i else "1 (base)"
            rows.append((a.label, f"{a.per_step:.3f}", f"{a.total:.2f}", f"{a.spread:.0%}", f"{a.peak / 2**20:,.0f} MiB", speed))
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows]
        size = f"{self.size} ({self.tokens:,} image tokens)" if self.tokens else self.size
        head = ", ".join(t for t in (size, self.settings, self.device) if t)
        note = f"median of {len(self.arms[0].totals)} runs each, interleaved, warm-up apart; memory: {self.memory_kind}"
        return "\n".join([head, *lines, self.verdict(), note])


def runs_of(arms: list[Arm], repeats: int, warmup: int) -> int:
    """How many times `compare` samples in all: for a progress bar."""
    return sum(2 * repeats if a.renew else repeats + warmup for a in arms)


def compare(
    arms: list[Arm],
    *,
    size: str,
    device: torch.device,
    repeats: int = 3,
    warmup: int = 1,
    settings: str = "",
    tokens: int = 0,
    reason: str = "",
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
            if arm.renew is None:
                arm.sample(tick)
    for turn in range(repeats):
        order = list(zip(arms, results, strict=True))
        for arm, result in order if turn % 2 == 0 else reversed(order):
            if arm.renew is not None:
                arm.renew()
                arm.sample(tick)
            _timed(arm, result, device, tick)
    return Comparison(results, size, device_name(device), PeakMemory(device).kind, settings, tokens, reason)


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
