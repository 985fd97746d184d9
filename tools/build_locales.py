"""Writes locales/en/nodeDefs.json, the text that translators work from, out of the live node list.

    python -m comfy_ttt.tools.build_locales --comfyui ~/comfy/ComfyUI
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from ..demo.headless import PACK, ComfyServer

LOCALES = PACK / "locales"


def english(node_list: dict) -> dict:
    """Every text of our nodes in the form that ComfyUI's frontend reads: {node: display_name, description, inputs, outputs}."""
    texts = {}
    for kind, node in node_list.items():
        if not kind.startswith("TTT"):
            continue
        inputs = {}
        for group in ("required", "optional"):
            for name, definition in node["input"].get(group, {}).items():
                inputs[name] = {"name": name, "tooltip": definition[1]["tooltip"]}
        outputs = {
            str(i): {"name": name, "tooltip": tooltip}
            for i, (name, tooltip) in enumerate(zip(node["output_name"], node["output_tooltips"], strict=True))
        }
        texts[kind] = {"display_name": node["display_name"], "description": node["description"], "inputs": inputs, "outputs": outputs}
    return texts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--comfyui", type=Path, help="a ComfyUI whose requirements are installed")
    source.add_argument("--node-list", type=Path, help="a saved answer of /object_info")
    options = parser.parse_args(argv)
    if options.node_list:
        node_list = json.loads(options.node_list.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory() as base, ComfyServer(options.comfyui, Path(base), ("--cpu",)) as server:
            node_list = server.get("/object_info")
    path = LOCALES / "en" / "nodeDefs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(english(node_list), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
