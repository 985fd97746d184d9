"""Compiles the shipped kernels for every GPU family on a machine without one, and reads what they use.

    python benchmarks/offline.py             the tables at the end of docs/kernels.md

Registers and stack frame (which is where spilled registers go) come from the compiled file's own records. Says
nothing about speed.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass

import _path  # noqa: F401
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from comfy_ttt.kernels.launch_configs import FAMILIES, SHARED_LIMIT, config_for
from comfy_ttt.kernels.triton_launch import Launch, specialise

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOATS = {"rate", "epsilon"}
STEPS = {"channels", *(f"{x}_{axis}" for x in "qkv" for axis in ("batch", "token"))}  # multiples of 16 in any real model
IN_INPUT_TYPE = {"q", "k", "v", "keys", "out"}  # all other pointers are fp32, `packed` and `w` see below


POINTERS = IN_INPUT_TYPE | set("w w1 w2 w3 means squares peaks taps bias partial updated packed scales".split())


@dataclass(frozen=True)
class Resources:
    registers: int
    stack: int
    shared: float  # KiB per block

    def __str__(self) -> str:
        return f"{self.registers} / {self.stack} / {self.shared:.0f}"


def kernels(capability: tuple[int, int], head_dim: int, dtype: torch.dtype, swiglu: bool = True) -> dict[str, Launch]:
    """What a picture at least as wide as the largest tile runs on this family."""
    c = config_for(capability, head_dim, dtype == torch.float32)
    made = specialise(c, head_dim, dtype, swiglu, True, c.keys_tile, c.apply_tile)
    return made if not swiglu else {name: launch for name, launch in made.items() if name != "error"}


def compile_for(launch: Launch, capability: tuple[int, int], dtype: torch.dtype) -> Resources:
    return read_resources(compiled(launch, capability, dtype))


def compiled(launch: Launch, capability: tuple[int, int], dtype: torch.dtype):
    """Compiles one kernel for compute capability (major, minor)."""
    packed = "*fp32" if dtype == torch.float32 else "*fp16"
    names = launch.kernel.arg_names
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        if name in launch.constants:
            signature[name] = "constexpr"
            continue
        if name in POINTERS:
            signature[name] = packed if name in ("packed", "w") else "*" + (NAMES[dtype] if name in IN_INPUT_TYPE else "fp32")
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        if name in POINTERS or name in STEPS:
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {(names.index(name),): value for name, value in launch.constants.items()}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = dict(num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=launch.fusion)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return triton.compile(source, target=target, options=options)


def read_resources(kernel) -> Resources:
    """Records of the .nv.info section: 0x2f register count, 0x11 frame size, each (symbol, value)."""
    records = dict(_records(_section(kernel.asm["cubin"], ".nv.info")))
    return Resources(records[0x2F], records[0x11], kernel.metadata.shared / 1024)


def _section(elf: bytes, wanted: str) -> bytes:
    table, size, count, names = (struct.unpack_from(f, elf, at)[0] for f, at in (("<Q", 40), ("<H", 58), ("<H", 60), ("<H", 62)))
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if elf[start : elf.index(b"\0", start)].decode() == wanted:
            return elf[offset : offset + length]
    raise ValueError(f"The compiled kernel has no section {wanted}.")


def _records(data: bytes):
    at = 0
    while at < len(data):
        layout, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if layout == 4:  # `size` bytes follow; other layouts hold their value in place of the size
            if size == 8:
                yield attribute, struct.unpack_from("<II", data, at)[1]
            at += size


def table(head_dim: int, dtype: torch.dtype) -> str:
    """A markdown table, one row per kernel, one column per family: registers / stack bytes / shared KiB."""
    lines = [
        f"### {NAMES[dtype]}, head size {head_dim}", "",
        "| kernel | " + " | ".join(f"sm_{a}{b}" for a, b in FAMILIES) + " |", "|---" * (len(FAMILIES) + 1) + "|",
    ]
    for swiglu in (True, False):
        for name in ("stats", "keys", "step", "update", "apply") if swiglu else ("error", "step", "apply"):
            cells = [str(compile_for(kernels(f, head_dim, dtype, swiglu)[name], f, dtype)) for f in FAMILIES]
            print(name, cells, file=sys.stderr, flush=True)
            lines.append(f"| {name}{'' if swiglu else ' (mlp2)'} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(f"Generated by `python benchmarks/offline.py` with Triton {triton.__version__}: registers / stack bytes (spills) /")
    print("shared memory in KiB, with the shipped launch configurations. Limits of shared memory per block: ", end="")
    print(", ".join(f"sm_{a}{b} {SHARED_LIMIT[a, b]}" for a, b in FAMILIES) + " KiB.\n")
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (64, 128):
            print(table(head_dim, dtype))
    print(table(64, torch.float32))  # at 128 it spills hundreds of bytes: three products for one leave no registers
