"""The speed benchmarks refuse to speak when numbers are wrong, and the README's table is made from their records."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import layer  # noqa: E402
import model  # noqa: E402
import table  # noqa: E402


@pytest.mark.parametrize("allowed", [1e-4, 0.0])
def test_layer_prints_no_speed_when_the_gate_fails(allowed, monkeypatch):
    monkeypatch.setattr(layer, "HEADS", 1)
    monkeypatch.setitem(layer.GATE, torch.float32, allowed)

    def check():
        return layer.gate(["sdpa", "torch"], torch.float32, torch.device("cpu"), None)

    if allowed:
        assert set(check()) == {"torch"}
    else:
        with pytest.raises(SystemExit, match="no speed is printed"):
            check()


def test_model_prints_no_speed_when_the_gate_fails(monkeypatch):
    import _mmdit

    def wrong(q, *args, backend, **kwargs):
        return q * (1 if backend == "torch" else 2)

    monkeypatch.setattr(_mmdit, "ttt_swiglu", wrong)
    with pytest.raises(SystemExit, match="no speed is printed"):
        model.gate(_mmdit.Shape(1, 1, 64, 1, 8), torch.float32, torch.device("cpu"), "triton", 3)


def test_presets_replace_what_the_paper_does():
    from _mmdit import Shape, chosen

    own = {("self", i) for i in range(13)}
    assert chosen("paper", Shape()) == own | {("joint", i) for i in range(19, 24)}
    assert chosen("all", Shape()) == own | {("joint", i) for i in range(24)}
    assert chosen("self", Shape()) == own and chosen("none", Shape()) == set()


def test_growth_exponent():
    assert layer.exponent({1024: 3.0, 4096: 48.0, 16384: 768.0}) == pytest.approx(2)
    assert layer.exponent({1024: 3.0}) is None


def test_the_newest_record_counts_and_cpu_times_stay_out():
    record = dict(
        benchmark="layer", device="CPU x", dtype="float32", batch=1, image_tokens=1024, text_tokens=0,
        torch="2", triton=None, commit="abc", ms={"sdpa": 8.0, "torch": 2.0, "compiled": 1.0},
    )
    rows = table.newest([record, {"benchmark": "other"}, {**record, "ms": {**record["ms"], "torch": 4.0}}], "layer", table.LAYER_KEY)
    text = table.layer_table("CPU x", rows)
    assert "| 1 | 1024 + 0 | float32 | 2.00 | 8.00 |" in text and "ms" not in text
