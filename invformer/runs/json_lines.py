"""metrics.jsonl as a logger of Lightning's; reading it (run_log.py) needs no Lightning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from invformer.runs.run_log import MetricsFile, Row


class JsonLinesLogger(Logger):
    """Writes every row to a :class:`MetricsFile`.

    The newest row waits until a later step or :meth:`save`: the numbers of a validation join it.

    Args:
        path: of the file.
        first_step: of the rows that will be written.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        super().__init__()
        self.file = MetricsFile(path, first_step)
        self.step, self.row = -1, Row()

    @property
    def name(self) -> str:
        """Of the run."""
        return self.file.path.parent.name

    @property
    def version(self) -> None:
        """A continued run has the same file."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take one row, or more numbers of the newest one."""
        assert step is not None
        if step != self.step:
            self.save()
        self.step = step
        self.row |= metrics

    @rank_zero_only
    def save(self) -> None:
        """Write what waits."""
        if self.row:
            self.file.write(self.step, self.row)
            self.row = Row()

    def finalize(self, status: str) -> None:
        """Write the last row."""
        self.save()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are in ``config.yaml``."""
