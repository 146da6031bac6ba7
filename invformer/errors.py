"""The errors a user can cause, each with the exit code a shell script can act on."""

import signal


def one_line(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join(f"{error}".split())[:160] or type(error).__name__


class InvformerError(Exception):
    """Base class: one clear line (what, where, what to do) and an exit code."""

    exit_code = 1

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code or self.exit_code


class ConfigurationError(InvformerError):
    """The command line or a configuration file asks for something impossible."""

    exit_code = 2


class DataError(InvformerError):
    """The text cannot be read, or there is too little of it."""

    exit_code = 3


class CheckpointError(InvformerError):
    """A checkpoint is missing, damaged, foreign, or belongs to another configuration."""

    exit_code = 4


class NonFiniteError(InvformerError):
    """A loss, gradient or weight became NaN or infinite."""

    exit_code = 5

    @classmethod
    def at(cls, step: int, what: str) -> "NonFiniteError":
        """The error that ends a run at a step: what is wrong, and what to do."""
        advice = "lower optim.lr and optim.muon_lr (earlier checkpoints are kept)"
        return cls(f"step {step}: {what}; {advice}")


class CertificateViolation(InvformerError):
    """An estimate exceeded a bound in the same norm, or a bound its target: a bug, never noise."""

    exit_code = 6


class StorageError(InvformerError):
    """The run directory cannot be written."""

    exit_code = 7


class RankLost(InvformerError):
    """One of the processes of a run died, failed without saying why, or does not move."""

    exit_code = 9


class Stopped(InvformerError):
    """A signal ended work that saves nothing, after what was known had been shown."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}", 128 + number)


class Alarmed(InvformerError):
    """An estimate grew so far that the run was to stop; it is saved, and ``warn`` continues it."""

    exit_code = 10

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}; nothing is lost: continue with monitor.alarm=warn, or begin a new run"
        )


class Interrupted(InvformerError):
    """The run was asked to stop, saved its state, and says which command continues it."""

    def __init__(self, number: int, step: int, again: str) -> None:
        name = signal.Signals(number).name
        line = f"interrupted at step {step} by {name}, saved; continue with: {again}"
        super().__init__(line, 128 + number)
