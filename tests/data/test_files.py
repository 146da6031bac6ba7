"""What may be read of a path: all that somebody typed, little on a checkpoint's word."""

import os
import threading
from pathlib import Path

import pytest

from invformer.config.schema import SavedPath
from invformer.data import files
from invformer.data.files import files_below
from invformer.errors import DataError
from tests.data.texts import corpus_at, whole, write

UNTYPED = "it was the checkpoint that named it; name the text yourself with data.path=PATH"


def refusal(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        corpus_at(path)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_device_is_nobodys_text_and_what_a_checkpoint_names_may_be_gone(tmp_path) -> None:
    (tmp_path / "text.txt").symlink_to("/dev/zero")
    for path in ("/dev/zero", "/dev/null", tmp_path / "text.txt", tmp_path):
        assert "not a regular file; give data.path a plain file, a folder or a" in refusal(path)
    assert refusal(SavedPath("/dev/zero")) == f"/dev/zero: not a regular file, and {UNTYPED}"
    assert refusal(SavedPath("/no/text")) == f"/no/text: no such file or folder, and {UNTYPED}"


@pytest.mark.parametrize("path", ["/proc/kmsg", "/proc/self/maps"])
def test_files_of_the_kernel_are_no_text_that_a_checkpoint_may_name(path: str) -> None:
    if not Path(path).exists():
        pytest.skip("this system has no such files")
    assert "has no train text" in refusal(SavedPath(path))


def test_a_file_of_holes_is_refused_at_its_first_megabyte(tmp_path) -> None:
    write(tmp_path / "text.txt", "")
    os.truncate(tmp_path / "text.txt", 1 << 40)
    assert "a megabyte of zero bytes is no text" in refusal(tmp_path / "text.txt")


def test_a_pipe_is_read_where_it_was_typed_and_not_waited_for_elsewhere(tmp_path) -> None:
    path = tmp_path / "text.txt"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=["from a pipe"])
    writer.start()
    assert whole(corpus_at(path)) == "from a pipe"
    writer.join()
    for other in (tmp_path, SavedPath(path), SavedPath(tmp_path)):
        assert "not a regular file" in refusal(other)


def test_the_texts_that_a_checkpoint_names_are_bounded_together(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 25)
    (tmp_path / "link").symlink_to(write(tmp_path / "a.txt"))
    assert whole(corpus_at(SavedPath(tmp_path / "link"))) == "some text "
    write(tmp_path / "b.txt")
    corpus_at(SavedPath(tmp_path))
    write(tmp_path / "c.txt")
    assert refusal(SavedPath(tmp_path)) == (
        f"{tmp_path / 'c.txt'}: more than 25 bytes of text, and {UNTYPED}"
    )
    corpus_at(tmp_path)


def test_a_folder_gives_its_texts_in_any_case_and_nothing_hidden(tmp_path) -> None:
    wanted = ["B.TXT", "a/b.txt", "a/b/c.Txt", "a.txt", "d.txt/e.txt", "z.txt"]
    hidden = [".git/a.txt", ".hidden.txt", "a/._b.txt", ".txt", "d.txt/.cache/f.txt"]
    for name in [*wanted, *hidden, "notes.md", "a/x.txt.gz"]:
        write(tmp_path / name)
    found = [f.relative_to(tmp_path).as_posix() for f in files_below(tmp_path, ".txt")]
    assert found == ["B.TXT", "a/b/c.Txt", "a/b.txt", "a.txt", "d.txt/e.txt", "z.txt"]
    write(tmp_path / ".texts" / "a.txt")
    assert len(files_below(tmp_path / ".texts", ".txt")) == 1
