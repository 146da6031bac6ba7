"""Checkpoints somebody made to do harm: each a change to a good one, by the name of the attack."""

import json
import math
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from invformer.runs.checkpoint import (
    FILES,
    MANIFEST,
    MODEL,
    STATE,
    STATE_TENSORS,
    WEIGHTS,
    manifest_of,
)

Attack = Callable[[Path, Path], str | None]  # (checkpoint, canary) -> another path to open


class Payload:
    """Unpickling it makes the canary file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return Path.touch, (self.canary,)


def flipped(content: bytes) -> bytes:
    """One bit of it, in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def seal(path: Path) -> None:
    """Make the manifest fit the files, as whoever changes them can."""
    there = filter(lambda name: (path / name).exists(), FILES)
    files = {name: (path / name).read_bytes() for name in there}
    (path / MANIFEST).write_bytes(manifest_of(files))


def put(name: str, content: bytes | Callable[[bytes], bytes]) -> Attack:
    """Replace one file, or change it, and seal."""

    def attack(path: Path, canary: Path) -> None:
        before = (path / name).read_bytes()
        (path / name).write_bytes(content if isinstance(content, bytes) else content(before))
        if name != MANIFEST:
            seal(path)

    return attack


def edit_json(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file in place and seal."""

    def changed(content: bytes) -> bytes:
        value = json.loads(content)
        change(value)
        return json.dumps(value).encode()

    put(name, changed)(path, path)


def edited(name: str, change: Callable[[Any], Any]) -> Attack:
    return lambda path, canary: edit_json(path, name, change)


def set_key(dotted: str, value: Any) -> Attack:
    """Set one value of ``model.json``."""

    def change(tree: Any) -> None:
        *parents, last = dotted.split(".")
        for name in parents:
            tree = tree[name]
        tree[last] = value

    return edited(MODEL, change)


def put_pickle(name: str) -> Attack:
    """Replace one file, or add it, by a pickle with a payload."""

    def attack(path: Path, canary: Path) -> None:
        torch.save({"state_dict": Payload(canary)}, path / name)
        if name in FILES:
            seal(path)

    return attack


def single_file(path: Path, canary: Path) -> str:
    """A file in place of a directory."""
    (path.parent / "last.ckpt").write_bytes(pickle.dumps(Payload(canary)))
    return str(path.parent / "last.ckpt")


def old_run(path: Path, canary: Path) -> str:
    """A run folder of an earlier version."""
    folder = path.parent.parent / "old"
    folder.mkdir()
    torch.save({"state_dict": Payload(canary)}, folder / "last.ckpt")
    return str(folder)


def with_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Attack:
    """Change the weights and write them properly."""

    def changed(content: bytes) -> bytes:
        weights = safetensors.torch.load(content)
        change(weights)
        return safetensors.torch.save(weights)

    return put(WEIGHTS, changed)


def first(weights: dict[str, torch.Tensor]) -> str:
    return next(iter(weights))


def replaced(name: str, make: Callable[[Path], Any]) -> Attack:
    """Put something else in the place of a file, which lies in the folder above."""

    def attack(path: Path, canary: Path) -> None:
        os.rename(path / name, path.parent / name)
        make(path / name)

    return attack


def linked_directory(path: Path, canary: Path) -> str:
    """A checkpoint in a run folder that is a link to elsewhere."""
    os.rename(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")
    return str(path.parent.parent)


def terabyte(path: Path, canary: Path) -> None:
    """Weights that take no room on the disk and all of it in memory."""
    os.truncate(path / WEIGHTS, 1 << 40)
    listed = {"bytes": 1 << 40, "sha256": "0" * 64}
    edit_json(path, MANIFEST, lambda m: m["files"].update({WEIGHTS: listed}))


DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
ATTACKS: dict[str, Attack] = {
    # --- what is no checkpoint ---
    **{f"a pickle as {name}": put_pickle(name) for name in (WEIGHTS, STATE, MANIFEST, "data.pkl")},
    "a single file": single_file,
    "a run of an earlier version": old_run,
    "an address": lambda path, canary: "https://example.org/x",
    **{
        f"{what} as {name}": replaced(name, make)
        for name in (WEIGHTS, MODEL, MANIFEST)
        for what, make in {
            "a link": lambda path: path.symlink_to(path.parent.parent / path.name),
            "a pipe": os.mkfifo,
            "a folder": Path.mkdir,
        }.items()
    },
    "a checkpoint that is a link": linked_directory,
    # --- JSON ---
    **{f"depth in {name}": put(name, DEEP) for name in (MODEL, STATE, MANIFEST)},
    "bytes that are no text": put(MODEL, b"\xff\xfe{}"),
    **{f"{n} cut short": put(n, lambda content: content[:-9]) for n in (MODEL, WEIGHTS)},
    "null": put(MODEL, b"null"),
    "a manifest without a file": edited(MANIFEST, lambda m: m["files"].pop(STATE)),
    "a manifest of version 2": edited(MANIFEST, lambda m: m.update(version=2)),
    "a manifest of files in a list": edited(MANIFEST, lambda m: m.update(files=list(m["files"]))),
    "an object in state.json": edited(STATE, lambda s: s.update(loops={"$": "object"})),
    "a tensor that is not there": edited(
        STATE, lambda s: s.update(loops={"$": "tensor", "name": "../x"})
    ),
    "a state that is a list": put(STATE, b"[]"),
    "a state without its callbacks": edited(STATE, lambda s: s.pop("callbacks")),
    # --- tensors; what else safetensors refuses is tested there ---
    "a terabyte of weights": terabyte,
    "a header of 2^63 bytes": put(STATE_TENSORS, struct.pack("<Q", 1 << 63) + bytes(9)),
    "bytes that no tensor has": put(WEIGHTS, lambda content: content + bytes(4)),
    "weights in double precision": with_weights(
        lambda w: w.update({name: value.double() for name, value in w.items()})
    ),
    "a transposed weight": with_weights(
        lambda w: w.update({k: v.mT.contiguous() for k, v in w.items() if v.ndim == 2})
    ),
    "a weight by another name": with_weights(lambda w: w.update({"model.x": w.pop(first(w))})),
    "a weight that is NaN": with_weights(lambda w: w[first(w)].view(-1)[0].fill_(math.nan)),
    # --- a configuration, and what else there is in model.json, that do not fit the weights ---
    **{
        f"{key} = {value!r:.20}": set_key(key, value)
        for key, value in {
            "vocabulary.characters": "abcdefg",
            "config.model._target_": "os.system",
            "config.model.d_model": 96_000,
            "config.model.num_layers": 10_000,
            "config.model.name": "dot_product",
            "config.data.seq_len": 1_000_000,
            "config.trainer.precision": "64-true",
            "step": -1,
            "data_sha256": [1],
        }.items()
    },
}
