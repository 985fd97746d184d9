"""Train the embedded demo model on scikit-learn's digits, on a CPU.

    python -m comfy_ttt.demo.train_digits --steps 4000 --minutes 40

The network is diffusers' SD3Transformer2DModel at a tiny size (hidden 192, 3 heads
of 64, 3 blocks, a second image attention in blocks 0 and 1), trained by rectified
flow as SD3 is: x = (1 - sigma) picture + sigma noise, target noise - picture,
timestep sigma * 1000. One safetensors file comes out, in SD3.5's layout and tensor
names, fp16, with how it was trained in its header.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from ..ttt_core.files import atomic_write
from ..ttt_core.hosts.diffusers_names import to_diffusers, to_original
from ..ttt_core.trajectory import shifted
from . import digits

CONFIG = dict(
    sample_size=96, patch_size=2, in_channels=16, out_channels=16, num_layers=3, attention_head_dim=64,
    num_attention_heads=3, joint_attention_dim=digits.WIDTH, caption_projection_dim=192,
    pooled_projection_dim=digits.WIDTH, pos_embed_max_size=48, dual_attention_layers=(0, 1), qk_norm="rms_norm",
)
TOKENS_PER_STEP = 2048        # image tokens; bigger pictures come in smaller batches
DROP_PROMPT = 0.1
RATE, RATE_END, WARM_UP = 1.5e-3, 2e-5, 100
# Latent sides with their share of the steps: small ones learn fastest, the rest
# teaches other sizes; "wide" draws both sides at random.
SIZES = {16: 0.40, 24: 0.15, 32: 0.25, 48: 0.04, 64: 0.02, "wide": 0.14}


def build(seed: int):
    """A new transformer; modulations and the output start at zero, as DiT does, so that blocks start as identity."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(seed)
    model = SD3Transformer2DModel(**CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".norm1" in name or name.startswith(("norm_out", "proj_out")):
                parameter.zero_()
    return model


def draw_size(rng: random.Random) -> tuple[int, int]:
    """A random latent size (h, w), both even."""
    side = rng.choices(list(SIZES), weights=SIZES.values())[0]
    if side != "wide":
        return side, side
    return 2 * rng.randint(8, 20), 2 * rng.randint(8, 20)


def draw_sigma(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count,) noise levels in (0, 1): half logit-normal as SD3, half uniform, both under the sampler's shift.

    The uniform half covers the ends, which the logit-normal alone hardly visits.
    """
    normal = torch.sigmoid(torch.randn(count, generator=generator))
    uniform = torch.rand(count, generator=generator)
    u = torch.where(torch.rand(count, generator=generator) < 0.5, normal, uniform)
    return shifted(u, digits.FLOW_SHIFT)


def flow_loss(model, cells, labels, size, generator, drop=DROP_PROMPT) -> torch.Tensor:
    """Mean squared error of the predicted velocity for digits (n, 8, 8) drawn at latent ``size``."""
    h, w = size
    x0 = digits.grey_to_model(digits.draw(cells, h * 4, w * 4))
    noise = torch.randn(x0.shape, generator=generator)
    sigma = draw_sigma(len(x0), generator)
    dropped = torch.rand(len(x0), generator=generator) < drop
    context, pooled = digits.encode_digits([None if d else int(c) for d, c in zip(dropped, labels)])
    s = sigma[:, None, None, None]
    velocity = model((1 - s) * x0 + s * noise, context, pooled, sigma * 1000).sample
    return F.mse_loss(velocity, noise - x0)


@torch.no_grad()
def hold_out_loss(model, side: int = 16) -> float:
    """Flow loss on the 180 hold-out digits with fixed noise, four noise levels each, every prompt kept."""
    cells, labels = digits.load_digits(hold_out=True)
    generator = torch.Generator().manual_seed(1234)
    runs = [
        flow_loss(model, part, name, (side, side), generator, drop=0.0)
        for _ in range(4) for part, name in zip(cells.split(60), labels.split(60))
    ]
    return torch.stack(runs).mean().item()


def sample_accuracy(model, height: int, width: int, *, each: int = 5, cfg: float = 3.0, seed: int = 0):
    """Share of samples (``each`` per digit) that the recogniser reads as the digit asked for, and the pictures."""
    wanted = [d for d in range(10) for _ in range(each)]
    run = lambda x, t, c, p: model(x, c, p, t).sample
    picture = digits.samples_to_picture(digits.sample(run, wanted, height, width, cfg=cfg, seed=seed))
    read = digits.recogniser()(picture)
    return (read == torch.tensor(wanted)).float().mean().item(), picture


def save(model, path: Path, facts: dict) -> None:
    """Write fp16 tensors in SD3.5's layout, atomically, with ``facts`` in the header."""
    from safetensors.torch import save_file

    tensors = {n: t.detach().half().contiguous() for n, t in to_original(model.state_dict()).items()}
    header = {"format": "pt", "title": "TTT demo: digits, an SD3.5-architecture toy model",
              **{name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}}
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=header)


