#!/usr/bin/env python3
"""Sets everything up in its own environment and runs the demo or the tests.

    python3 run.py demo    a tiny SD3.5-shaped model in a real ComfyUI: softmax beside TTT, a picture and a chart
    python3 run.py test    the test suite; anything after it goes to pytest

Needs Python 3.10 or newer and git. Nothing outside this folder is changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
COMFYUI_GIT, COMFYUI_TAG = "https://github.com/comfyanonymous/ComfyUI", "v0.28.0"
TORCH = ("torch==2.14.1", "torchvision==0.29.1")  # for this folder's own environment only
TORCHAUDIO = "torchaudio==2.11.1"  # ComfyUI imports it; it works with the torch above, which its own pin would replace
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "comfyui-workflow-templates", "comfyui-embedded-docs")


def say(text: str) -> None:
    print(f"[sd35-ttt] {text}", flush=True)


def pip(*arguments: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments], check=True)


def done_once(name: str, key: str, work) -> None:
    """Runs `work` unless it was done before with the same key."""
    mark = VENV / f".{name}"
    if mark.is_file() and mark.read_text() == key:
        return
    work()
    mark.write_text(key)


def set_up() -> None:
    if not PYTHON.exists():
        say(f"making an environment in {VENV.name}/")
        venv.create(VENV, with_pip=True)
    installed = subprocess.run([PYTHON, "-c", "import torch, torchvision"], capture_output=True)
    if installed.returncode:
        say(f"installing {TORCH[0]} (once, some minutes)")
        pip(*TORCH)
    project = (ROOT / "pyproject.toml").read_text()

    def install_pack():
        say("installing this pack and its development tools")
        pip("-e", f"{ROOT}[dev]")

    done_once("pack", project, install_pack)


def around() -> Path:
    return ROOT.parent.parent


def find_comfyui() -> Path | None:
    """$COMFYUI_PATH, the ComfyUI this pack lies in, ~/comfy/ComfyUI, or the one cloned here before."""
    asked = os.environ.get("COMFYUI_PATH")
    places = [Path(asked)] if asked else [around(), Path.home() / "comfy" / "ComfyUI", VENV / "ComfyUI"]
    for place in places:
        if (place / "comfy" / "model_patcher.py").is_file():
            return place.resolve()
    if asked:
        sys.exit(f"COMFYUI_PATH is '{asked}', but there is no ComfyUI in it (no comfy/model_patcher.py). Correct it or unset it.")
    return None


def get_comfyui() -> Path | None:
    """A ComfyUI with its requirements in our environment, cloned if there is none; None when it cannot be had."""
    root = find_comfyui()
    if root is None:
        say(f"no ComfyUI found; cloning {COMFYUI_TAG}")
        target = VENV / "ComfyUI"
        command = ["git", "clone", "-q", "--depth", "1", "--branch", COMFYUI_TAG, COMFYUI_GIT, str(target)]
        try:
            subprocess.run(command, check=True, timeout=600, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
        except (subprocess.SubprocessError, OSError) as e:
            shutil.rmtree(target, ignore_errors=True)
            say(f"ComfyUI could not be cloned ({e}); going on without it. Set COMFYUI_PATH to use one that you have.")
            return None
        root = target
    say(f"ComfyUI {comfyui_version(root)} at {root}")
    lines = (root / "requirements.txt").read_text().splitlines()
    wanted = [n for line in lines if (n := line.split("#")[0].strip()) and not n.startswith("-") and requirement_name(n) not in NOT_NEEDED]

    def install_requirements():
        say("installing ComfyUI's requirements, torch excepted")
        pip(*wanted)
        pip("--no-deps", TORCHAUDIO)

    done_once("comfyui", "\n".join(wanted), install_requirements)
    return root


def requirement_name(line: str) -> str:
    for sign in "=<>~![; ":
        line = line.split(sign)[0]
    return line.strip().lower()


def comfyui_version(root: Path) -> str:
    file = root / "comfyui_version.py"
    return file.read_text().split('"')[1] if file.is_file() else "(unknown version)"


def demo(options: argparse.Namespace) -> int:
    find_comfyui()  # a wrong COMFYUI_PATH is refused before anything is installed
    set_up()
    root = get_comfyui()
    inner = [PYTHON, "-m", "comfy_ttt.demo.quickstart", "--size", str(options.size), "--out", str(Path(options.out).resolve())]
    if root is not None:
        inner += ["--comfyui", str(root)]
    return subprocess.run(inner).returncode


def test(arguments: list[str]) -> int:
    find_comfyui()
    set_up()
    root = get_comfyui()
    environment = {**os.environ, **({"COMFYUI_PATH": str(root)} if root else {})}
    if not any(a.startswith(("-n", "-p")) for a in arguments):
        arguments = ["-n", "2", "--dist", "loadfile", *arguments]
        environment.setdefault("OMP_NUM_THREADS", "1")  # two workers that each take all cores only wait for each other
    return subprocess.run([PYTHON, "-m", "pytest", *arguments], cwd=ROOT, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser("demo", help="run the demo workflow in ComfyUI without a screen")
    demo_parser.add_argument("--size", type=int, default=512, help="width and height of the latent's nominal picture, a multiple of 16")
    demo_parser.add_argument("--out", default=str(ROOT / "output"), help="where the pictures go")
    commands.add_parser("test", help="run the tests; further arguments go to pytest", add_help=False)
    if sys.version_info < (3, 10):
        sys.exit("SD3.5-TTT needs Python 3.10 or newer.")
    options, rest = parser.parse_known_args()
    if options.command == "test":
        return test(rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if options.size % 16 or not 64 <= options.size <= 768:
        parser.error(f"--size must be a multiple of 16 from 64 to 768, got {options.size}")
    return demo(options)


if __name__ == "__main__":
    sys.exit(main())
