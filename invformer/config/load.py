"""From a command line to a validated configuration, and back: the only module that knows OmegaConf.

``python train.py model=l2 data=ptb trainer.max_steps=20000 experiment=nanogpt_cpu``

* ``group=name`` merges ``configs/group/name.yaml`` into a group; fields it does not name stay.
* ``key=value`` (or ``--key=value``) sets one field; ``optim.betas[0]=.5`` one item of a list.
* An experiment may extend another one: ``base: NAME`` at the top of its file merges that first.
* Order: the schema's defaults, then the experiment, then the other groups, then single fields. Of
  two settings with the same key the last wins.

Every value, from either source, stays text until it meets the type of its field: ``run.name=010``
and ``data.path=on`` keep their letters, ``010`` is ten, ``yes`` is a bool only where one is due.
Files may refer to another field as ``${model.d_model}``; command lines may not.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

import yaml  # OmegaConf's own parser, used here to keep scalars as text
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from invformer.config.schema import TrainConfig
from invformer.config.section import (
    EMPTY,
    NULL_WORDS,
    Root,
    default_of,
    describe,
    from_plain,
    is_optional,
    nearest,
    options,
    refuse,
    refuse_unknown,
    required_part,
    shown,
)
from invformer.errors import ConfigurationError

Config = TypeVar("Config", bound=Root)

OVERRIDE = re.compile(r"(?:--)?([^=]*)=(.*)", re.DOTALL)
LIST_ITEM = re.compile(r"(.+)\[(\d{1,9})\]")
FIELD_REFERENCE = re.compile(r"\$\{\w+\.\w+\}")
# What YAML refuses in a text, or takes for the end of a line, unless it is escaped.
UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
EXACT = 2**53  # integers below it are floats as well
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Setting(NamedTuple):
    """One field to set, and where that was asked for."""

    key: str
    value: Any
    source: str = ""  # "configs/model/l2.yaml: ", or nothing for the command line


def parse_or_exit(
    argv: Sequence[str], schema: type[Config] = TrainConfig, config_root: Path | None = None
) -> Config:
    """The configuration a command line asks for; help, printing and errors end the program.

    Args:
        argv: the arguments after the program's name.
        schema: ``TrainConfig`` or ``EvaluateConfig``.
        config_root: folder that holds ``configs/``; None looks beside the package, then in the
            working directory.

    Raises:
        SystemExit: 0 after ``--help`` or ``--print-config``, 2 after one line on standard error.
    """
    if {"-h", "--help"} & set(argv):
        print(help_text(schema, config_root))
        raise SystemExit(0)
    try:
        words = [word for word in argv if word not in ("--print-config", "--debug")]
        if "--debug" in argv:
            words += [f"{key}=true" for key, _ in options(schema) if key.split(".")[-1] == "debug"]
        config = load_config(words, schema, config_root)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if "--print-config" in argv:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def load_config(
    argv: Sequence[str], schema: type[Config] = TrainConfig, config_root: Path | None = None
) -> Config:
    """The validated tree of plain dataclasses that a command line asks for.

    Args:
        argv: ``group=name`` and ``key=value`` words, with or without ``--``.
        schema: ``TrainConfig`` or ``EvaluateConfig``.
        config_root: as in :func:`parse_or_exit`; needed for presets only.

    Raises:
        ConfigurationError: one line that names the key, and the nearest one where it is unknown.
    """
    settings = [_parse_override(word, schema, config_root) for word in argv]
    chosen = {s.key: s.value for s in settings if s.key in schema.groups}
    if chosen.get("experiment") in NULL_WORDS:
        del chosen["experiment"]
    tree = OmegaConf.structured(schema)
    for group in schema.groups:  # the experiment comes first there
        if group in chosen:
            for setting in _read_preset(group, chosen[group], schema, config_root):
                _assign(tree, setting, schema)
    for setting in settings:
        if setting.key not in schema.groups:
            _assign(tree, setting, schema)
    return _validated(tree, schema)


def from_dict(values: Mapping[str, Any], schema: type[Config] = TrainConfig) -> Config:
    """A configuration from plain values, such as a checkpoint's; what is absent takes its default.

    Raises:
        ConfigurationError: an unknown key, a value of the wrong type, or one out of range.
    """
    return from_plain(values, schema, prefix="")


def to_dict(config: Root) -> dict[str, Any]:
    """The nested plain dict that goes into checkpoints and to W&B."""
    return asdict(config)


def to_yaml(config: Root) -> str:
    """The resolved configuration as YAML; it can serve as an experiment file."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def command_line(config: Root) -> str:
    """The one command that repeats a run: every value that is not a default, shell-quoted."""
    words = ["python", config.program]
    for key, f in options(type(config)):
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if value != default_of(f):
            words.append(f"{key}={_as_text(value)}")
    return shlex.join(words)


