"""What Transformers makes of a Hugging Face directory, for the scripts that write golden values. Needs PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_model(directory: Path) -> Any:
    """In float32, eager."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    ).eval()


def versions() -> str:
    import torch
    import transformers

    return f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
