"""Makes `import comfy_ttt` work without an installation: the repository's folder is that package."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("comfy_ttt") is None:
    spec = importlib.util.spec_from_file_location(
        "comfy_ttt", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["comfy_ttt"] = package
    spec.loader.exec_module(package)
