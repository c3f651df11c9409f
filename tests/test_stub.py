"""headrace/_core.pyi, which type checkers read, names what the built module has. Made by `make stub`."""

import ast
from pathlib import Path

from headrace import _core


def names_in_stub() -> set[str]:
    stub = Path(__file__).parent.parent / "headrace" / "_core.pyi"
    names = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return names


def test_stub_names_everything_public():
    built = set()
    for name, value in vars(_core).items():
        if name.startswith("_") or name == "kernels":
            continue
        built.add(name)
        if isinstance(value, type):
            built |= {f"{name}.{m}" for m in vars(value) if not m.startswith("_")}
    assert built - names_in_stub() == set(), "run: make stub"
