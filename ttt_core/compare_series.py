"""Comparisons at several sizes put together: the break-even point, the text, and the numbers as JSON and CSV files."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .compare import Comparison
from .errors import TTTError
from .version import VERSION

PIXELS_PER_TOKEN = 16  # along one side, for SD3's VAE (8) and patches of 2
_SIZE = re.compile(r"(\d+)(?:x(\d+))?")


def parse_sizes(text: str, multiple: int = PIXELS_PER_TOKEN) -> list[tuple[int, int]]:
    """[(width, height)] in pixels from a text such as '512 768x1024'; empty text gives an empty list.

    Raises TTTError for what is not a size, or not a multiple of `multiple`.
    """
    sizes = []
    for word in text.replace(",", " ").split():
        match = _SIZE.fullmatch(word.lower())
        if not match:
            raise TTTError(f"Cannot read the size '{word}' in '{text}'; write sizes in pixels such as '512 768 1024x1536', or nothing.")
        width, height = int(match.group(1)), int(match.group(2) or match.group(1))
        if width % multiple or height % multiple or not width or not height:
            raise TTTError(f"The size '{word}' is not a multiple of {multiple} pixels; write {_near(width, multiple)} or the like.")
        sizes.append((width, height))
    return sizes


def _near(value: int, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)


@dataclass
class Series:
    """The same arms at one or more sizes. notes: sentences about how the measurement was made."""

    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)

    @property
    def last(self) -> Comparison:
        return self.comparisons[-1]

    def by_tokens(self) -> list[Comparison]:
        return sorted(self.comparisons, key=lambda c: c.tokens)

    def break_even(self, arm: int = 1) -> float | None:
        """Image tokens from which this arm is as fast as the first one; None unless it is slower at a smaller size and
        faster at a larger one, both beyond the noise.

        Read off a straight line, in logarithms of tokens and of speed-up, between the two sizes around the crossing.
        """
        rows = [c for c in self.by_tokens() if c.tokens]
        clear = [(c.speedup_of(arm) > 1) - (c.speedup_of(arm) < 1) if not c.is_noise(arm) else 0 for c in rows]
        slower = max((i for i, sign in enumerate(clear) if sign < 0), default=None)
        faster = next((i for i, sign in enumerate(clear) if sign > 0 and slower is not None and i > slower), None)
        if faster is None:
            return None
        for small, large in zip(rows[slower:faster], rows[slower + 1 : faster + 1], strict=True):
            a, b = math.log(small.speedup_of(arm)), math.log(large.speedup_of(arm))
            if a < 0 <= b:
                start, end = math.log(small.tokens), math.log(large.tokens)
                found = math.exp(start + (end - start) * -a / (b - a))
        return found

    def break_even_line(self, arm: int = 1) -> str:
        """One sentence on where this arm starts to pay off."""
        rows, other, first = self.by_tokens(), self.last.arms[arm].label, self.last.arms[0].label
        tokens = self.break_even(arm)
        if tokens is not None:
            side = PIXELS_PER_TOKEN * math.sqrt(tokens)
            return f"{other} breaks even with {first} at about {tokens:,.0f} image tokens ({side:.0f} x {side:.0f} pixels)."
        if all(c.speedup_of(arm) < 1 for c in rows):
            return f"{other} is not faster than {first} at any of these sizes; no break-even up to {rows[-1].tokens:,} image tokens."
        if all(c.speedup_of(arm) >= 1 for c in rows):
            return f"{other} is at least as fast as {first} at each of these sizes, from {rows[0].tokens:,} image tokens on."
        return f"{other} against {first}: no break-even can be read off; at some of these sizes the difference is noise, or it goes both ways."

    def table(self) -> str:
        """The numbers of every size as text, then the break-even of each arm, then the notes."""
        parts = [c.table() for c in self.comparisons]
        if len(self.comparisons) > 1:
            parts.append("\n".join(self.break_even_line(i) for i in range(1, len(self.last.arms))))
        return "\n\n".join(parts + self.notes)

    def verdict(self) -> str:
        """The sentences alone, without numbers in columns: for a place that has no room for a table."""
        several = len(self.comparisons) > 1
        lines = [self.break_even_line(i) for i in range(1, len(self.last.arms))] if several else []
        lines += [f"{c.size}: {c.verdict(with_reason=not several)}" for c in self.comparisons]
        return "\n".join([*lines, *self.notes])

    def records(self) -> list[dict]:
        """One flat row for each size and arm: seconds, bytes and ratios as numbers."""
        rows = []
        for c in self.comparisons:
            for i, arm in enumerate(c.arms):
                low, high = c.speedup_range(i)
                rows.append(
                    {
                        "size": c.size, "image_tokens": c.tokens, "arm": arm.label, "seconds_per_step": arm.per_step,
                        "seconds_total": arm.total, "seconds_fastest": min(arm.totals), "seconds_slowest": max(arm.totals),
                        "runs": len(arm.totals), "peak_bytes": arm.peak, "memory_kind": c.memory_kind, "speedup": c.speedup_of(i),
                        "speedup_low": low, "speedup_high": high, "settings": c.settings, "device": c.device,
                    }
                )  # fmt: skip
        return rows

    def as_json(self) -> str:
        """Everything measured, single runs included, as text in JSON."""
        arms = len(self.last.arms)
        sizes = []
        for c in self.comparisons:
            entry = {k: v for k, v in vars(c).items() if k != "arms"} | {"verdict": c.verdict()}
            sizes.append(entry | {"arms": [{k: v for k, v in asdict(a).items() if k != "latent"} for a in c.arms]})
        break_even = {self.last.arms[i].label: self.break_even(i) for i in range(1, arms)}
        return json.dumps(
            {"pack_version": VERSION, "sizes": sizes, "break_even_image_tokens": break_even, "notes": self.notes}, indent=1
        )

    def as_csv(self) -> str:
        """`records` as text in CSV, one line of names first."""
        out, rows = io.StringIO(), self.records()
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def save(self, folder: Path, name: str = "ttt_compare") -> tuple[Path, Path]:
        """Writes `name`_00001.json and .csv (or the next free number) into folder; the two paths."""
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while (base := folder / f"{name}_{number:05}").with_suffix(".json").exists():
            number += 1
        paths = base.with_suffix(".json"), base.with_suffix(".csv")
        for path, text in zip(paths, (self.as_json(), self.as_csv()), strict=True):
            path.write_text(text, encoding="utf-8")
        return paths
