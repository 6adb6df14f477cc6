"""The rules of the house: who imports whom, what stays light, how the project speaks, what can be run."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNEL = ("errors", "buckets", "cost", "batching", "lengths", "manifest")
HEAVY = ("torch", "streaming")
MAX_LINES = 450  # about 300 is the aim


def modules(package: str) -> dict[str, Path]:
    """The modules of a package: dotted name -> file."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, only_at_import: bool = False) -> Iterator[str]:
    """The modules that a file names in import statements, as absolute dotted names.

    `only_at_import` leaves out those inside functions and under ``if TYPE_CHECKING:``.
    """

    def deferred(node: ast.AST) -> bool:
        if isinstance(node, ast.If):
            return "TYPE_CHECKING" in ast.unparse(node.test)
        return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = list(path.relative_to(ROOT).parts[:-1])
                base = base[: len(base) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                yield from (f"{module}.{alias.name}" for alias in child.names)
            elif only_at_import and deferred(child):
                continue
            else:
                yield from walk(child)

    return walk(ast.parse(path.read_text(encoding="utf-8")))


def test_the_import_reader_sees_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    package = tmp_path / "pack"
    package.mkdir()
    file = package / "module.py"
    file.write_text(
        "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import h\ndef i():\n    import j\n"
    )
    always = ["a.b", "c.d", "pack.e", "pack.f.g", "typing.TYPE_CHECKING"]
    assert list(imports(file, only_at_import=True)) == always
    assert list(imports(file)) == [*always, "h", "j"]


def test_shardgen_does_not_import_the_loader_below_its_top():
    top = re.compile(r"shardgen\.(cli|report|simulate|explain)")
    wrong = [
        (name, imported)
        for name, path in modules("shardgen").items()
        if not top.match(name)
        for imported in imports(path)
        if imported.split(".")[0] == "loader"
    ]
    assert wrong == []


def test_the_loader_imports_only_the_kernel_of_shardgen():
    # and the optimiser, which is as pure, where a training asks for another number of buckets.
    commands = {"loader.explained"}  # a command's other half, that no training imports
    wrong = [
        (name, imported)
        for name, path in modules("loader").items()
        if name not in commands
        for imported in imports(path)
        if imported.split(".")[0] == "shardgen" and imported.split(".")[1] not in (*KERNEL, "optimize")
    ]
    assert wrong == []


def test_upstream_is_touched_in_few_files_only():
    # The dataset, its storage, and uploads. Private parts of upstream change with its releases.
    allowed = {"loader.dataset", "loader.resident", "loader.source", "loader.stream", "shardgen.remote"}
    users = {
        name
        for package in ("shardgen", "loader")
        for name, path in modules(package).items()
        if any(imported.split(".")[0] == "streaming" for imported in imports(path))
    }
    assert users <= allowed


def test_the_kernel_is_standard_library_and_numpy():
    for module in KERNEL:
        path = ROOT / "shardgen" / f"{module}.py"
        for imported in imports(path, only_at_import=True):
            top = imported.split(".")[0]
            assert top in sys.stdlib_module_names or top in {"numpy", "shardgen"}, (module, imported)
        for imported in imports(path):
            assert imported.split(".")[0] not in HEAVY, (module, imported)


LIGHT = ("loader", "loader.plan", "loader.state", *(f"shardgen.{module}" for module in KERNEL))


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_neither_torch_nor_streaming(module, python):
    code = f"import sys, {module}; print(sorted(set({HEAVY!r} + ('pyarrow',)) & set(sys.modules)))"
    finished = python("-c", code)
    assert (finished.returncode, finished.stdout.strip(), finished.stderr) == (0, "[]", "")


@pytest.mark.parametrize("arguments", [("--help",), ("optimize", "--help")])
def test_help_loads_neither_torch_nor_streaming(arguments, python):
    code = f"""
import atexit, runpy, sys
atexit.register(lambda: print("loaded:", sorted(set({HEAVY!r}) & set(sys.modules))))
sys.argv = ["shardgen", *{arguments!r}]
runpy.run_module("shardgen", run_name="__main__", alter_sys=True)
"""
    finished = python("-c", code)
    assert finished.returncode == 0, finished.stderr
    assert "Usage:" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "loaded: []"


# ---------------------------------------------------------------- the project's files


def tracked() -> list[Path]:
    """Every file of the project, as git knows it (or, outside a checkout, as the folders hold it)."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [
            path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()
        ]
    folders = ("shardgen", "loader", "scripts", "tests")
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


def texts() -> Iterator[tuple[str, int, str]]:
    """(file, line number, line) of every text file of the project but this one."""
    for path in tracked():
        if path == Path(__file__).resolve():
            continue
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), 1):
            yield str(path.relative_to(ROOT)), number, line


FOREIGN = {
    "a path of one machine": re.compile(r"(?<![\w.~$}])/(?:work|home|root|Users|mnt)/\w"),
    "a page that is not part of the project": re.compile(r"\bdesign\.md\b|\bcases\.md\b|\bplan-notes\b"),
    "an issue that nobody outside can read": re.compile(r"\bissue #?\d+\b", re.IGNORECASE),
    "a numbered case": re.compile(r"\b[Cc]ase C\d\d\b|\bC[0-3]\d\b(?!\w)"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_project_speaks_of_itself_alone(kind):
    assert [line for line in texts() if FOREIGN[kind].search(line[2])] == []


def test_installing_names_no_index():
    address = re.compile(r"https?://|--(?:extra-)?index-url|--find-links|\bpip\b.*\s-[if]\s")
    names = {"pyproject.toml", ".ci/run", "scripts/test", "scripts/demo", "scripts/venv.sh"}
    assert [line for line in texts() if line[0] in names and address.search(line[2])] == []


def test_entry_scripts_can_be_run():
    entries = [ROOT / ".ci/run", *(p for p in (ROOT / "scripts").iterdir() if p.is_file() and not p.suffix)]
    assert {"run", "test", "demo"} <= {path.name for path in entries}
    for path in entries:
        assert os.access(path, os.X_OK), f"{path} is not executable"
        assert path.read_bytes().startswith(b"#!/"), f"{path} has no first line that names its interpreter"


@pytest.mark.parametrize("package", ["shardgen", "loader"])
def test_packages_are_typed_and_their_files_short(package):
    assert (ROOT / package / "py.typed").exists()
    # A file that has grown past this does more than one thing.
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules(package).items()
    }
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_the_licence_is_named_by_spdx_in_both_places():
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^Licen[cs]e: .*Apache-2\.0", (ROOT / "README.md").read_text(), re.MULTILINE)
