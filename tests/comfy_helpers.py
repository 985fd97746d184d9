"""Short ways to do in a test what a graph does in ComfyUI."""

import torch


def load(path):
    import comfy.sd

    with torch.inference_mode():  # as ComfyUI runs its nodes
        return comfy.sd.load_diffusion_model(str(path))


def conditioning(seed=0, tokens=8, width=64):
    g = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, tokens, width, generator=g), {"pooled_output": torch.randn(1, width, generator=g)}]]


def empty_latent(width=128, height=96, batch=1):
    return {"samples": torch.full((batch, 16, height // 8, width // 8), 0.0609)}


def sample(model, width=128, height=96, batch=1, steps=2, cfg=1.0, seed=0, latent=None, positive=None):
    """KSampler's own function; checks that the result is finite, since NaN would make every comparison pass."""
    import nodes

    with torch.inference_mode():
        out = nodes.common_ksampler(
            model, seed, steps, cfg, "euler", "simple", positive or conditioning(1), conditioning(2, tokens=5),
            latent or empty_latent(width, height, batch),
        )[0]["samples"]  # fmt: skip
    assert torch.isfinite(out).all()
    return out.clone()


def run_node(node, **inputs):
    """A node's outputs, run as ComfyUI runs it."""
    with torch.inference_mode():
        return node.execute(**inputs).args


def trained(weights, scale=0.15, seed=5):
    """The same layers with weights large enough that what they compute is plain to see."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in weights.layers.values():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * (scale if p.dim() == 3 else 0.1))
    weights.made = {"state": "calibrated", "steps": 1}
    return weights
