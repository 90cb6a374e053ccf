"""What one function hashes or signs under a label, no other does: docs/protocol.md, "Signed statements"."""

import ast
import os
from collections import defaultdict
from functools import cache
from pathlib import Path

import secure_fvi

PACKAGE = Path(secure_fvi.__file__).parent


@cache
def package() -> dict[str, ast.Module]:
    files = (Path(folder) / name for folder, _, names in os.walk(PACKAGE, followlinks=True) for name in names)
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in files if path.suffix == ".py"}


@cache
def constants(tree: ast.Module) -> list[tuple[str, bytes]]:
    """Name and value of each name that a module gives to bytes."""
    found = []
    for node in (n for n in tree.body if isinstance(n, ast.Assign)):
        name, value = node.targets[0], node.value
        both = (name.elts, value.elts) if isinstance(name, ast.Tuple) and isinstance(value, ast.Tuple) else None
        for at, given in zip(*(both or ([name], [value])), strict=True):
            if isinstance(at, ast.Name) and isinstance(given, ast.Constant) and isinstance(given.value, bytes):
                found.append((at.id, given.value))
    return found


def value_of(modules: dict[str, ast.Module], module: str, label: ast.expr) -> set[bytes]:
    """What `label` stands for in a module; of a name that it imports, what it is wherever it is set."""
    if isinstance(label, ast.Constant) and isinstance(label.value, bytes):
        return {label.value}
    if not isinstance(label, ast.Name):
        return set()
    found = [(where, value) for where, tree in modules.items() for name, value in constants(tree) if name == label.id]
    return {value for where, value in found if where == module} or {value for _, value in found}


@cache
def calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Each call, and the function around it."""
    found, left = [], [("", child) for child in ast.iter_child_nodes(tree)]
    while left:
        inside, node = left.pop()
        found += [(inside, node)] if isinstance(node, ast.Call) else []
        inside = node.name if isinstance(node, ast.FunctionDef) else inside
        left += [(inside, child) for child in ast.iter_child_nodes(node)]
    return found


def hashed(modules: dict[str, ast.Module]) -> dict[bytes, set[str]]:
    """By label of H, the functions that hash under it."""
    found = defaultdict[bytes, set[str]](set)
    for module, tree in modules.items():
        for function, call in calls(tree):
            if function and call.args and isinstance(call.func, ast.Name) and call.func.id == "digest":
                for label in value_of(modules, module, call.args[0]):
                    found[label].add(f"{module}: {function}")
    return found


def signed(modules: dict[str, ast.Module]) -> list[tuple[str, ast.expr]]:
    """What identities sign at once, beyond 32 bytes that `hashed` made: sums whose first term is a label."""
    return [
        (module, call.args[0].left)
        for module, tree in modules.items()
        for _, call in calls(tree)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "sign"
        and len(call.args) == 1 and isinstance(call.args[0], ast.BinOp)
    ]  # fmt: skip


def test_each_label_of_a_hash_is_one_functions() -> None:
    modules = package()
    found = hashed(modules)
    assert {b"key-advert", b"contribution", b"survivors", b"batch-signature", b"unheld", b"deposit-signature"} < set(
        found
    )
    assert {b"matching-held", b"holder-advert", b"decrypted"} < set(found)
    # One statement, written where it is signed and where it is checked.
    assert {label for label, where in found.items() if len(where) > 1} == {b"holder-advert"}
    # The control: a second function that signs survivors as contributions.
    other = "def named(key):\n    return key.sign(digest(b'contribution', b''))"
    assert len(hashed({**modules, "other.py": ast.parse(other)})[b"contribution"]) == 2


def test_what_else_identities_sign_is_told_apart_by_its_beginning() -> None:
    def told_apart(modules: dict[str, ast.Module]) -> bool:
        labels = {value for module, label in signed(modules) for value in value_of(modules, module, label)}
        assert len(labels) >= 7
        return all(
            label.startswith(b"secure-fvi/") and sum(other.startswith(label) for other in labels) == 1
            for label in labels
        )

    assert told_apart(package())
    for other in (b"secure-fvi/", b"", b"contribution"):
        assert not told_apart({**package(), "other.py": ast.parse(f"key.sign({other!r} + data)")})
