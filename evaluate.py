"""Evaluate a trained model: likelihood, certificate, local constants, and the way back to the text.

python evaluate.py checkpoint=checkpoints/first data.split=test
"""

from invformer.commands import COMMANDS, run

if __name__ == "__main__":
    run(*COMMANDS["evaluate"])
