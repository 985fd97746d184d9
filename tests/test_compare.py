"""The comparison's arithmetic and pictures, with arms whose times are known."""

import csv
import io
import json
import time

import numpy as np
import pytest
import torch

from comfy_ttt.ttt_core import compare as core
from comfy_ttt.ttt_core.compare import Arm, ArmResult, Comparison, compare, runs_of
from comfy_ttt.ttt_core.compare_series import Series, parse_sizes
from comfy_ttt.ttt_core.cost import count, explain
from comfy_ttt.ttt_core.errors import TTTError
from comfy_ttt.ttt_core.geometry import Geometry
from comfy_ttt.ttt_core.pictures import message, side_by_side
from comfy_ttt.ttt_core.plots import comparison_chart, difference_map, series_chart
from comfy_ttt.ttt_core.select import select_attentions

CPU = torch.device("cpu")
MEDIUM = Geometry(24, tuple(range(13)), 1536, 24, 64)


class Clock:
    """A clock that only sampling moves, so that times in these tests are exact."""

    def __init__(self, monkeypatch):
        self.now, self.order = 0.0, []
        monkeypatch.setattr(core.time, "perf_counter", lambda: self.now)

    def arm(self, label, *seconds, steps=4, renew=None):
        """Each run takes the next of `seconds` (round and round), in equal steps."""
        turn = 0

        def sample(on_step):
            nonlocal turn
            self.order.append(label)
            took = seconds[turn % len(seconds)]
            turn += 1
            for step in range(steps):
                self.now += took / steps
                on_step(step)
            return torch.zeros(1, 16, 2, 2)

        return Arm(label, sample, renew)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def run(arms, **kwargs):
    return compare(arms, size="64 x 64", device=CPU, **{"repeats": 3, "warmup": 1} | kwargs)


def result(label, *totals, peak=1 << 20):
    return ArmResult(label, torch.zeros(1, 16, 2, 2), list(totals), [t / 10 for t in totals], peak)


def at(tokens, *arms):
    return Comparison(list(arms), f"{tokens} tokens", "a CPU", "memory", "settings", tokens)


def test_a_slowed_copy_shows_its_factor_and_the_same_arm_shows_one(clock):
    outcome = run([clock.arm("a", 1.0), clock.arm("slowed", 2.5), clock.arm("same", 1.0)])
    assert outcome.speedup == pytest.approx(1 / 2.5) and outcome.speedup_of(2) == pytest.approx(1)
    assert outcome.arms[1].per_step == pytest.approx(2.5 / 4)
    assert "slowed is slower here: 2.50x the time of a" in outcome.verdict()
    assert "same and a: no difference beyond the spread" in outcome.verdict()


def test_warm_up_is_not_counted_and_the_first_to_go_changes(clock):
    outcome = run([clock.arm("a", 9.0, 1.0, 1.0, 1.0), clock.arm("b", 7.0, 2.0, 2.0, 2.0)])
    assert outcome.arms[0].totals == pytest.approx([1, 1, 1]) and outcome.arms[1].totals == pytest.approx([2, 2, 2])
    assert clock.order == ["a", "b", "a", "b", "b", "a", "a", "b"]


def test_overlapping_runs_are_called_noise_whatever_the_medians_say(clock):
    outcome = run([clock.arm("a", 1.0, 1.0, 1.3, 1.0), clock.arm("b", 1.1, 1.1, 1.2, 1.1)])
    low, high = outcome.speedup_range(1)
    assert low < 1 < high and outcome.is_noise(1) and "no difference" in outcome.verdict()
    apart = run([clock.arm("a", 1.0, 1.0, 1.3, 1.0), clock.arm("b", 1.4)])
    assert not apart.is_noise(1) and "slower" in apart.verdict()


def test_one_run_each_claims_nothing(clock):
    assert "one run each says nothing about noise" in run([clock.arm("a", 1.0), clock.arm("b", 0.5)], repeats=1).verdict()


def test_the_reason_is_given_only_where_something_is_not_faster(clock):
    slower = run([clock.arm("a", 1.0), clock.arm("b", 1.5)], reason="Few tokens.")
    faster = run([clock.arm("a", 1.5), clock.arm("b", 1.0)], reason="Few tokens.")
    assert slower.table().count("Few tokens.") == 1 and "Few tokens." not in faster.table()


def test_an_arm_to_renew_is_renewed_and_warmed_before_each_timed_run(clock):
    done = []
    arms = [clock.arm("a", 1.0, renew=lambda: done.append(len(clock.order))), clock.arm("b", 1.0)]
    run(arms, repeats=2, warmup=1)
    assert clock.order == ["b", "a", "a", "b", "b", "a", "a"] and done == [1, 5]
    assert runs_of(arms, 2, 1) == len(clock.order)


def test_a_cancel_inside_a_run_ends_the_comparison(clock):
    def cancel():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([clock.arm("a", 1.0), clock.arm("b", 1.0)], on_progress=cancel)
    assert clock.order == ["a"]


def test_real_clock_a_sleeping_arm_is_as_slow_as_it_sleeps():
    def sleeper(seconds):
        def sample(on_step):
            time.sleep(seconds)
            on_step(0)
            return torch.zeros(1)

        return sample

    outcome = compare([Arm("a", sleeper(0.05)), Arm("b", sleeper(0.15))], size="", device=CPU, repeats=5, warmup=0)
    low, high = outcome.speedup_range(1)
    assert low <= 1 / 3 <= high or outcome.speedup == pytest.approx(1 / 3, rel=0.25)


def test_break_even_is_where_the_line_between_two_sizes_crosses_one():
    series = Series([at(4096, result("s", 2.0), result("t", 1.0)), at(1024, result("s", 1.0), result("t", 2.0))])
    assert series.break_even() == pytest.approx(2048)
    assert "t breaks even with s at about 2,048 image tokens (724 x 724 pixels)" in series.table()


