"""Train a character-level Transformer, certify it, watch it, and be able to undo it.

python train.py model=contractive_l2 data=python_docs trainer.max_steps=1500 run.name=first
"""

import sys
from pathlib import Path

from invformer.config import parse_or_exit
from invformer.config.schema import TrainConfig
from invformer.runs.console import outlive_console
from invformer.runs.exit import guarded, stop_on_signals
from invformer.runs.ranks import Supervisor, end_with_supervisor, is_rank


def main() -> None:
    """Parse, then fit, in this process or in several."""
    outlive_console()
    stop_on_signals()
    config = parse_or_exit(sys.argv[1:], TrainConfig, Path(__file__).parent)

    def work() -> None:
        if is_rank():
            end_with_supervisor()
        elif config.trainer.devices > 1:
            Supervisor(config.trainer.devices, config.trainer.rank_timeout).run()
            return
        # The heavy imports wait until the configuration is known to be valid.
        from invformer.assemble.run import build_run
        from invformer.kernels.host import keep_freed_memory, leave_new_memory_unfilled
        from invformer.numerics.precision import denormals_flushed
        from invformer.training.fit import fit

        keep_freed_memory()
        leave_new_memory_unfilled()
        with denormals_flushed():
            fit(build_run(config))

    raise SystemExit(guarded(work, debug=config.run.debug))


if __name__ == "__main__":
    main()
