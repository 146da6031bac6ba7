"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and environment variables, one thread, and our packages."""
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd, env=os.environ | ours | environment, capture_output=True, text=True,
    )  # fmt: skip
