"""Write a trained model to a folder that can be shared: weights, certificate, model card.

python export.py checkpoint=checkpoints/first out=first-model
"""

from invformer.commands import COMMANDS, run

if __name__ == "__main__":
    run(*COMMANDS["export"])