def test_no_break_even_is_invented():
    never = Series([at(256, result("s", 1.0), result("t", 2.0)), at(1024, result("s", 1.0), result("t", 1.5))])
    always = Series([at(256, result("s", 2.0), result("t", 1.0)), at(1024, result("s", 3.0), result("t", 1.0))])
    assert never.break_even() is None and "no break-even up to 1,024" in never.table()
    assert always.break_even() is None and "at each of these sizes" in always.table()


def test_a_crossing_inside_the_noise_is_no_break_even():
    noisy = Series([at(256, result("s", 1.0, 1.2), result("t", 1.1, 1.2)), at(1024, result("s", 2.0), result("t", 1.0))])
    assert noisy.comparisons[0].speedup < 1 and noisy.break_even() is None and "no break-even can be read off" in noisy.table()
    between = Series([at(64, result("s", 1.0), result("t", 4.0)), *noisy.comparisons])
    assert 256 < between.break_even() < 1024


def test_a_gain_that_is_lost_again_counts_from_the_last_loss():
    rows = [(64, 2.0), (256, 1.0), (1024, 0.5), (4096, 2.0)]
    series = Series([at(n, result("s", gain), result("t", 1.0)) for n, gain in rows if gain != 1.0])
    assert series.break_even() == pytest.approx(2048)


def test_files_hold_what_the_table_says(tmp_path):
    series = Series([at(256, result("s", 1.0, 1.2), result("t", 2.0, 2.1))], ["a note"])
    first, second = series.save(tmp_path), series.save(tmp_path)
    assert [p.name for p in first] == ["ttt_compare_00001.json", "ttt_compare_00001.csv"] and second[0].name == "ttt_compare_00002.json"
    data = json.loads(first[0].read_text())
    assert data["sizes"][0]["arms"][1]["totals"] == [2.0, 2.1] and data["notes"] == ["a note"] and data["sizes"][0]["tokens"] == 256
    rows = list(csv.DictReader(io.StringIO(first[1].read_text())))
    assert [r["arm"] for r in rows] == ["s", "t"] and float(rows[1]["speedup"]) == pytest.approx(1.1 / 2.05)
    assert float(rows[1]["speedup_low"]) == pytest.approx(1.0 / 2.1) and int(rows[0]["peak_bytes"]) == 1 << 20


@pytest.mark.parametrize(
    ("text", "sizes"), [("", []), ("  ", []), ("512", [(512, 512)]), ("512, 768X1024", [(512, 512), (768, 1024)]), ("16 1040", [(16, 16), (1040, 1040)])]
)
def test_sizes_are_read(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(("text", "says"), [("big", "Cannot read the size 'big'"), ("500", "write 496"), ("0", "not a multiple"), ("512*512", "Cannot read"), ("-512", "Cannot read")])
def test_bad_sizes_are_refused_in_a_sentence(text, says):
    with pytest.raises(TTTError, match=says.replace("*", r"\*")):
        parse_sizes(text)


def test_counted_operations_of_sd35_medium():
    """By hand for 1024 x 1024: N = 4096, T = 154, C = 1536; 13 self and 5 joint attentions of 18 N d C instead of 4 N^2 C."""
    names = [f"joint_blocks.{i}.x_block.attn.qkv.weight" for i in range(24)] + [f"joint_blocks.{i}.x_block.attn2.qkv.weight" for i in range(13)]
    n, m, c = 4096, 4096 + 154, 1536
    cost = count(MEDIUM, select_attentions(names, "paper"), n, 154)
    assert cost.replaced == 4 * c * (13 * n * n + 5 * m * m) and cost.kept == 4 * c * 19 * m * m
    assert cost.ttt == 18 * 64 * c * (13 * n + 5 * m)
    assert cost.linear == 24 * 24 * m * c * c + 13 * 8 * n * c * c
    assert 0 < cost.share < 1 and cost.bound > 1


def test_with_few_tokens_the_count_says_that_nothing_can_be_gained():
    few, many = (count(MEDIUM, MEDIUM.attentions, n, 0) for n in (64, 16384))
    assert few.bound < 1 < many.bound
    assert "nothing to gain here" in explain(few, 64) and f"{many.bound:.2f}x" in explain(many, 16384)


def test_pictures_are_pictures(clock):
    arms = [clock.arm(n, 1.0 + i) for i, n in enumerate(("softmax", "TTT with a very long name indeed", "c", "d"))]
    one = run(arms)
    several = Series([at(n, *(result(a.label, 1.0 + i) for i, a in enumerate(one.arms))) for n in (256, 1024, 4096)])
    small = [np.zeros((40, 24, 3), np.float32), np.ones((40, 24, 3), np.float32)]
    drawn = [
        comparison_chart(one), series_chart(Series([one])), series_chart(several), side_by_side(small, ["black", "white"]),
        difference_map(small[0], [small[1]], ["black", "white"], "pixels"), message("No VAE is connected."),
    ]  # fmt: skip
    for picture in drawn:
        assert picture.ndim == 3 and picture.shape[2] == 3 and picture.dtype == np.float32
        assert picture.min() >= 0 and picture.max() <= 1 and picture.std() > 0.01


def test_side_by_side_keeps_the_pixels():
    left, right = np.full((300, 260, 3), 0.25, np.float32), np.full((300, 260, 3), 0.75, np.float32)
    row = side_by_side([left, right], ["left", "right"])
    assert np.allclose(row[-300:, :260], 64 / 255) and np.allclose(row[-300:, -260:], 191 / 255)
    assert row.shape[1] == 2 * 260 + 8 and row.shape[0] > 300
