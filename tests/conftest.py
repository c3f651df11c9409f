"""Tests use the benchmarks' maker of large checkpoints, and no profile of the machine they run on."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
_cache = tempfile.TemporaryDirectory(prefix="headrace-test-")
os.environ["XDG_CACHE_HOME"] = _cache.name
