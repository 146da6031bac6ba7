"""Train a character-level Transformer, certify it, watch it, and be able to undo it.

python train.py model=contractive_l2 data=python_docs trainer.max_steps=1500 run.name=first
"""

from invformer.commands import COMMANDS, run

if __name__ == "__main__":
    run(*COMMANDS["train"])
