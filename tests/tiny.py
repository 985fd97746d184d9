"""Random models in SD3.5's file layout: tiny ones for tests, of any depth."""

import torch
from safetensors.torch import save_file

PREFIX = "model.diffusion_model."


def shapes(depth=3, self_blocks=(0, 1), context=64, pooled=64, table=48, qk_norm=True, head_dim=64):
    """{name: shape} of an MMDiT-X; ComfyUI takes hidden = 64 * depth."""
    hidden = 64 * depth
    out = {
        "pos_embed": (1, table * table, hidden),
        "x_embedder.proj.weight": (hidden, 16, 2, 2),
        "x_embedder.proj.bias": (hidden,),
        "context_embedder.weight": (hidden, context),
        "context_embedder.bias": (hidden,),
        "final_layer.linear.weight": (64, hidden),
        "final_layer.linear.bias": (64,),
        "final_layer.adaLN_modulation.1.weight": (2 * hidden, hidden),
        "final_layer.adaLN_modulation.1.bias": (2 * hidden,),
    }
    for embedder, size in (("t_embedder", 256), ("y_embedder", pooled)):
        out |= {f"{embedder}.mlp.0.weight": (hidden, size), f"{embedder}.mlp.2.weight": (hidden, hidden)}
        out |= {f"{embedder}.mlp.0.bias": (hidden,), f"{embedder}.mlp.2.bias": (hidden,)}
    for i in range(depth):
        for side in ("context_block", "x_block"):
            block = f"joint_blocks.{i}.{side}."
            pre_only = side == "context_block" and i == depth - 1
            dual = side == "x_block" and i in self_blocks
            parts = 2 if pre_only else 9 if dual else 6
            linear = {"adaLN_modulation.1": (parts * hidden, hidden)}
            for attention in ("attn", "attn2") if dual else ("attn",):
                linear[f"{attention}.qkv"] = (3 * hidden, hidden)
                if not pre_only:
                    linear[f"{attention}.proj"] = (hidden, hidden)
                if qk_norm:
                    out |= {f"{block}{attention}.ln_{x}.weight": (head_dim,) for x in "qk"}
            if not pre_only:
                linear |= {"mlp.fc1": (4 * hidden, hidden), "mlp.fc2": (hidden, 4 * hidden)}
            for name, shape in linear.items():
                out |= {f"{block}{name}.weight": shape, f"{block}{name}.bias": shape[:1]}
    return {PREFIX + n: s for n, s in out.items()}


def random_tensors(named_shapes, dtype=torch.float32, seed=0):
    """Finite weights of a size that keeps activations finite; ln weights around 1."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in named_shapes.items():
        if name.endswith(("ln_q.weight", "ln_k.weight")):
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=g)
        else:
            scale = 0.6 / shape[1] ** 0.5 if len(shape) == 2 else 0.1
            tensors[name] = torch.randn(shape, generator=g) * scale
        tensors[name] = tensors[name].to(dtype)
    return tensors


def write_checkpoint(path, dtype=torch.float32, seed=0, **kwargs):
    tensors = random_tensors(shapes(**kwargs), dtype, seed)
    save_file(tensors, path)
    return tensors
