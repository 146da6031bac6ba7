"""Continue a text with a trained model.

python sample.py checkpoint=checkpoints/first prompt="The " top_k=20
"""

from invformer.commands import COMMANDS, run

if __name__ == "__main__":
    run(*COMMANDS["sample"])
