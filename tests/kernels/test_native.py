"""What is compiled and when, where it is kept, and what there is without a compiler."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from invformer.config.load import load_config
from invformer.errors import ConfigurationError
from invformer.kernels import native
from invformer.kernels.attention import attend_l2, choose
from invformer.kernels.native_attention import NOTHING, _call
from invformer.runs.machine import refuse_missing_requirements
from tests.kernels.test_attention import needs_compiler, position

# Stands in for a compiler: says what the processor can do, hands out a library, counts.
STAND_IN = """#!/bin/sh
for last; do :; done
case "$*" in
    *-dM*) cat "{folder}/processor" ;;
    *) echo >> "{folder}/compiled"; cp "{library}" "$last" ;;
esac
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder for what is compiled, not there yet; nothing found yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native._found.cache_clear()
    yield tmp_path / "cache" / "invformer"
    native._found.cache_clear()


@pytest.fixture
def compiler(tmp_path, kept, monkeypatch) -> Path:
    """The folder of a stand-in for a compiler."""
    folder = tmp_path / "compiler"
    folder.mkdir()
    (folder / "processor").write_text("fast")
    install(folder / "c++", STAND_IN.format(folder=folder, library=torch._C.__file__), monkeypatch)
    return folder


def install(path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compiler to use."""
    path.write_text(program)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def times_compiled(compiler: Path) -> int:
    """How often so far."""
    log = compiler / "compiled"
    return len(log.read_text().splitlines()) if log.exists() else 0


def complaint_of_another_process() -> str | None:
    """What one that starts now would say."""
    native._found.cache_clear()
    return native.complaint()


def test_code_is_compiled_once_for_each_processor(compiler, kept) -> None:
    assert complaint_of_another_process() is None
    assert complaint_of_another_process() is None
    assert times_compiled(compiler) == 1
    assert [path.suffix for path in kept.iterdir()] == [".so"]
    (compiler / "processor").write_text("faster")
    assert complaint_of_another_process() is None
    assert times_compiled(compiler) == len(list(kept.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", [lambda c: b"half of it", lambda c: c[: len(c) // 2], lambda c: c[:-1] + b"?"]
)
def test_damaged_code_is_compiled_again(
    compiler, kept, monkeypatch, damage: Callable[[bytes], bytes]
) -> None:
    assert complaint_of_another_process() is None
    (file,) = kept.iterdir()
    elsewhere = kept.parent.parent / "elsewhere" / "invformer"
    elsewhere.mkdir(parents=True)
    (elsewhere / file.name).write_bytes(damage(file.read_bytes()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere.parent))
    assert complaint_of_another_process() is None
    assert times_compiled(compiler) == 2
    assert (elsewhere / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("make", [lambda folder: folder.mkdir(0o777), Path.touch])
def test_code_that_others_could_have_put_there_is_not_run_nor_is_any_left_in_their_place(
    make: Callable[[Path], None], compiler, kept, tmp_path,
    monkeypatch,
) -> None:  # fmt: skip
    kept.parent.mkdir()
    make(kept)
    kept.chmod(0o777)
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert complaint_of_another_process() is None
    assert complaint_of_another_process() is None
    assert times_compiled(compiler) == 2
    assert not [*kept.glob("*"), *scratch.iterdir()]


def test_a_compiler_that_fails_says_why(tmp_path, kept, monkeypatch) -> None:
    failing = "#!/bin/sh\necho note >&2; echo 'x.cpp:1: error: no such luck' >&2; exit 1\n"
    install(tmp_path / "c++", failing, monkeypatch)
    assert native.complaint() == f"{tmp_path}/c++ failed: x.cpp:1: error: no such luck"


@pytest.mark.parametrize(("limit", "flag"), [("ANSWER_S", "-dM"), ("COMPILATION_S", "-shared")])
def test_a_compiler_that_hangs_is_none(limit: str, flag: str, tmp_path, kept, monkeypatch) -> None:
    monkeypatch.setattr(native, limit, 0.2)
    hanging = f'#!/bin/sh\ncase "$*" in *{flag}*) exec sleep 60 ;; esac\n'
    install(tmp_path / "c++", hanging, monkeypatch)
    assert "timed out after 0.2 seconds" in (native.complaint() or "")


def test_without_a_compiler_attention_is_that_of_other_kernels(kept, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    bias = position("table", 2, 40, torch.float32).logit_bias(40)
    q = torch.randn(1, 2, 40, 8, dtype=torch.float32)
    assert native.complaint() == "no-such-compiler is not on the path"
    assert choose("auto", q, bias, l2=True) == "math"
    torch.testing.assert_close(attend_l2(q, bias), attend_l2(q, bias, "math"))
    with pytest.raises(ValueError, match=r"could not be compiled: no-such-compiler .* 'auto'"):
        attend_l2(q, bias, "native")
    config = load_config(["model.attention_kernel=native", "trainer.accelerator=cpu"])
    with pytest.raises(ConfigurationError, match=r"no native here .no-such-compiler .* pick auto"):
        refuse_missing_requirements(config)


@needs_compiler
def test_too_little_memory_is_an_error_of_its_own() -> None:
    endless = torch.zeros(1, dtype=torch.float32).expand(1, 1, 2**44, 1)
    nothing = ctypes.c_void_p()
    made_of = nothing, nothing, ctypes.c_bool(False)  # bias, temperature, strictly causal
    with pytest.raises(MemoryError, match="not enough memory for attention_forward"):
        _call("forward", endless, *[NOTHING] * 3, *made_of, NOTHING, nothing, l2=True)


def test_the_mark_for_the_compiler_is_the_one_that_torch_sets() -> None:
    marked = torch.compiler.assume_constant_result(lambda: True)
    assert vars(native.is_available).items() >= vars(marked).items() != {}.items()
