"""Evaluate a trained model: likelihood, certificate, local constants, and the way back to the text.

python evaluate.py checkpoint=checkpoints/first data.split=test generate.prompt="The "
"""

import os
import sys
from pathlib import Path

from invformer.config import parse_or_exit
from invformer.config.schema import EvaluateConfig
from invformer.errors import CheckpointError
from invformer.runs.console import outlive_console
from invformer.runs.exit import guarded, stop_on_signals


def main() -> None:
    """Parse, load, evaluate, report."""
    outlive_console()
    stop_on_signals()
    config = parse_or_exit(sys.argv[1:], EvaluateConfig, Path(__file__).parent)

    def work() -> None:
        # The heavy imports wait until it is known that there is something to evaluate.
        require_path(config.checkpoint)
        from invformer.assemble.evaluation import evaluate_checkpoint
        from invformer.evaluation.evaluate import keep_report
        from invformer.evaluation.report import print_table
        from invformer.kernels.host import keep_freed_memory

        keep_freed_memory()
        report, latest = evaluate_checkpoint(config)
        try:
            path = keep_report(report, latest)
        finally:  # the measurements are not lost to a full disk
            print_table(report, config.verbose)
        print(f"written to {path}")

    raise SystemExit(guarded(work, debug="--debug" in sys.argv))


def require_path(checkpoint: str) -> None:
    """Answer a mistyped path at once.

    Raises:
        CheckpointError: there is nothing.
    """
    if "://" not in checkpoint and not os.path.lexists(os.path.expanduser(checkpoint)):
        raise CheckpointError(
            f"{checkpoint:.200} does not exist: name a run folder or a checkpoint in it"
        )


if __name__ == "__main__":
    main()
