"""The TTT layer once more, as loops over tokens and heads from the paper's formulas; shares no code with the pack."""

import math

import torch


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def slow_ttt(q, k, v, weights, q_conv, k_conv, grid, text, inner):
    """q, k, v (B, N, C) float64; weights (H, d, d); convs (weight, bias) or None. Returns (out, updated weights)."""
    batch, tokens, channels = q.shape
    heads, dim = weights[0].shape[:2]
    h, w = grid

    def conv(x, params):
        if params is None:
            return x
        weight, bias = params
        out = x.clone()
        for r in range(h):
            for c in range(w):
                total = bias.clone()
                for dr in (-1, 0, 1):
                    for dc in (-1, 0, 1):
                        if 0 <= r + dr < h and 0 <= c + dc < w:
                            total = total + weight[:, 0, dr + 1, dc + 1] * x[text + (r + dr) * w + c + dc]
                out[text + r * w + c] = x[text + r * w + c] + total
        return out

    outputs, updates = [], []
    for b in range(batch):
        mean = sum(k[b, i] for i in range(tokens)) / tokens
        var = sum((k[b, i] - mean) ** 2 for i in range(tokens)) / tokens
        keys = conv((k[b] - mean) / torch.sqrt(var + 1.0), k_conv)
        queries = conv(q[b], q_conv)
        out = torch.zeros_like(q[b])
        per_head = []
        for head in range(heads):
            part = slice(head * dim, (head + 1) * dim)
            ws = [weight[head].clone() for weight in weights]
            grads = [torch.zeros_like(x) for x in ws]
            for i in range(tokens):
                x, target = keys[i, part], v[b, i, part]
                z1 = x @ ws[0]
                s = sigmoid(z1)
                slope = s + z1 * s * (1 - s)
                if inner == "swiglu":
                    z2 = x @ ws[1]
                    e = -target / tokens / math.sqrt(dim)
                    back = ws[2] @ e
                    grads[0] += torch.outer(x, back * z2 * slope)
                    grads[1] += torch.outer(x, back * z1 * s)
                    grads[2] += torch.outer(z1 * s * z2, e)
                else:
                    e = ((z1 * s) @ ws[1] - target) / tokens / math.sqrt(dim)
                    grads[0] += torch.outer(x, (ws[1] @ e) * slope)
                    grads[1] += torch.outer(z1 * s, e)
            new = [x - g for x, g in zip(ws, grads, strict=True)]
            per_head.append(new)
            for i in range(tokens):
                z1 = queries[i, part] @ new[0]
                hidden = z1 * sigmoid(z1)
                if inner == "swiglu":
                    hidden = hidden * (queries[i, part] @ new[1])
                out[i, part] = hidden @ new[-1]
        outputs.append(out)
        updates.append(per_head)
    updated = [torch.stack([torch.stack([head[j] for head in b]) for b in updates]) for j in range(len(weights))]
    return torch.stack(outputs), updated
