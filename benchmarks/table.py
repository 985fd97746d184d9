"""README tables of the speed benchmarks from results.jsonl, in markdown on stdout: `python benchmarks/table.py`.

The newest record of each measurement counts. CPU times are left out, as the machine may be shared: ratios only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results.jsonl"
LAYER_KEY = ("device", "dtype", "batch", "image_tokens", "text_tokens")
MODEL_KEY = ("device", "batch", "depth", "width", "pixels", "preset", "mode")


def newest(records: Iterable[dict], benchmark: str, key: tuple[str, ...]) -> list[dict]:
    kept = {tuple(r[k] for k in key): r for r in records if r.get("benchmark") == benchmark}
    return [kept[k] for k in sorted(kept)]


def rows(header: list[str], body: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *body))


def by_device(records: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for r in records:
        groups.setdefault(r["device"], []).append(r)
    return groups


def where(records: list[dict]) -> str:
    versions = {(r["torch"], r["triton"], r["commit"]) for r in records}
    return "; ".join(f"torch {t}, Triton {tr}, commit {c}" for t, tr, c in sorted(versions, key=str))


def times(ratio: dict, kind: str) -> str:
    ms = ratio["ms"]
    return f"{ms['sdpa'] / ms[kind]:.2f}" if kind in ms and "sdpa" in ms else ""


def layer_table(device: str, records: list[dict]) -> str:
    gpu = not device.startswith("CPU")
    header = ["B", "N image + text", "type"] + (["SDPA ms", "fused ms"] if gpu else [])
    header += ["SDPA / fused"] if gpu else []
    header += ["SDPA / torch", "SDPA / compiled"] + (["of copy bandwidth", "of matrix rate"] if gpu else [])
    body = []
    for r in records:
        line = [str(r["batch"]), f"{r['image_tokens']} + {r['text_tokens']}", r["dtype"]]
        if gpu:
            line += [f"{r['ms'].get(k, float('nan')):.3f}" for k in ("sdpa", "fused")] + [times(r, "fused")]
        line += [times(r, "torch"), times(r, "compiled")]
        if gpu:
            line += [f"{100 * r[share]['fused']:.0f} %" if "fused" in r[share] else "" for share in ("copy_share", "matrix_share")]
        body.append(line)
    return f"**One layer, 24 heads of 64, {device}** ({where(records)})\n\n" + rows(header, body)


def growth(records: list[dict]) -> str:
    lines = []
    for r in newest(records, "layer growth", ("device", "batch", "text_tokens")):
        slopes = ", ".join(f"{kind} {slope:.2f}" for kind, slope in r["exponent"].items())
        lines.append(f"Growth exponent, N = {r['tokens'][0]} to {r['tokens'][-1]}, {r['device']}, B = {r['batch']}: {slopes}.")
    return "\n\n".join(lines)


def model_table(device: str, records: list[dict]) -> str:
    header = ["pixels", "preset", "mode", "ms", "softmax / this", "peak MiB"]
    gpu = not device.startswith("CPU")
    body = [
        [
            str(r["pixels"]), r["preset"], r["mode"], f"{r['ms']:.1f}" if gpu else "",
            f"{r['speedup']:.2f}" if r["speedup"] else "", f"{r['peak_mib']:.0f}" if r["peak_mib"] else "",
        ]
        for r in sorted(records, key=lambda r: (r["pixels"], r["mode"], ("none", "self", "paper", "all").index(r["preset"])))
    ]
    first = records[0]
    title = f"**Whole forward, {first['depth']} blocks of width {first['width']}, B = {first['batch']}, {device}**"
    return f"{title} ({where(records)})\n\n" + rows(header, body)


def main() -> None:
    records = [json.loads(line) for line in RESULTS.read_text().splitlines() if line.strip()] if RESULTS.exists() else []
    parts = [layer_table(d, r) for d, r in by_device(newest(records, "layer", LAYER_KEY)).items()]
    parts += [growth(records)] + [model_table(d, r) for d, r in by_device(newest(records, "model", MODEL_KEY)).items()]
    if not any(not r["device"].startswith("CPU") for r in records if r.get("benchmark") in ("layer", "model")):
        parts.append("No GPU has measured this version yet: GPU numbers are blank on purpose.")
    print("\n\n".join(p for p in parts if p))


if __name__ == "__main__":
    main()
