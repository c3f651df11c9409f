"""Headrace runs Mixture-of-Experts language models inside a memory budget that you name."""

__version__ = "0.1.0"
