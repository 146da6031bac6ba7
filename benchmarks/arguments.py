"""Command lines of the benchmarks."""

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Answers a mistake in one line, as every other program here does."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with code 2."""
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)
