"""Recover a text from the states at the top of the network, and say which characters are proven.

python invert.py checkpoint=checkpoints/first text="To be, or not to be"
"""

from invformer.commands import COMMANDS, run

if __name__ == "__main__":
    run(*COMMANDS["invert"])