def help_text(schema: type[Root] = TrainConfig, config_root: Path | None = None) -> str:
    """Usage, presets by group, and every field with type, interval, default and meaning."""
    words = "[group=preset ...] [key=value ...]" if schema.groups else "[key=value ...]"
    lines = [f"usage: python {schema.program} {words} [--print-config] [--debug] [--help]"]
    lines += ["", schema.__doc__ or ""]
    if schema.groups:
        lines += ["", "presets (group=name); the experiment applies first, single fields last:"]
    for group in schema.groups:
        names = ", ".join(_presets(group, config_root)) or "none found"
        lines += wrap(f"  {group:<12}{names}", 100, subsequent_indent=" " * 14)
    lines += ["", "fields (key=value), each with its default:"]
    for key, f in options(schema):
        default = default_of(f)
        assigned = "=  (required)" if default is MISSING else f"={_as_text(default)}"
        within = f" in {f.metadata['within']}" if f.metadata.get("within") else ""
        lines += [f"  {key}{assigned}", f"      {describe(f.type)}{within}: {f.metadata['help']}"]
    return "\n".join(lines)


# --- words and files to settings -----------------------------------------------------------------


def _parse_override(word: str, schema: type[Root], config_root: Path | None) -> Setting:
    """``key=value`` or ``--key=value``."""
    found = OVERRIDE.fullmatch(word)
    if found is None:
        presets = [f"{g}={name}" for g in schema.groups for name in _presets(g, config_root)]
        meant = [preset for preset in presets if preset.partition("=")[2] == word]
        near = nearest(word.lstrip("-"), [*schema.groups, *(key for key, _ in options(schema))])
        meant += [f"{near}=VALUE"] if near else []
        hint = f"did you mean {meant[0]}?" if meant else "see --help"
        raise ConfigurationError(f"{shown(word)} is not key=value: {hint}")
    key, value = found.groups()
    if "${" in value:
        refuse(key, f"{shown(value)}: a command line takes no interpolations")
    return Setting(key, value)


class _TextLoader(yaml.BaseLoader):
    """YAML whose scalars stay text, as on a command line; a key given twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name in (name for name, _ in node.value if isinstance(name, yaml.ScalarNode)):
            if name.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {name.value!r} is given twice", problem_mark=name.start_mark
                )
            seen.add(name.value)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _TextLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        refuse(where, f"line {line}: {error.problem}")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        refuse(where, " ".join(str(error).split()))


def _presets(group: str, config_root: Path | None) -> dict[str, Path]:
    """The presets of one group by name; empty where there is no such folder."""
    roots = [Path(__file__).parents[2], Path.cwd()] if config_root is None else [config_root]
    for root in roots:
        if files := sorted((root / "configs" / group).glob("*.yaml")):
            return {path.stem: path for path in files}
    return {}


def _read_preset(
    group: str,
    name: str,
    schema: type[Root],
    config_root: Path | None,
    above: tuple[str, ...] = (),
) -> Iterator[Setting]:
    """The settings of ``configs/group/name.yaml``, after those of the experiment it extends.

    ``above`` are the experiments that extend this one, the one asked for first.
    """
    where = f"configs/{group}/{above[-1]}.yaml: base" if above else group
    if name in above:
        refuse(where, f"experiments extend each other: {' > '.join([*above, name])}")
    known = _presets(group, config_root)
    if not known:
        refuse(group, f"no presets in configs/{group}: run from a clone of the repository")
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
        refuse(where, f"no preset {shown(name)}: {hint}")
    source = f"configs/{group}/{name}.yaml"
    try:
        text = known[name].read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        refuse(source, str(error))
    tree = _parse_yaml(text, source)
    if group == "experiment" and isinstance(tree, dict) and "base" in tree:
        base = tree.pop("base")
        if not isinstance(base, str):
            refuse(f"{source}: base", f"{shown(base)} is not the name of an experiment")
        yield from _read_preset(group, base, schema, config_root, (*above, name))
    prefix = "" if group == "experiment" else f"{group}."
    yield from _flatten(tree, prefix, schema, f"{source}: ")


def _flatten(tree: Any, prefix: str, schema: type[Root], source: str) -> Iterator[Setting]:
    """Nested mappings as one setting per field, in the file's order."""
    if tree in (None, *NULL_WORDS):
        return
    if not isinstance(tree, dict):
        refuse(f"{source}{prefix.rstrip('.') or 'the file'}", "must map fields to values")
    sections = {key.rpartition(".")[0] for key, _ in options(schema)}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in sections:
            yield from _flatten(value, f"{key}.", schema, source)
        elif isinstance(value, str) and "${" in value and not FIELD_REFERENCE.fullmatch(value):
            refuse(f"{source}{key}", f"{shown(value)} is no reference such as ${{model.d_model}}")
        else:
            yield Setting(key, value, source)


