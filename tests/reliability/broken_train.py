"""train.py whose second rank fails in its seventh step, or not: ``python -m ... HOW arguments``."""

import os
import signal
import sys
import time
from typing import Any

from invformer.commands import COMMANDS, run
from invformer.processes.ranks import is_rank
from tests.support.small_runs import without_plots

STEP = 6


def break_step(how: str) -> None:
    """Replace a training step by one that ends badly."""
    from invformer.training.module import CharLanguageModel

    original = CharLanguageModel.training_step

    def broken(module: CharLanguageModel, *arguments: Any) -> Any:
        if how == "slowly":
            time.sleep(0.2)
        if module.trainer.global_step == STEP:
            match how:
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "raise":
                    raise ValueError("broken on purpose")
                case "hang":
                    time.sleep(3600)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
        return original(module, *arguments)

    CharLanguageModel.training_step = broken


def main() -> None:
    """Break, then train."""
    how = sys.argv.pop(1)
    if is_rank():
        without_plots()
        if os.environ["RANK"] == "1":
            break_step(how)
    run(*COMMANDS["train"])


if __name__ == "__main__":
    main()
