"""What calibrating and fine-tuning are worth, on the digit model: one table, seeds fixed, on a CPU.

    python benchmarks/digits.py            all rows, about 15 minutes of one core; rows that are in results.jsonl are kept
    python benchmarks/digits.py --quick    a few steps of a few rows, to see that it runs; written nowhere
    python benchmarks/digits.py --table    print the table from results.jsonl

Rows: softmax, softmax fine-tuned, and for presets paper and all: untrained, calibrated, calibrated + fine-tuned, paper
initialisation + fine-tuned, all fine-tuning with equal steps, data and rates on the whole model. Then the paper's
ablations on preset all, shorter and to compare among themselves. Columns: flow loss on 180 digits never trained on (fixed noise, 4 noise levels each); accuracy
of a scikit-learn classifier on samples (10 of each digit, same noise in every row); Frechet distance between its 32
hidden activations on the samples and on the training digits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from comfy_ttt.demo import digits
from comfy_ttt.demo.digits_training import examples, load_model, prompts
from comfy_ttt.demo.train_digits import hold_out_loss
from comfy_ttt.ttt_core import TTTError, TTTSpec, TTTWeights
from comfy_ttt.ttt_core.calibrate import CalibrationSettings, calibrate
from comfy_ttt.ttt_core.finetune import FineTune, FineTuneSettings
from comfy_ttt.ttt_core.measure import device_name

RESULTS = Path(__file__).parent / "results.jsonl"
CALIBRATION = CalibrationSettings(steps=300, samples=160, cfg=3.0)
TUNING = FineTuneSettings(mode="full", steps=120, batch=8, rate=1e-4, new_rate_factor=20, ema=0.97)
EACH, STEPS, CFG = 10, 10, 3.0  # samples of each digit, Euler steps, guidance
SIZE = 16  # latent side: 64 x 64 pixels


@dataclass(frozen=True)
class Row:
    """One line of the table. attentions "none" is softmax. lost: base tensors made anew instead of inherited."""

    name: str
    attentions: str
    calibrated: bool = False
    tuned: bool = False
    key_norm: str = "instance"
    locality: str = "dwc_qk"
    lost: str = ""
    brief: bool = False  # an ablation: fewer steps and no samples, to compare among themselves


BRIEF = {"calibration": {"steps": 150}, "tuning": {"steps": 40}}


def rows() -> list[Row]:
    table = [Row("softmax", "none"), Row("softmax, fine-tuned", "none", tuned=True)]
    for preset in ("paper", "all"):
        table += [
            Row("TTT untrained", preset),
            Row("TTT calibrated", preset, calibrated=True),
            Row("TTT calibrated + fine-tuned", preset, calibrated=True, tuned=True),
            Row("TTT paper init + fine-tuned", preset, tuned=True),
        ]
    variants = [("as in the paper", {})]
    variants += [(f"key norm {kind}", {"key_norm": kind}) for kind in ("none", "scale", "center")]
    variants += [("no locality", {"locality": "none"})]
    heirs = [("inherits MLPs only", {"lost": "attention"}), ("inherits attentions only", {"lost": "mlp"})]
    table += [Row(f"{name}, fine-tuned", "all", tuned=True, brief=True, **options) for name, options in variants + heirs]
    table += [Row(f"{name}, calibrated", "all", calibrated=True, brief=True, **options) for name, options in variants]
    return table


def forget(model, lost: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """New values, as a fresh linear layer has them, for the attention projections or the MLPs of all blocks.

    Embedders, modulations and the output layer are inherited in every row, so a row tells about these parts alone.
    """
    generator, new = torch.Generator().manual_seed(seed), {}
    for name, tensor in sorted(model.base_tensors().items()):
        mine = ".mlp." in name and "joint_blocks" in name if lost == "mlp" else ".qkv." in name or ".proj." in name and "joint_blocks" in name
        if ".ln_" in name and lost == "attention":
            new[name] = torch.ones_like(tensor)
        elif mine and name.endswith("weight"):
            new[name] = (torch.rand(tensor.shape, generator=generator) * 2 - 1) * tensor.shape[1] ** -0.5
        elif mine:
            new[name] = torch.zeros_like(tensor)
    return new


# ---------------------------------------------------------------- sample quality


class Judge:
    """A small classifier of digits and its feature space, fitted once on the training digits as the model draws them."""

    def __init__(self, quick: bool):
        from sklearn.neural_network import MLPClassifier

        cells, labels = digits.load_digits(hold_out=False)
        self._net = MLPClassifier((64, 32), random_state=0, max_iter=20 if quick else 300).fit(self._see(cells), labels.numpy())
        self._real = self._features(self._see(cells))
        held, names = digits.load_digits(hold_out=True)
        self.hold_out_accuracy = float(self._net.score(self._see(held), names.numpy()))
        self.floor = frechet(self._features(self._see(held)), self._real)

    @staticmethod
    def _see(cells: torch.Tensor) -> np.ndarray:
        return digits.undraw(digits.draw(cells, 64, 64)[:, 0, :, :, None]).flatten(1).numpy()

    def _features(self, x: np.ndarray) -> np.ndarray:
        for weight, bias in list(zip(self._net.coefs_, self._net.intercepts_, strict=True))[:-1]:
            x = np.maximum(x @ weight + bias, 0)
        return x

    def __call__(self, pictures: torch.Tensor, wanted: list[int]) -> tuple[float, float]:
        """(accuracy, Frechet distance) of pictures (B, H, W, 3)."""
        x = digits.undraw(pictures).flatten(1).numpy()
        return float((self._net.predict(x) == np.array(wanted)).mean()), frechet(self._features(x), self._real)


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Frechet distance of two sets of features (n, d) taken as Gaussians, as FID has it."""
    from scipy.linalg import sqrtm

    (ma, ca), (mb, cb) = ((x.mean(0), np.cov(x, rowvar=False)) for x in (a, b))
    root = np.real(sqrtm(ca @ cb + 1e-6 * np.eye(len(ca))))
    return float(((ma - mb) ** 2).sum() + np.trace(ca + cb - 2 * root))


