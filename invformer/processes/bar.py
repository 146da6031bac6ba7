"""How far long work is: a bar on a terminal, plain lines elsewhere; both on standard error."""

import math
import shutil
import sys
import threading
import time
from typing import Any

from tqdm import tqdm

SILENT = 2.0  # seconds of work that need no words
LINES_EVERY = 10.0  # seconds between plain lines


class Bar(tqdm):
    """A bar of :mod:`tqdm` that appears after two seconds and leaves nothing behind.

    Without a terminal it is a line then, and one every ten seconds. Work that has no ``total`` is
    only named.
    """

    def __init__(
        self, *args: Any, desc: str, total: int | None = None, unit: str = "", **options: Any
    ) -> None:
        self.has_terminal = sys.stderr.isatty()
        if total is None and args:
            total = len(args[0])
        middle = "{percentage:3.0f}%|{bar}| " if self.has_terminal else ": "
        counts = "{n_fmt} of {total_fmt} {unit}{postfix}, {remaining} left"
        super().__init__(
            *args,
            desc=desc,
            total=total,
            unit=unit,
            bar_format="{desc} …" if total is None else f"{{desc}}{middle}{counts}",
            mininterval=0.1 if self.has_terminal else LINES_EVERY,
            ncols=shutil.get_terminal_size().columns - 1 if self.has_terminal else None,
            nrows=20,
            leave=False,
            **options,
        )
        self.timer = threading.Timer(SILENT, self.refresh)  # the first step may take longer
        self.timer.daemon = True
        self.timer.start()

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the bar or print a line, unless the work has only begun."""
        if time.time() < getattr(self, "start_t", math.inf) + SILENT:
            return False
        if self.has_terminal:
            return super().display(msg, pos)
        if msg is None:
            self.fp.write(f"{self}\n")
        return False

    def say(self, text: str) -> None:
        """Print to standard output, above the bar."""
        if self.has_terminal:
            self.write(text, file=sys.stdout)
        else:
            print(text)
        sys.stdout.flush()

    def close(self) -> None:
        """Take the bar away."""
        if hasattr(self, "timer"):
            self.timer.cancel()
        super().close()
