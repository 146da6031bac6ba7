"""Write a trained model to a folder that can be shared: weights, certificate, model card.

python export.py checkpoint=checkpoints/first out=first-model
"""

from invformer.commands import export as main

if __name__ == "__main__":
    main()
