"""The pack's version, written into every weights file. pyproject.toml carries the same (a test compares them)."""

VERSION = "0.1.0"