def start_from(path: Path, *models) -> tuple[int, float]:
    """Load an earlier file of this script into ``models``; returns the steps and minutes already spent on it."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = to_diffusers({name: file.get_tensor(name).float() for name in file.keys()})
        header = file.metadata()
    for model in models:
        model.load_state_dict(tensors)
    return int(header["steps"]), float(header["minutes"])


def train(args) -> None:
    cells, labels = digits.load_digits(hold_out=False)
    rng, generator = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    model = build(args.seed)
    average = build(args.seed)  # exponential moving average of the weights, the model that is kept
    earlier = start_from(args.start_from, model, average) if args.start_from else (0, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)

    start, recent, step = time.monotonic(), [], 0
    while True:
        passed = (time.monotonic() - start) / 60
        done = max(step / args.steps, passed / args.minutes)
        if done >= 1:
            break
        rate = RATE_END + (RATE - RATE_END) * 0.5 * (1 + math.cos(math.pi * done))
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM_UP)

        h, w = draw_size(rng)
        count = max(2, min(64, TOKENS_PER_STEP // (h * w // 4)))
        pick = torch.randint(len(cells), (count,), generator=generator)
        loss = flow_loss(model, cells[pick], labels[pick], (h, w), generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            decay = min(0.998, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)

        recent = (recent + [loss.item()])[-50:]
        if not math.isfinite(recent[-1]):
            raise RuntimeError(f"The loss is {recent[-1]} at step {step}: lower the learning rate and start again.")
        if step % 50 == 0:
            passed = (time.monotonic() - start) / 60
            left = passed * (1 / max(step / args.steps, passed / args.minutes, 1e-6) - 1)
            print(f"step {step}/{args.steps}  loss {sum(recent) / len(recent):.4f}  {passed:.1f} min, "
                  f"about {left:.1f} min left", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(average, args.out, facts(args, earlier, step, start, hold_out_loss(average)))

    made = facts(args, earlier, step, start, None)
    loss16, loss32 = hold_out_loss(average, 16), hold_out_loss(average, 32)
    made.update(hold_out_flow_loss=loss16, hold_out_flow_loss_32=loss32)
    save(average, args.out, made)
    print("trained and saved; now sampling", flush=True)
    scores = {f"{w}x{h}": sample_accuracy(average, h, w)[0] for h, w in ((64, 64), (128, 128), (128, 96))}
    save(average, args.out, {**made, "sample_accuracy_cfg3_20_steps": scores})
    print(f"hold-out flow loss {loss16:.4f} (latent 16 x 16), {loss32:.4f} (32 x 32)")
    for name, score in scores.items():
        print(f"samples read as the digit asked for, {name} pixels, cfg 3, 20 steps: {score:.0%}")
    print(f"wrote {args.out}")


def facts(args, earlier: tuple[int, float], step: int, start: float, loss: float | None) -> dict:
    """What the header tells about the training; ``earlier`` is what `start_from` gave."""
    return {
        "data": "scikit-learn load_digits, first 1617 of 1797 pictures; the last 180 held out",
        "training": "rectified flow, AdamW, EMA, prompts dropped 10 %; comfy_ttt/demo/train_digits.py",
        "steps": earlier[0] + step, "continued_at_step": earlier[0], "seed": args.seed,
        "minutes": round(earlier[1] + (time.monotonic() - start) / 60, 1),
        "hold_out_flow_loss": loss, "config": CONFIG,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="stop by then, the schedule follows (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=500, help="steps between intermediate files, 0 for none")
    parser.add_argument("--start-from", type=Path, help="continue from a file of this script, with a new schedule")
    parser.add_argument("--out", type=Path, default=digits.MODEL)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
