"""Instructions per (token, channel) in the kernels' token loops, counted in compiled code: python benchmarks/instructions.py

Convolution and special functions, not memory, are what a fast GPU runs out of first, and this number shows it without
one. Uses the disassembler that Triton brings along. Nothing here is a time.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import offline
import torch
import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def longest_loop(cubin: bytes) -> int:
    """Instructions between a backward branch and its target, for the longest such loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True).stdout
    labels, seen, longest = {}, 0, 0
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = seen
        elif re.match(r"\s*/\*[0-9a-f]+\*/\s+\S", line):
            seen += 1
            branch = re.search(r"BRA.*?`\((\.L_x_\d+)\)", line)
            if branch and branch[1] in labels:
                longest = max(longest, seen - labels[branch[1]])
    return longest


def main() -> None:
    dtype, head_dim = torch.bfloat16, 64
    print("| kernel | " + " | ".join(f"sm_{a}{b}" for a, b in FAMILIES) + " |\n" + "|---" * (len(FAMILIES) + 1) + "|")
    for name in ("stats", "keys", "step", "apply"):
        cells = []
        for family in FAMILIES:
            launch = offline.kernels(family, head_dim, dtype)[name]
            width = launch.constants.get("CB", head_dim)
            again = head_dim // launch.constants["HB"] if name == "step" else 1  # programs that share a token's hidden units
            loop = longest_loop(offline.compiled(launch, family, dtype).asm["cubin"])
            cells.append(f"{loop * 32 * launch.warps * again / (launch.constants['T'] * width):.0f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


FAMILIES = ((8, 9), (9, 0))

if __name__ == "__main__":
    main()
