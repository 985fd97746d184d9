"""Hosts: the only files that import ComfyUI or diffusers, and only inside their functions."""