# ---------------------------------------------------------------- one row


class Study:
    def __init__(self, quick: bool, seed: int = 0, tuning_steps: int = TUNING.steps):
        self.quick, self.seed = quick, seed
        self.calibration = replace(CALIBRATION, seed=seed, **({"steps": 8, "samples": 16} if quick else {}))
        self.tuning = replace(TUNING, **{"seed": seed, "steps": tuning_steps} | ({"steps": 3, "batch": 4} if quick else {}))
        self.model = load_model()
        tensors = sorted(self.model.base_tensors().items())
        self.base = hashlib.sha256(b"".join(t.numpy().tobytes() for _, t in tensors)).hexdigest()[:12]
        self.examples = examples(SIZE * 4, SIZE * 4)
        self.judge = Judge(quick)
        self._calibrated: dict[str, tuple[TTTWeights, float]] = {}

    def settings(self, row: Row) -> tuple[CalibrationSettings, FineTuneSettings]:
        brief = BRIEF if row.brief and not self.quick else {"calibration": {}, "tuning": {}}
        return replace(self.calibration, **brief["calibration"]), replace(self.tuning, **brief["tuning"])

    def key(self, row: Row) -> dict:
        """What a result depends on; a row with the same key is not run again."""
        calibration, tuning = self.settings(row)
        key = {"row": asdict(row), "base": self.base, "samples": None if row.brief else [EACH, STEPS, CFG]}
        return key | ({"calibration": asdict(calibration)} if row.calibrated else {}) | ({"tuning": asdict(tuning)} if row.tuned else {})

    def run(self, row: Row) -> dict:
        start = time.monotonic()
        facts: dict = {}
        calibration, tuning = self.settings(row)
        spec = TTTSpec(row.attentions, key_norm=row.key_norm, locality=row.locality)
        weights = TTTWeights.new(self.model.geometry, spec, seed=self.seed, base_sketch=self.model.base_sketch)
        try:
            if row.calibrated:
                weights, facts["calibration_seconds"] = self._calibrate(weights, calibration)
            weights.base_changes |= forget(self.model, row.lost, self.seed) if row.lost else {}
            if row.tuned:
                before = time.monotonic()
                weights = FineTune(self.model, weights, self.examples, tuning).run()
                facts["tuning_seconds"] = round(time.monotonic() - before, 1)
            facts |= self._measure(weights, row.brief)
        except TTTError as e:  # divergence is a result too
            facts["stopped"] = str(e)
        return facts | {"seconds": round(time.monotonic() - start, 1)}

    def _calibrate(self, weights: TTTWeights, settings: CalibrationSettings) -> tuple[TTTWeights, float]:
        name = weights.spec.to_json() + str(settings.steps)
        if name not in self._calibrated:
            result, report = calibrate(self.model, weights, prompts(), [(SIZE, SIZE)], settings)
            self._calibrated[name] = result, round(report.seconds, 1)
        result, seconds = self._calibrated[name]
        return replace(result, base_changes={}), seconds

    def _measure(self, weights: TTTWeights, brief: bool = False) -> dict:
        wanted = [d for d in range(10) for _ in range(1 if self.quick else EACH)]

        def velocity(x, t, context, pooled):
            return self.model.transformer(x, context, pooled, t).sample

        with torch.no_grad(), self.model.running(weights.layers, weights.base_changes):
            loss = hold_out_loss(self.model.transformer, SIZE)
            if brief:
                return {"loss": round(loss, 5)}
            steps = 2 if self.quick else STEPS
            samples = digits.sample(velocity, wanted, SIZE * 4, SIZE * 4, steps=steps, cfg=CFG, seed=self.seed)
        if not bool(torch.isfinite(samples).all()):
            return {"stopped": "samples are not finite"}
        accuracy, distance = self.judge(digits.samples_to_picture(samples), wanted)
        return {"loss": round(loss, 5), "accuracy": round(accuracy, 4), "frechet": round(distance, 3)}


