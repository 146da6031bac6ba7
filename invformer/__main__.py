"""``python -m invformer``: the same commands as the console script ``invformer``."""

from invformer.commands import main

if __name__ == "__main__":
    main()
