"""Train a character-level Transformer, certify it, watch it, and be able to undo it.

python train.py model=contractive_l2 data=python_docs trainer.max_steps=1500 run.name=first
"""

import sys
from pathlib import Path

from invformer.config import parse_or_exit
from invformer.exit import guarded
from invformer.schema import TrainConfig


def main() -> None:
    """Parse, build, fit."""
    config = parse_or_exit(sys.argv[1:], TrainConfig, Path(__file__).parent)

    def work() -> None:
        # The heavy imports wait until the configuration is known to be valid.
        from invformer.build.run import build_run
        from invformer.training.fit import fit

        fit(build_run(config))

    raise SystemExit(guarded(work, debug=config.run.debug))


if __name__ == "__main__":
    main()
