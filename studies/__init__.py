"""Published experiments, each one command: ``python -m studies`` lists them."""

import sys

from invformer.processes.exit import stop_on_signals

# Only where a study is the program: so Python calls it until it has found the module to run. The
# heavy imports come next, and a signal has to end them in one line too; see ``study.main``.
if sys.argv[:1] == ["-m"]:
    stop_on_signals()
