"""Checkpoints somebody made to do harm: each a change to a good one, by the name of the attack."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from invformer.runs.checkpoint import MODEL, STATE, STATE_TENSORS, WEIGHTS
from invformer.runs.checkpoint_directory import MANIFEST

FILES = (MODEL, WEIGHTS, STATE, STATE_TENSORS)
Attack = Callable[[Path, Path], str | None]  # (checkpoint, canary) -> another path to open


class Payload:
    """Unpickling it makes the canary file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return Path.touch, (self.canary,)


def seal(path: Path) -> None:
    """Make the manifest fit the files, as whoever changes them can."""
    files = {
        name: {
            "bytes": (path / name).stat().st_size,
            "sha256": sha256((path / name).read_bytes()).hexdigest(),
        }
        for name in FILES
        if (path / name).is_file()
    }
    write_manifest(path, {"format": "invformer checkpoint", "version": 1, "files": files})


def write_manifest(path: Path, content: Any) -> None:
    (path / MANIFEST).write_text(json.dumps(content))


def replace_file(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    if name != MANIFEST:
        seal(path)


def edit_json(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file in place and seal."""
    value = json.loads((path / name).read_text())
    change(value)
    replace_file(path, name, json.dumps(value).encode())


def set_key(dotted: str, value: Any) -> Attack:
    """Set one value of ``model.json``."""

    def attack(path: Path, canary: Path) -> None:
        def change(tree: Any) -> None:
            *parents, last = dotted.split(".")
            for name in parents:
                tree = tree[name]
            tree[last] = value

        edit_json(path, MODEL, change)

    return attack


def put(name: str, content: bytes) -> Attack:
    """Replace one file."""

    def attack(path: Path, canary: Path) -> None:
        replace_file(path, name, content)

    return attack


def put_pickle(name: str, how: str, sealed: bool) -> Attack:
    """Replace one file by a pickle with a payload."""

    def attack(path: Path, canary: Path) -> None:
        buffer = io.BytesIO()
        if how == "torch":
            torch.save({"state_dict": Payload(canary)}, buffer)
        else:
            buffer.write(pickle.dumps(Payload(canary), protocol=int(how)))
        (path / name).write_bytes(buffer.getvalue())
        if sealed and name != MANIFEST:
            seal(path)

    return attack


def add_file(name: str) -> Attack:
    """Put a pickle beside the files."""

    def attack(path: Path, canary: Path) -> None:
        (path / name).write_bytes(pickle.dumps(Payload(canary)))

    return attack


def single_file(name: str, how: str) -> Attack:
    """Offer a file in place of a directory."""

    def attack(path: Path, canary: Path) -> str:
        with (path.parent / name).open("wb") as file:
            (torch.save if how == "torch" else pickle.dump)(Payload(canary), file)
        return str(path.parent / name)

    return attack


def old_run(path: Path, canary: Path) -> str:
    """A run folder of an earlier version."""
    folder = path.parent.parent / "old"
    folder.mkdir()
    torch.save({"state_dict": Payload(canary)}, folder / "last.ckpt")
    return str(folder)


def address(url: str) -> Attack:
    """Offer an address in place of a path."""
    return lambda path, canary: url.format(path=path)


def safetensors_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def change_header(change: Callable[[dict, bytes], tuple[Any, bytes]]) -> Attack:
    """Change the header or the data of the weights."""

    def attack(path: Path, canary: Path) -> None:
        content = (path / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header, data = change(json.loads(content[8 : 8 + length]), content[8 + length :])
        replace_file(path, WEIGHTS, safetensors_file(header, data))

    return attack


def first(header: dict) -> dict:
    return next(entry for entry in header.values() if len(entry["shape"]) == 2)


def with_entry(**changed: Any) -> Attack:
    """Change what the header says about one tensor."""
    return change_header(lambda h, d: (first(h).update(changed), (h, d))[1])


def overlapping(header: dict, data: bytes) -> tuple[dict, bytes]:
    one, two = list(header.values())[:2]
    two["data_offsets"], two["shape"], two["dtype"] = (
        one["data_offsets"], one["shape"], one["dtype"],
    )  # fmt: skip
    return header, data


def with_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Attack:
    """Change the weights and write them properly."""

    def attack(path: Path, canary: Path) -> None:
        weights = safetensors.torch.load_file(path / WEIGHTS)
        change(weights)
        replace_file(path, WEIGHTS, safetensors.torch.save(weights))

    return attack


def cast(dtype: torch.dtype) -> Attack:
    return with_weights(lambda w: w.update({name: value.to(dtype) for name, value in w.items()}))


def poisoned(value: float) -> Attack:
    return with_weights(lambda w: next(iter(w.values())).view(-1)[0].fill_(value))


def link(name: str) -> Attack:
    """A file that is a link to itself elsewhere."""

    def attack(path: Path, canary: Path) -> None:
        os.rename(path / name, path.parent / name)
        (path / name).symlink_to(path.parent / name)

    return attack


def linked_directory(path: Path, canary: Path) -> str:
    """A checkpoint in a run folder that is a link to elsewhere."""
    os.rename(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")
    return str(path.parent.parent)


def pipe(name: str) -> Attack:
    """A file whose reading never ends."""

    def attack(path: Path, canary: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return attack


def folder_named(name: str) -> Attack:
    def attack(path: Path, canary: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return attack


def with_manifest(change: Callable[[dict], Any]) -> Attack:
    """Change the manifest."""

    def attack(path: Path, canary: Path) -> None:
        content = json.loads((path / MANIFEST).read_text())
        write_manifest(path, change(content) or content)

    return attack


def listed(name: str) -> Attack:
    """A manifest that lists a file elsewhere."""

    def attack(path: Path, canary: Path) -> None:
        content = json.loads((path / MANIFEST).read_text())
        outside = (path / name).resolve()
        if not outside.exists():
            outside.write_bytes(pickle.dumps(Payload(canary)))
        content["files"][name] = content["files"].pop(STATE)
        write_manifest(path, content)

    return attack


def sparse(name: str, size: int) -> Attack:
    """A file that takes no room on the disk and all of it in memory."""

    def attack(path: Path, canary: Path) -> None:
        os.truncate(path / name, size)
        content = json.loads((path / MANIFEST).read_text())
        content["files"][name] = {"bytes": size, "sha256": ZERO}
        write_manifest(path, content)

    return attack


def bomb(size: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(size))
    return buffer.getvalue()


def best(name: Any) -> Attack:
    """A run folder whose newest checkpoint names another as the best."""

    def attack(path: Path, canary: Path) -> str:
        set_key("best", name)(path, canary)
        return str(path.parent.parent)

    return attack


def missing(name: str) -> Attack:
    return lambda path, canary: (path / name).unlink()


def in_state(change: Callable[[Any], Any]) -> Attack:
    return lambda path, canary: edit_json(path, STATE, change)


deep = b"[" * 100_000 + b"]" * 100_000
deep_objects = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
wide = b"[" + b"[]," * 1_000_000 + b"[]]"
BIG = 10**30
ZERO = "0" * 64
F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}

ATTACKS: dict[str, Attack] = {
    **{
        f"pickle {how} as {name}, sealed {sealed}": put_pickle(name, how, sealed)
        for name in (*FILES, MANIFEST)
        for how, sealed in (("0", True), ("4", True), ("torch", True), ("4", False))
    },
    **{
        f"pickle beside the files as {name}": add_file(name)
        for name in ("data.pkl", "hyper_parameters.pkl", "last.ckpt", "__init__.py", ".hidden")
    },
    **{
        f"{how} file {name}": single_file(name, how)
        for name in ("last.ckpt", "model.pt", "weights.safetensors", "step-00000003.ckpt")
        for how in ("torch", "pickle")
    },
    "run folder of an earlier version": old_run,
    **{
        f"address {url.partition(':')[0]}": address(url)
        for url in (
            "http://127.0.0.1:9/x.ckpt",
            "https://example.org/x",
            "s3://bucket/x",
            "gs://b/x",
            "hf://org/model",
            "file://{path}",
            "registry://x",
            "memory://x",
            "simplecache::file://x",
        )
    },
    # --- code that JSON asks for ---
    **{
        f"{key} in {where or 'model.json'}": set_key(f"{where}.{key}".lstrip("."), "os.system")
        for key in ("_instantiator", "_class_path", "class_path", "_target_", "py/object")
        for where in ("", "config", "config.model", "vocabulary")
    },
    "hyper_parameters in state.json": in_state(lambda s: s.update(hyper_parameters={"a": 1})),
    "tag of an object in state.json": in_state(lambda s: s.update(loops={"$": "object"})),
    "tag of a tensor that is not there": in_state(
        lambda s: s.update(loops={"$": "tensor", "name": "../x"})
    ),
    "state without its callbacks": in_state(lambda s: s.pop("callbacks")),
    "state that is a list": put(STATE, b"[]"),
    # --- bombs ---
    **{f"deep lists as {name}": put(name, deep) for name in (MODEL, STATE, MANIFEST)},
    **{f"deep objects as {name}": put(name, deep_objects) for name in (MODEL, STATE, MANIFEST)},
    **{f"a million values as {name}": put(name, wide) for name in (MODEL, STATE)},
    "five megabytes of model.json": put(MODEL, b'"' + b"x" * (5 << 20) + b'"'),
    "zip bomb as weights": put(WEIGHTS, bomb(1 << 24)),
    "zip bomb as state": put(STATE_TENSORS, bomb(1 << 24)),
    "sparse terabyte of weights": sparse(WEIGHTS, 1 << 40),
    "sparse gigabytes of weights": sparse(WEIGHTS, 8 << 30),
    "sparse gigabytes of state": sparse(STATE_TENSORS, 8 << 30),
    "sparse gigabytes of model.json": sparse(MODEL, 8 << 30),
    "sparse gigabytes of manifest": lambda path, canary: os.truncate(path / MANIFEST, 8 << 30),
    "header of 2^63 bytes": put(WEIGHTS, safetensors_file({}, length=1 << 63)),
    "header longer than the file": put(WEIGHTS, safetensors_file({}, length=100)),
    "header of sixteen megabytes": put(WEIGHTS, safetensors_file(b" " * (16 << 20))),
    "header of fifty thousand tensors": put(
        WEIGHTS,
        safetensors_file({f"t{i}": {**F32, "shape": [0]} for i in range(50_000)}),
    ),
    "deep header": put(WEIGHTS, safetensors_file(deep_objects)),
    "seven bytes of weights": put(WEIGHTS, b"\0" * 7),
    "empty weights": put(WEIGHTS, b""),
    # --- headers that lie ---
    "header that is a list": put(WEIGHTS, safetensors_file([])),
    "header with a tensor twice": put(
        WEIGHTS, safetensors_file(b'{"a":%s,"a":%s}' % ((json.dumps(F32).encode(),) * 2), bytes(4))
    ),
    "header with metadata": change_header(lambda h, d: ({"__metadata__": {"a": "b"}, **h}, d)),
    "overlapping tensors": change_header(overlapping),
    "bytes that no tensor has": change_header(lambda h, d: (h, d + b"\0" * 4)),
    "bytes that are missing": change_header(lambda h, d: (h, d[:-4])),
    "shape with a negative length": with_entry(shape=[-1, -8]),
    "shape of exabytes": with_entry(shape=[1 << 31, 1 << 31]),
    "shape that overflows": with_entry(shape=[1 << 40, 1 << 40, 0]),
    "shape of floats": with_entry(shape=[2.0, 2.0]),
    "shape of bools": with_entry(shape=[True, True]),
    "offsets that are negative": with_entry(data_offsets=[-8, 0]),
    "offsets that go backwards": with_entry(data_offsets=[64, 0]),
    "offsets of exabytes": with_entry(data_offsets=[0, 1 << 62]),
    "type nobody knows": with_entry(dtype="OBJ"),
    # --- weights that do not fit ---
    "weights in double precision": cast(torch.float64),
    "weights in half precision": cast(torch.float16),
    "a transposed weight": with_weights(
        lambda w: w.update({k: v.mT.contiguous() for k, v in w.items() if v.ndim == 2})
    ),
    "a weight too few": with_weights(lambda w: w.pop(next(iter(w)))),
    "a weight too many": with_weights(lambda w: w.update(extra=torch.ones(1))),
    "a weight by another name": with_weights(lambda w: w.update({"model.x": w.pop(next(iter(w)))})),
    "a huge extra weight": with_weights(lambda w: w.update(extra=torch.ones(5_000_000))),
    "NaN": poisoned(float("nan")),
    "infinity": poisoned(float("inf")),
    "minus infinity": poisoned(float("-inf")),
    # --- vocabularies ---
    "vocabulary with a character less": set_key("vocabulary.characters", "abcdefg"),
    "vocabulary with a character more": set_key("vocabulary.characters", "abcdefghi"),
    "vocabulary out of order": set_key("vocabulary.characters", "hgfedcba"),
    "vocabulary with a character twice": set_key("vocabulary.characters", "aabcdefg"),
    "vocabulary of a million": set_key(
        "vocabulary.characters", "".join(map(chr, range(0x20, 0xD000)))
    ),
    "vocabulary that is a list": set_key("vocabulary", list("abcdefgh")),
    "vocabulary that is a number": set_key("vocabulary.characters", 8),
    "vocabulary that is empty": set_key("vocabulary", {}),
    # --- hyper-parameters ---
    **{
        f"{key} = {value!r:.12}": set_key(f"config.{key}", value)
        for key, values in {
            "model.d_model": (96_000, BIG, -1, 0, "12", None, 12.0, True),
            "model.num_layers": (10_000, BIG, 0, 3),
            "model.num_heads": (5, 12, 10_000),
            "model.d_ff": (1_000_000, BIG, 7),
            "model.d_embedding": (100_000, 1, 5),
            "model.name": ("dot_product", "os.system"),
            "model.lipschitz_target": (1.0, -0.5, 1e308),
            "model": ([], None, {"d_modl": 12}),
            "data.seq_len": (1_000_000, BIG, 11, 0),
            "trainer.precision": ("64-true",),
            "trainer.devices": (BIG,),
        }.items()
        for value in values
    },
    "a context whose masks take gigabytes": lambda path, canary: long_context(path, 20_000),
    "a configuration that is a list": set_key("config", []),
    # --- the rest of model.json ---
    **{f"step {value!r:.12}": set_key("step", value) for value in (-1, BIG, True, "3", 3.0, None)},
    "data_sha256 that is a list": set_key("data_sha256", [1]),
    **{
        f"model.json with {what}": put(MODEL, content)
        for what, content in {
            "a key twice": b'{"step": 1, "step": 2}',
            "NaN": b'{"step": NaN}',
            "infinity": b'{"step": Infinity}',
            "1e999": b'{"step": 1e999}',
            "ten thousand digits": b'{"step": ' + b"9" * 10_000 + b"}",
            "bytes that are no text": b"\xff\xfe{}",
            "a byte order mark": b"\xef\xbb\xbf{}",
            "UTF-16": "{}".encode("utf-16"),
            "nothing": b"",
            "two values": b"{} {}",
            "null": b"null",
        }.items()
    },
    # --- files that are something else ---
    **{f"{name} is a link": link(name) for name in (*FILES, MANIFEST)},
    **{f"{name} is a pipe": pipe(name) for name in (*FILES, MANIFEST)},
    **{f"{name} is a folder": folder_named(name) for name in (*FILES, MANIFEST)},
    **{f"{name} is missing": missing(name) for name in (*FILES, MANIFEST)},
    "a checkpoint that is a link": linked_directory,
    **{
        f"best is {name!r:.40}": best(name)
        for name in ("../../elsewhere", "/etc", "step-00000003/../..", 3, ["x"], "")
    },
    # --- manifests ---
    **{
        f"manifest lists {name}": listed(name)
        for name in ("../outside.json", "/etc/hostname", "sub/../../outside.json", "..", ".")
    },
    "manifest without a file": with_manifest(lambda m: m["files"].pop(STATE) and None),
    "manifest with another file": with_manifest(
        lambda m: m["files"].update({"x": m["files"][STATE]})
    ),
    "manifest with a negative size": with_manifest(lambda m: m["files"][STATE].update(bytes=-1)),
    "manifest with a bool as size": with_manifest(lambda m: m["files"][STATE].update(bytes=True)),
    "manifest with an exabyte": with_manifest(lambda m: m["files"][STATE].update(bytes=1 << 60)),
    "manifest with a short hash": with_manifest(lambda m: m["files"][STATE].update(sha256="00")),
    "manifest with another hash": with_manifest(lambda m: m["files"][STATE].update(sha256=ZERO)),
    "manifest with no hash": with_manifest(lambda m: m["files"][STATE].update(sha256=None)),
    "manifest of version 2": with_manifest(lambda m: m.update(version=2)),
    "manifest of another format": with_manifest(lambda m: m.update(format="pickle")),
    "manifest with more": with_manifest(lambda m: m.update(_class_path="os.system")),
    "manifest of null": with_manifest(lambda m: ["x"]),
    "manifest with files as list": with_manifest(lambda m: m.update(files=list(m["files"]))),
}


def long_context(path: Path, seq_len: int) -> None:
    """Weights that do fit a context of which every pair would take memory."""
    set_key("config.data.seq_len", seq_len)(path, path)

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            if name.endswith("embedding.position"):
                weights[name] = torch.zeros(seq_len, value.shape[1])
            elif name.endswith("position.table"):
                weights[name] = torch.zeros(value.shape[0], seq_len - 1)

    with_weights(change)(path, path)
