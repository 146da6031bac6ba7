"""Fields with a meaning and a range, which check themselves; they make up the schema."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, Literal, NoReturn, get_args, get_origin

from invformer.errors import ConfigurationError

NULL_WORDS = ("~", "null", "Null", "NULL", "None")  # None is what a W&B sweep writes
SURROGATE = re.compile("[\ud800-\udfff]")  # a byte of a command line that is not UTF-8
ANY_TEXT = re.compile(r"[^\0\ud800-\udfff]*")  # of a field that is read as it is typed, also null


def option(
    default: Any, help: str, within: str | None = None, pattern: re.Pattern[str] | None = None
) -> Any:
    """A field with its meaning (and unit), and the interval or the pattern that it must fit."""
    metadata = {"help": help, "within": within, "pattern": pattern}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# What other programs call our fields.
SYNONYMS = {
    "learning_rate": "lr", "heads": "num_heads", "n_head": "num_heads", "layers": "num_layers",
    "n_layer": "num_layers", "n_embd": "d_model", "width": "d_model", "block_size": "seq_len",
    "context": "seq_len", "epochs": "max_steps", "steps": "max_steps", "max_iters": "max_steps",
    "file": "path",
}  # fmt: skip


@dataclass(kw_only=True)
class Section:
    """Fields that are checked when an object is made, and errors that begin with the field's key.

    A subclass names its own ``key`` and may add ``check(self)`` for rules about several fields.
    """

    key: ClassVar[str] = ""

    def __init_subclass__(cls, key: str | None = None) -> None:
        if key is not None:
            cls.key = key

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            for item in value if isinstance(value, list) else [value]:
                if item == "":
                    self.refuse(f.name, "is empty; give at least one character")
                within, pattern = f.metadata.get("within"), f.metadata.get("pattern")
                if pattern is not ANY_TEXT and SURROGATE.search(str(item)):
                    self.refuse(f.name, "its name is not UTF-8; rename it")
                if pattern is not ANY_TEXT and not is_plain(item):
                    self.refuse(f.name, f"{shown(item)} cannot be used as a value")
                if item is not None and within and not contains(within, item):
                    self.refuse(f.name, f"{shown(item)} is not in {within}")
                if item is not None and pattern and not pattern.fullmatch(item):
                    self.refuse(f.name, f"{shown(item)} is not {f.metadata['help']}")
        self.check()

    def check(self) -> None:
        """Refuse combinations of fields that make no sense."""

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise the error for one of this section's fields."""
        refuse(f"{self.key}.{name}" if self.key else name, why)


@dataclass(kw_only=True)
class Root(Section):
    """The whole configuration of one command."""

    program: ClassVar[str]
    groups: ClassVar[tuple[str, ...]] = ()  # keys that pick a file below configs/

    def ignored(self) -> dict[str, str]:
        """Keys that this configuration does not read, each with the reason."""
        return {}


def refuse(key: str, why: str) -> NoReturn:
    """Raise the error for one field: its key, then what is wrong and what to do."""
    raise ConfigurationError(f"{key}: {why}")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word a typo most likely meant; other people's names and fields alone count too."""
    known = list(known)
    section, _, name = word.lower().rpartition(".")
    named = [key for key in known if key.rpartition(".")[2] == SYNONYMS.get(name, name)]
    near = [key for key in named if key.startswith(f"{section}.")] or named
    near = near or difflib.get_close_matches(word, known, n=1)
    return near[0] if near else None


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """What to write instead of a word that is not known."""
    near = nearest(word, known)
    return f"did you mean {near!r}?" if near else otherwise


def shown(value: Any) -> str:
    """A value as an error message quotes it: on one line and never long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def contains(interval: str, value: float) -> bool:
    """Whether a number lies in an interval such as ``"(0, 1]"``; NaN lies in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    return above and (value < high if interval[-1] == ")" else value <= high)


def is_plain(value: Any) -> bool:
    """Whether a value survives a command line and a YAML file as it is."""
    if not isinstance(value, str):
        return not isinstance(value, list | dict)
    words = (*NULL_WORDS, "???")  # ??? is OmegaConf's word for a missing value
    return value not in words and "${" not in value and ANY_TEXT.fullmatch(value) is not None


def is_optional(kind: Any) -> bool:
    """Whether a type admits None."""
    return NoneType in get_args(kind)


def required_part(kind: Any) -> Any:
    """The type without ``| None``."""
    return get_args(kind)[0] if is_optional(kind) else kind


def describe(kind: Any) -> str:
    """A type in the words of the help and the error messages."""
    if is_optional(kind):
        return f"{describe(required_part(kind))} or null"
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list:
        return f"[{describe(get_args(kind)[0])}, ...]"
    return {bool: "true|false", int: "integer", float: "number", str: "text"}[kind]


def options(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every single field below a schema with its dotted key, in order."""
    for f in fields(schema):
        kind: Any = f.type
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from options(kind, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f


def default_of(f: Field) -> Any:
    """A field's default; ``MISSING`` where a value is required."""
    return f.default if f.default_factory is MISSING else f.default_factory()
