"""What a device takes for reading and computing groups of experts, and the pipeline that follows (docs/prefill.md)."""
