"""Output that survives the loss of its reader and sends a terminal text, never commands."""

import errno
import io
import logging
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FAILING = ("strict", "surrogateescape")  # the second one in the locale C
GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe, the terminal
# Controls, and what reorders or hides text: formats, line separators, fillers, tags, surrogates.
CONTROL_CHARACTER = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0d\ufeff\uffa0"
    r"\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


class Console(io.FileIO):
    """A descriptor that becomes the null device when it takes no more.

    One line on standard error says why, unless its reader is gone: that ends the program if its
    output is ``all`` it is for. The descriptor stays open when this object is closed.
    """

    def __init__(self, descriptor: int, is_all: bool = False) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.is_all = is_all

    def write(self, data: "ReadableBuffer", /) -> int | None:
        """Write, here or, from the first loss on, nowhere."""
        try:
            return super().write(data)
        except OSError as error:
            why = None if error.errno in GONE else error.strerror
        # The descriptor itself changes, for whatever else writes to it: C libraries, children.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if why and self.fileno() != 2:
            print(f"standard output: {why}; what is printed from here on is lost", file=sys.stderr)
        if self.is_all and not why:
            raise SystemExit(128 + signal.SIGPIPE)  # as that signal ends others
        return super().write(data)


def outlive_console(is_all: bool = False) -> None:
    """Let the program go on when its output cannot be written any more.

    If the output is all that it is for, it ends when nobody reads on, as behind ``| head``.

    A character that the console does not have is shown as ``\\u2264``. Streams that are not the
    process's own stay as they are.
    """
    if logging.lastResort is not None:  # what shows warnings where nobody has set up logging
        logging.lastResort.setFormatter(PrintableFormatter())
    if sys.stdout is sys.__stdout__:
        sys.stdout = lasting(sys.stdout, is_all)
    if sys.stderr is sys.__stderr__:
        sys.stderr = lasting(sys.stderr)


def lasting(stream: TextIO, is_all: bool = False) -> TextIO:
    """The same stream on a :class:`Console`."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    console = Console(stream.fileno(), is_all)
    return io.TextIOWrapper(
        console if stream.write_through else io.BufferedWriter(console),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors in FAILING else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def printable(text: str) -> str:
    r"""The text with characters that control, reorder or hide shown as ``\x1b`` or ``\u202e``.

    A model that learnt from a log with colours must not send them to the terminal. Newlines and
    tabs stay.
    """
    return CONTROL_CHARACTER.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class PrintableFormatter(logging.Formatter):
    """Shows messages printably, because they may quote a file from elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        """The message, printable."""
        return printable(super().format(record))
