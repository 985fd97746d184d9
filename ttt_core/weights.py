"""The weights file: TTT layers (and changed base tensors) in one safetensors file that explains itself.

Tensor names are SD3.5's own with `.ttt.` added, e.g. model.diffusion_model.joint_blocks.0.x_block.attn2.ttt.w1.
The recipe travels as a uint8 tensor of JSON, because ComfyUI's save nodes drop foreign metadata, and once more as
readable metadata in the files written here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import TTTError
from .files import atomic_write, explain_unreadable
from .fingerprint import SAME_BASE, distance, short_id
from .geometry import PREFIX, AttentionId, Geometry
from .layer import TTTAttention
from .select import describe, select_attentions
from .spec import TTTSpec
from .version import VERSION

FORMAT = 1
SPEC_KEY = PREFIX + "ttt.spec"
_TTT_NAME = re.compile(r"(?:^|\.)joint_blocks\.(\d+)\.x_block\.(attn2?)\.ttt\.(.+)$")
_KINDS = {"attn": "joint", "attn2": "self"}


def is_ttt_name(name: str) -> bool:
    """True for a tensor of a TTT layer and for the spec tensor."""
    return ".ttt." in name or name.endswith("ttt.spec")


@dataclass
class TTTWeights:
    """Everything a linearization adds to a base model.

    layers: {AttentionId: TTTAttention}. base_changes: {original tensor name with prefix: tensor} of base weights that
    fine-tuning changed. made: how the layers came to be; made["state"] is untrained, calibrated or fine-tuned.
    base_sketch: fingerprint.sketch of the base, or "" when unknown.
    """

    spec: TTTSpec
    geometry: Geometry
    layers: dict[AttentionId, TTTAttention]
    base_changes: dict[str, Tensor] = field(default_factory=dict)
    made: dict = field(default_factory=lambda: {"state": "untrained"})
    base_sketch: str = ""

    @classmethod
    def new(cls, geometry: Geometry, spec: TTTSpec, *, seed: int = 0, base_sketch: str = "", device=None) -> TTTWeights:
        """Untrained layers (paper initialisation) for the attentions that spec selects. Raises TTTError."""
        layers = {}
        with torch.inference_mode(False):  # ComfyUI's nodes run in inference mode; layers made there could never be trained
            for index, attention in enumerate(select_attentions(qkv_names(geometry), spec.attentions)):
                layers[attention] = TTTAttention(geometry.heads, geometry.head_dim, spec, seed=seed + index, device=device)
        return cls(spec, geometry, layers, made={"state": "untrained", "seed": seed}, base_sketch=base_sketch)

    @property
    def selection(self) -> str:
        return describe(self.layers)

    @property
    def trained(self) -> bool:
        return self.made.get("state") != "untrained"

    def header(self, kind: str) -> dict:
        """What the spec tensor holds, as plain JSON data. kind: weights (small file) or model (full model)."""
        return {
            "format": FORMAT,
            "kind": kind,
            "spec": asdict(self.spec),
            "attentions": self.selection,
            "geometry": asdict(self.geometry),
            "base_sketch": self.base_sketch,
            "made": self.made,
            "pack": VERSION,
        }

    def layer_tensors(self, kind: str = "model") -> dict[str, Tensor]:
        """{file name: tensor} of the TTT layers and the spec tensor, without the changed base tensors; kind as in header."""
        tensors = {
            f"{PREFIX}{attention.path}.ttt.{name}": value.detach()
            for attention, layer in self.layers.items()
            for name, value in layer.state_dict().items()
        }
        tensors[SPEC_KEY] = torch.tensor(list(json.dumps(self.header(kind)).encode()), dtype=torch.uint8)
        return tensors

    def save(self, path: str | os.PathLike) -> Path:
        """Writes the small file, atomically. Raises TTTError when the folder cannot be written or a value is not finite."""
        tensors = {**self.layer_tensors("weights"), **self.base_changes}
        refuse_non_finite(tensors, f"The TTT layers for '{Path(path).name}'", "calibrate or train again with a lower rate; nothing was written")
        tensors = {n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}
        metadata = {
            "ttt.format": str(FORMAT),
            "ttt.spec": self.spec.to_json(),
            "ttt.attentions": self.selection,
            "ttt.base": f"{self.geometry.name}, sketch {short_id(self.base_sketch)}",
            "ttt.made": json.dumps(self.made),
            "ttt.pack": VERSION,
        }
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> TTTWeights:
        """Reads a small file. Raises TTTError, naming the file and the remedy, for anything that is not a good one."""
        name = Path(path).name
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                if SPEC_KEY in names and file_kind(file.get_tensor(SPEC_KEY), name) == "model":
                    raise TTTError(f"'{name}' is a full converted model, not a small TTT file; load it with TTT Load Model.")
                tensors = {n: file.get_tensor(n) for n in names} if SPEC_KEY in names else dict.fromkeys(names)
        except (SafetensorError, OSError) as e:
            raise explain_unreadable(path, e) from e
        return cls.from_tensors(tensors, name)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], source: str) -> TTTWeights:
        """Builds the layers from tensors as read from a file; `source` names it in errors.

        Tensors that are neither TTT nor spec are taken as changed base tensors. Raises TTTError.
        """
        spec_name = next((n for n in tensors if n == SPEC_KEY or n.endswith("ttt.spec")), None)
        if spec_name is None:
            what = "TTT layers but no recipe (ttt.spec)" if any(is_ttt_name(n) for n in tensors) else "no TTT layers"
            raise TTTError(f"'{source}' holds {what}; choose a file written by TTT Save Weights or saved from a TTT model.")
        header = _read_header(tensors[spec_name], source)
        spec, geometry = header["spec"], header["geometry"]
        found: dict[AttentionId, dict[str, Tensor]] = {}
        base_changes = {}
        for name, tensor in tensors.items():
            if match := _TTT_NAME.search(name):
                attention = AttentionId(_KINDS[match.group(2)], int(match.group(1)))
                found.setdefault(attention, {})[match.group(3)] = tensor
            elif name != spec_name:
                base_changes[name] = tensor
        layers = {}
        for attention in select_attentions(qkv_names(geometry), header["attentions"]):
            layers[attention] = _build_layer(attention, found.pop(attention, {}), spec, geometry, source)
        if found:
            extra = ", ".join(map(str, found))
            raise TTTError(f"'{source}' holds layers its recipe does not name ({extra}); it was edited or mixed up, save it again.")
        refuse_non_finite(tensors, f"'{source}'", "the training that made it went wrong; use an earlier file")
        return cls(spec, geometry, layers, base_changes, header["made"], header["base_sketch"])

    def check_base(self, geometry: Geometry, base_sketch: str, source: str) -> str:
        """Compares the base these layers were made for with the one at hand.

        Raises TTTError for another architecture; returns a warning for another fine-tune of the same family, else "".
        """
        if geometry != self.geometry:
            raise TTTError(
                f"'{source}' was made for {self.geometry.name}, but the connected model is {geometry.name}; load the base it was made for."
            )
        if not (self.base_sketch and base_sketch):
            return ""
        gap = distance(self.base_sketch, base_sketch)
        if gap <= SAME_BASE:
            return ""
        return (
            f"'{source}' was made from another base (sketch {short_id(self.base_sketch)}, here {short_id(base_sketch)}, "
            f"weights {gap:.1%} apart; an fp8 copy of the same base is 2-3% apart). It may work less well; calibrate again if the picture is poor."
        )


def qkv_names(geometry: Geometry) -> list[str]:
    """The tensor names that select_attentions looks for, for a model of this geometry."""
    return [f"{a.path}.qkv.weight" for a in geometry.attentions]


def refuse_non_finite(tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Raises TTTError naming the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TTTError(f"{what}: tensor {name} holds NaN or infinity; {remedy}.")


def file_kind(spec: Tensor, source: str) -> str:
    """``weights`` for a small file (which a full fine-tuning makes as large as a model), ``model`` for a full model."""
    return _read_header(spec, source)["kind"]


def _read_header(tensor: Tensor, source: str) -> dict:
    try:
        data = json.loads(bytes(tensor.to(torch.uint8).flatten().tolist()))
        number = int(data["format"])
    except (ValueError, KeyError, TypeError) as e:
        raise TTTError(f"'{source}' has a TTT recipe that cannot be read ({e}); download or save it again.") from e
    if number > FORMAT:
        raise TTTError(
            f"'{source}' is in TTT format {number} (written by version {data.get('pack', '?')}), and this version {VERSION} reads up to {FORMAT}; "
            "update SD3.5-TTT."
        )
    try:
        shape = data["geometry"]
        geometry = Geometry(**{**shape, "self_blocks": tuple(shape["self_blocks"])})
        spec = TTTSpec.from_json(json.dumps(data["spec"]))
        return {
            "kind": str(data.get("kind", "weights")),
            "spec": spec,
            "geometry": geometry,
            "attentions": str(data["attentions"]),
            "made": dict(data.get("made", {})),
            "base_sketch": str(data.get("base_sketch", "")),
        }
    except TTTError as e:
        raise TTTError(f"'{source}': {e}") from e
    except (KeyError, TypeError, ValueError) as e:
        raise TTTError(f"'{source}' has an incomplete TTT recipe ({e!r}); download or save it again.") from e


def _build_layer(
    attention: AttentionId, tensors: Mapping[str, Tensor], spec: TTTSpec, geometry: Geometry, source: str
) -> TTTAttention:
    layer = TTTAttention(geometry.heads, geometry.head_dim, spec, device="meta")
    wanted = {n: tuple(p.shape) for n, p in layer.state_dict().items()}
    if missing := sorted(set(wanted) - set(tensors)):
        raise TTTError(f"'{source}' lacks {', '.join(missing)} of the TTT layer {attention} that its recipe names; download or save it again.")
    if extra := sorted(set(tensors) - set(wanted)):
        raise TTTError(
            f"'{source}' says inner model '{spec.inner_model}' with locality '{spec.locality}', but its layer {attention} also holds "
            f"{', '.join(extra)}, which belong to another one; save it again from the model it came from."
        )
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise TTTError(f"'{source}': {attention} {name} has shape {tuple(tensors[name].shape)}, expected {shape}; it is from another model.")
    with torch.inference_mode(False):  # see TTTWeights.new; the copy also lets the file's memory go
        layer.load_state_dict({n: t.detach().to("cpu", torch.float32, copy=True) for n, t in tensors.items()}, assign=True)
        return layer.requires_grad_(True)


def read_tensor_shapes(path: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """{name: shape} of a safetensors file from its header, no weights read. Raises TTTError for an unreadable file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}
    except (SafetensorError, OSError) as e:
        raise explain_unreadable(path, e) from e


def split_full_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes the TTT tensors out of a full model's state dict, in place, and returns them."""
    return {n: tensors.pop(n) for n in list(tensors) if is_ttt_name(n)}