# --- settings to typed values --------------------------------------------------------------------


def _assign(tree: DictConfig, setting: Setting, schema: type[Root]) -> None:
    """Set one field of the typed tree."""
    where = f"{setting.source}{setting.key}"
    kinds: dict[str, Any] = {key: f.type for key, f in options(schema)}
    item = LIST_ITEM.fullmatch(setting.key)
    if item and get_origin(kinds.get(item[1])) is list:
        kind = get_args(kinds[item[1]])[0]
        if int(item[2]) >= len(OmegaConf.select(tree, item[1])):
            refuse(where, "the list is shorter than that")
    elif setting.key in kinds:
        kind = kinds[setting.key]
    else:
        inside = [key for key in kinds if key.startswith(f"{setting.key}.")]
        if inside:
            refuse(where, f"is a section: set one of its fields, such as {inside[0]}=VALUE")
        refuse_unknown(setting.key, [*schema.groups, *kinds], setting.source)
    if setting.value == "" and required_part(kind) is str and not setting.source:
        refuse(where, EMPTY)  # in a file, a field with nothing after its name is null
    value = _read(setting.value, kind, where)
    try:
        OmegaConf.update(tree, setting.key, value)
    except OmegaConfBaseException:
        _refuse_value(where, setting.value, kind)


def _read(value: Any, kind: Any, where: str) -> Any:
    """Text as OmegaConf's typed fields take it: null, bools and lists are told apart here."""
    if isinstance(value, str) and FIELD_REFERENCE.fullmatch(value):
        return value
    if isinstance(value, str) and value in NULL_WORDS and is_optional(kind):
        return None
    kind = required_part(kind)
    if get_origin(kind) is list:
        items = _parse_yaml(value, where) if isinstance(value, str) else value
        if not isinstance(items, list):
            _refuse_value(where, value, kind)
        return [_read(item, get_args(kind)[0], where) for item in items]
    if not isinstance(value, str) or value in (*NULL_WORDS, "???"):  # ??? is OmegaConf's "missing"
        _refuse_value(where, value, kind)
    if kind is bool and value.lower() in BOOLS:
        return BOOLS[value.lower()]
    if kind is bool or (get_origin(kind) is Literal and value not in get_args(kind)):
        _refuse_value(where, value, kind)
    return value


def _refuse_value(where: str, value: Any, kind: Any) -> NoReturn:
    """Say why a value does not fit, with what was probably meant."""
    refuse(where, f"{shown(value)} is not {describe(kind)}{_hint(value, required_part(kind))}")


def _hint(value: Any, kind: Any) -> str:
    """What to write instead, where that can be told."""
    choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
    if near := nearest(str(value), choices):
        return f": did you mean {near!r}?"
    if kind is int and isinstance(value, str) and (whole := _whole_number(value)) is not None:
        return f": write {whole}"
    if kind is str and value == "~":
        return ": by itself it means null; write ~/ for your home folder"
    return ""


def _whole_number(text: str) -> int | None:
    """The integer that a number such as 1e3 is."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() and abs(number) < EXACT else None


def _validated(tree: DictConfig, schema: type[Config]) -> Any:
    """The dataclasses, which validate themselves as they are made."""
    try:
        return OmegaConf.to_object(tree)
    except MissingMandatoryValue as error:
        helps = {key: f.metadata["help"] for key, f in options(schema)}
        refuse(str(error.full_key), f"give one: {helps[str(error.full_key)]}")
    except OmegaConfBaseException as error:  # a reference in a file that leads nowhere
        refuse(str(error.full_key), str(error).splitlines()[0])


def _as_text(value: Any) -> str:
    """A value as an override writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool | list):
        text = json.dumps(value, ensure_ascii=False)
        return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return str(value)
