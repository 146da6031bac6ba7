"""Fields that explain and validate themselves: what the schema is written in. Knows no library.

A field that its type, its ``within`` interval or its section's ``check`` refuses raises one
:class:`~invformer.errors.ConfigurationError` that begins with the field's key, however the object
was made: from a command line, a file, a checkpoint or Python.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin

from invformer.errors import ConfigurationError

NULL_WORDS = ("", "~", "null", "Null", "NULL", "None")  # None is what a W&B sweep writes
EMPTY = "is empty; give at least one character"

AnySection = TypeVar("AnySection", bound="Section")


def option(default: Any, help: str, *, within: str | None = None) -> Any:
    """A field with its meaning (and unit) and, for numbers, the interval it must lie in."""
    metadata = {"help": help, "within": within}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    """A group of fields, at its defaults."""
    return field(default_factory=kind)


def refuse(key: str, why: str) -> NoReturn:
    """Raise the error for one field: its key, then what is wrong and what to do."""
    raise ConfigurationError(f"{key}: {why}")


def shown(value: Any) -> str:
    """A value as an error message quotes it: on one line and never long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def contains(interval: str, value: float) -> bool:
    """Whether a value lies in an interval such as ``"(0, 1]"``; NaN lies in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    below = value < high if interval[-1] == ")" else value <= high
    return above and below


def is_optional(kind: Any) -> bool:
    """Whether a type admits None."""
    return NoneType in get_args(kind)


def required_part(kind: Any) -> Any:
    """The type without ``| None``."""
    return (
        next(part for part in get_args(kind) if part is not NoneType) if is_optional(kind) else kind
    )


def describe(kind: Any) -> str:
    """A type in the words of the help and the error messages."""
    if is_optional(kind):
        return f"{describe(required_part(kind))} or null"
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list:
        return f"[{describe(get_args(kind)[0])}, ...]"
    return {bool: "true|false", int: "integer", float: "number", str: "text"}[kind]


def matches(value: Any, kind: Any) -> bool:
    """Whether a value is of a schema type; an integer serves as a number, a bool never does."""
    if value is None:
        return is_optional(kind)
    kind = required_part(kind)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(matches(v, get_args(kind)[0]) for v in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def is_plain_text(text: str) -> bool:
    """Whether a text survives a command line and a YAML file as it is."""
    if text in NULL_WORDS or text == "???" or "${" in text or "\0" in text:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(kw_only=True)
class Section:
    """Fields that validate themselves on construction."""

    key: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            self._check_field(f, getattr(self, f.name))
        self.check()

    def check(self) -> None:
        """What one field's type and interval cannot say."""

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise the error for one of this section's fields."""
        refuse(f"{self.key}.{name}" if self.key else name, why)

    def _check_field(self, f: Field, value: Any) -> None:
        kind: Any = f.type
        if is_section(kind):
            if not isinstance(value, kind):
                self.refuse(f.name, f"{shown(value)} is not a {kind.__name__}")
            return
        if not matches(value, kind):
            self.refuse(f.name, f"{shown(value)} is not {describe(kind)}")
        for item in value if isinstance(value, list) else [value]:
            if item == "":
                self.refuse(f.name, EMPTY)
            if isinstance(item, str) and not is_plain_text(item):
                self.refuse(f.name, f"{shown(item)} cannot be used as text")
            within = f.metadata.get("within")
            if within and isinstance(item, int | float) and not contains(within, item):
                self.refuse(f.name, f"{shown(item)} is not in {within}")


@dataclass(kw_only=True)
class Root(Section):
    """The whole configuration of one command."""

    program: ClassVar[str]
    groups: ClassVar[tuple[str, ...]] = ()  # keys that pick a file below configs/


def is_section(kind: Any) -> bool:
    """Whether a field's type is a group of fields."""
    return isinstance(kind, type) and issubclass(kind, Section)


def options(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every single field below a schema with its dotted key, in order."""
    for f in fields(schema):
        kind: Any = f.type
        if is_section(kind):
            yield from options(kind, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f


def default_of(f: Field) -> Any:
    """A field's default; ``MISSING`` where a value is required."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word a typo most likely meant; a field named without its section is found too."""
    known = list(known)
    near = [key for key in known if key.rpartition(".")[2] == word]
    near = near or difflib.get_close_matches(word, known, n=1)
    return near[0] if near else None


def refuse_unknown(key: str, known: Iterable[str], source: str = "") -> NoReturn:
    """Raise the error for a key that does not exist, with the nearest one that does."""
    near = nearest(key, known)
    hint = f"did you mean {near!r}?" if near else "see --help"
    raise ConfigurationError(f"{source}unknown key {shown(key)}: {hint}")


def from_plain(values: Mapping[str, Any], schema: type[AnySection], prefix: str) -> AnySection:
    """A section from plain values: unknown keys are refused, absent ones take their default."""
    if not isinstance(values, Mapping):
        refuse(prefix.rstrip(".") or "configuration", f"{shown(values)} is not a mapping")
    kinds: dict[str, Any] = {f.name: f.type for f in fields(schema)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            refuse_unknown(f"{prefix}{name}", [prefix + known for known in kinds])
        if is_section(kinds[name]):
            value = from_plain(value, kinds[name], f"{prefix}{name}.")
        arguments[name] = list(value) if isinstance(value, list) else value
    for f in fields(schema):
        if f.name not in arguments and f.default is f.default_factory is MISSING:
            refuse(prefix + f.name, f"give one: {f.metadata['help']}")
    return schema(**arguments)