# ---------------------------------------------------------------- the table


def stored(study_key: dict) -> dict | None:
    """The newest result of this key in results.jsonl."""
    found = None
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        record = json.loads(line) if line.strip() else {}
        if record.get("benchmark") == "digits" and record.get("key") == json.loads(json.dumps(study_key)):
            found = record
    return found


def print_table(results: list[tuple[Row, dict]]) -> None:
    """Markdown. 'gap closed': (untrained - this) / (untrained - softmax) of the hold-out loss; 'beside tuned softmax': loss over
    that of softmax fine-tuned for as many steps, minus 1."""
    by = {(r.name, r.attentions): f.get("loss") for r, f in results}
    softmax, tuned = by.get(("softmax", "none")), by.get(("softmax, fine-tuned", "none"))
    print("| row | attentions | hold-out flow loss | gap closed | beside tuned softmax | accuracy | Frechet | seconds |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for row, facts in results:
        loss, cells = facts.get("loss"), [row.name, row.attentions]
        if "stopped" in facts:
            print(f"| {row.name} | {row.attentions} | stopped: {facts['stopped']} | | | | | {facts['seconds']:.0f} |")
            continue
        untrained = by.get(("TTT untrained", row.attentions))
        closed = f"{(untrained - loss) / (untrained - softmax):.1%}" if untrained and softmax and row.attentions != "none" else ""
        beside = f"{loss / tuned - 1:+.1%}" if tuned and row.tuned and not row.brief else ""
        cells += [f"{loss:.4f}", closed, beside, *((f"{facts['accuracy']:.1%}", f"{facts['frechet']:.2f}") if "accuracy" in facts else ("", "")), f"{facts['seconds']:.0f}"]
        print("| " + " | ".join(cells) + " |")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of the first rows, nothing is written")
    parser.add_argument("--table", action="store_true", help="only print what results.jsonl has for the model and these settings")
    parser.add_argument("--part", choices=("all", "main", "ablations"), default="all", help="run these rows only (two processes can share the work)")
    parser.add_argument("--tuning-steps", type=int, default=TUNING.steps, help=f"fine-tuning steps outside the ablations (default {TUNING.steps})")
    parser.add_argument("--only", default="", help="run only rows whose 'name, attentions' holds this text, such as 'calibrated + fine-tuned, all'")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    study, results = Study(args.quick, tuning_steps=args.tuning_steps), []
    print(f"classifier: {study.judge.hold_out_accuracy:.1%} of the hold-out digits, Frechet distance of those {study.judge.floor:.2f}", flush=True)
    wanted = {"all": (False, True), "main": (False,), "ablations": (True,)}[args.part]
    for row in rows()[:6] if args.quick else [r for r in rows() if r.brief in wanted and args.only in f"{r.name}, {r.attentions}"]:
        found = None if args.quick else stored(study.key(row))
        if found is None and args.table:
            continue
        if found is None:
            facts = study.run(row)
            found = {"benchmark": "digits", **facts, "device": device_name(study.model.device), "torch": torch.__version__, "key": study.key(row)}
            print(f"{row.name}, {row.attentions}: {facts}", flush=True)
            if not args.quick:
                with open(RESULTS, "a") as file:
                    file.write(json.dumps(found) + "\n")
        results.append((row, found))
    print_table(results)


if __name__ == "__main__":
    main()
