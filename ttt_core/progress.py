"""What a long run tells about itself, and how it asks whether to go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """stage: what is being done, for people. done of total: units of work over all stages. loss: the newest, or None.
    seconds_left: an estimate from the time so far, None at the start."""

    stage: str
    done: int
    total: int
    loss: float | None
    seconds_left: float | None


OnProgress = Callable[[Progress], None]
ShouldCancel = Callable[[], bool]


class Ticker:
    """Counts units of work of unequal cost and estimates the time left.

    weights: how much one unit of a kind costs beside the others, in any scale; the clock sets the scale.
    """

    def __init__(self, work: dict[str, tuple[int, float]], on_progress: OnProgress | None, clock: Callable[[], float] = time.monotonic):
        self._work, self._on_progress, self._clock = work, on_progress, clock
        self._total = sum(count for count, _ in work.values())
        self._cost = sum(count * weight for count, weight in work.values())
        self._done, self._spent, self._start = 0, 0.0, clock()

    def __call__(self, kind: str, stage: str, loss: float | None = None) -> None:
        self._done += 1
        self._spent += self._work[kind][1]
        if self._on_progress is not None:
            passed = self._clock() - self._start
            left = passed * max(0.0, self._cost / self._spent - 1)
            self._on_progress(Progress(stage, self._done, self._total, loss, left))
