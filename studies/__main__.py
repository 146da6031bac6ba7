"""``python -m studies`` lists the studies."""

import ast
import difflib
import sys
from pathlib import Path

from invformer.processes.console import outlive_console


def main(argv: list[str]) -> int:
    """Print one line per study; anything else on the command line is a mistake."""
    outlive_console()
    studies = find_studies(Path(__file__).parent)
    words = [word for word in argv if word not in ("-h", "--help")]
    if words:
        near = difflib.get_close_matches(words[0], studies, n=1)
        hint = f"python -m studies.{near[0] if near else 'NAME'} key=value ..."
        print(f"error: {words[0]!r} is not an argument: run {hint}", file=sys.stderr)
        return 2
    print("usage: python -m studies.NAME [key=value ...] [--help]\n")
    width = max(map(len, studies))
    for name, line in studies.items():
        print(f"  {name:<{width}}  {line}")
    return 0


def find_studies(folder: Path) -> dict[str, str]:
    """Name and first docstring line of every module with options, read without importing any."""
    found = {}
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        if "Options" in names:
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
