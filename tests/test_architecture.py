"""Hold the import arrows: who may import whom, who owns a library, what stays free of torch.

The modules are read, not imported. Every rule is a function from a tree of modules to the
sentences that say what breaks it, so that each can be shown a tree that does.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parent.parent

CORE = "bertfused"
MODES = ("docnmt", "backtranslation", "unsup", "bertgen")

# Bottom up: a module of the core imports modules of its own layer or of lower ones.
LAYERS = (
    {"errors"},
    {"text", "config", "schedule", "progress"},
    {"vocab"},
    {"subwords", "store", "metrics", "noise", "packed", "linguistics"},
    {"batch", "data", "attention", "wordpieces"},
    {"pretrained"},
    {"features"},
    {"layers"},
    {"model"},
    {"search", "loss", "checkpoint", "prepare"},
    {"translate", "training"},
    {"scoring", "run"},
    {"fit", "interop", "evaluation"},
    {"console", "options", "commands"},
    {"cli", "__main__", "__init__"},
)

# Only the owners import the library, so that replacing one touches few files, mostly one.
OWNERS = {
    "ctranslate2": ("bertfused.interop.ctranslate2",),
    "sacrebleu": ("bertfused.metrics",),
    "sentencepiece": ("bertfused.subwords",),
    "spacy": ("bertfused.linguistics",),
    "subword_nmt": ("bertfused.subwords",),
    "transformers": ("bertfused.pretrained", "unsup.xlm"),  # the second makes encoders
}

# Modules whose import, with all it pulls in, must not load a heavy library: the text side of the
# core, and every command line (for a quick --help).
LIGHT = {f"{CORE}.{name}" for name in ("errors", "text", "vocab", "subwords", "config", "metrics")}
LIGHT |= {f"{package}.cli" for package in (CORE, *MODES)}
HEAVY = {"torch", "transformers", "spacy"}


@dataclass(frozen=True)
class Import:
    """One imported dotted name, a module or something in one."""

    name: str
    line: int
    at_import_time: bool  # False inside functions and under TYPE_CHECKING


@dataclass(frozen=True)
class Module:
    """One source file of the packages."""

    name: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    def imports(self) -> list[Import]:
        return list(_imports(self.tree, at_import_time=True))


Tree = dict[str, Module]


def _imports(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_import_time)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, at_import_time)
        else:
            delayed = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            yield from _imports(child, at_import_time and not delayed)


def read_tree(root: Path) -> Tree:
    """Read the packages that exist under the root."""
    tree = {}
    for package in (CORE, *MODES):
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            tree[name] = Module(name, ast.parse(path.read_text("utf-8"), str(path)))
    return tree


def target_of(name: str, tree: Tree) -> str | None:
    """Return the module of the tree that an imported dotted name stands for or lies in."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in tree:
            return prefix
        if f"{prefix}.__init__" in tree:
            return f"{prefix}.__init__"
    return None


def is_cli(module: Module) -> bool:
    return module.name.rpartition(".")[2] in {"cli", "__main__", "console", "options", "commands"}


def layer_of(name: str) -> int | None:
    """Return the height of a dotted name in the core; None if its module has no layer."""
    part = name.split(".")[1] if "." in name else "__init__"
    return next((rank for rank, layer in enumerate(LAYERS) if part in layer), None)


def unplaced_modules(tree: Tree) -> list[str]:
    return [
        f"{name}: has no layer; add it to LAYERS"
        for name, module in tree.items()
        if module.package == CORE and layer_of(name) is None
    ]


def upward_arrows(tree: Tree) -> list[str]:
    """Find imports from a lower layer of the core to a higher one, and from the core to a mode."""
    found = []
    for name, module in tree.items():
        layer = layer_of(name)
        if module.package != CORE or layer is None:
            continue
        for item in module.imports():
            package = item.name.partition(".")[0]
            where = f"{name}:{item.line}: imports {item.name}"
            if package in MODES:
                found.append(f"{where}, a mode")
            elif package == CORE and item.name != f"{CORE}.__version__":
                target = layer_of(item.name)
                # A name with no layer is one that the package itself offers, at the top.
                if (len(LAYERS) - 1 if target is None else target) > layer:
                    found.append(f"{where}, which is above it")
    return found


def arrows_between_modes(tree: Tree) -> list[str]:
    return [
        f"{name}:{item.line}: imports {item.name}, another mode"
        for name, module in tree.items()
        if module.package in MODES
        for item in module.imports()
        if item.name.partition(".")[0] in set(MODES) - {module.package}
    ]


def interop_elsewhere(tree: Tree) -> list[str]:
    """Find modules that know other formats but are no command line, and choose no engine."""
    return [
        f"{name}:{item.line}: imports {item.name}, which only command lines and engines may"
        for name, module in tree.items()
        if not is_cli(module)
        and not name.endswith(".engines")
        and not name.startswith(f"{CORE}.interop")
        for item in module.imports()
        if (item.name + ".").startswith(f"{CORE}.interop.")
    ]


def foreign_libraries(tree: Tree) -> list[str]:
    """Find imports of a library outside the module that owns it, and of typer outside the CLIs."""
    found = []
    for name, module in tree.items():
        for item in module.imports():
            library = item.name.partition(".")[0]
            owners = OWNERS.get(library, (name,))
            if name not in owners:
                found.append(f"{name}:{item.line}: imports {library}, of {' and '.join(owners)}")
            if library == "typer" and not is_cli(module):
                found.append(f"{name}:{item.line}: imports typer, but is no command line")
    return found


def heavy_imports(tree: Tree) -> list[str]:
    """Find light modules that load a heavy library when they are imported."""
    found = []
    for name in sorted(LIGHT & tree.keys()):
        reached, waiting = {name}, [name]
        while waiting:
            current = waiting.pop()
            package = f"{current.partition('.')[0]}.__init__"
            names = [item.name for item in tree[current].imports() if item.at_import_time]
            found += [
                f"{name}: loads {heavy} through {current}"
                for heavy in sorted(HEAVY & {imported.partition(".")[0] for imported in names})
            ]
            targets = {target_of(imported, tree) for imported in names}
            targets |= {package} & tree.keys()
            for target in targets - reached - {None}:
                reached.add(target)
                waiting.append(target)
    return found


def cycles(tree: Tree) -> list[str]:
    """Find modules that import each other in a circle, however late."""
    graph = {
        name: {target_of(item.name, tree) for item in module.imports()} - {None, name}
        for name, module in tree.items()
        if not name.endswith("__init__")
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def missing_docstrings(tree: Tree) -> list[str]:
    found = []
    for name, module in tree.items():
        if name.rpartition(".")[2] != "__main__" and ast.get_docstring(module.tree) is None:
            found.append(f"{name}: has no docstring")
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                found.append(f"{name}:{node.lineno}: {node.name} has no docstring")
    return found


RULES: tuple[Callable[[Tree], list[str]], ...] = (
    unplaced_modules,
    upward_arrows,
    arrows_between_modes,
    interop_elsewhere,
    foreign_libraries,
    heavy_imports,
    cycles,
    missing_docstrings,
)


@pytest.mark.parametrize("rule", RULES)
def test_packages_keep_the_rule(rule: Callable[[Tree], list[str]]) -> None:
    tree = read_tree(ROOT)
    assert f"{CORE}.errors" in tree
    assert not rule(tree), "\n".join(rule(tree))


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (unplaced_modules, {"bertfused.mystery": ""}),
        (upward_arrows, {"bertfused.text": "from bertfused.cli import main"}),
        (upward_arrows, {"bertfused.layers": "from bertfused import model"}),
        (upward_arrows, {"bertfused.loss": "def f():\n    import docnmt.config"}),
        (upward_arrows, {"bertfused.loss": "from bertfused import Translator"}),
        (arrows_between_modes, {"docnmt.config": "from bertgen.config import Recipe"}),
        (interop_elsewhere, {"bertfused.run": "from bertfused.interop.fairseq import load"}),
        (interop_elsewhere, {"docnmt.train": "from bertfused import interop"}),
        (foreign_libraries, {"bertfused.model": "from transformers import BertModel"}),
        (foreign_libraries, {"docnmt.evaluate": "import sacrebleu.metrics"}),
        (foreign_libraries, {"bertfused.run": "import typer"}),
        (heavy_imports, {"bertfused.text": "import torch.nn"}),
        (
            heavy_imports,
            {"docnmt.cli": "import bertfused.run", "bertfused.run": "from torch import nn"},
        ),
        (
            heavy_imports,
            {"bertfused.text": "", "bertfused.__init__": "try:\n    import torch\nfinally: pass"},
        ),
        (
            cycles,
            {
                "bertfused.run": "from bertfused.translate import f",
                "bertfused.translate": "def f():\n    from bertfused import run",
            },
        ),
        (missing_docstrings, {"bertfused.text": '"""Doc."""\ndef read(): ...'}),
        (missing_docstrings, {"bertfused.text": ""}),
    ],
)
def test_rule_finds_what_breaks_it(
    rule: Callable[[Tree], list[str]], sources: dict[str, str]
) -> None:
    tree = {name: Module(name, ast.parse(source)) for name, source in sources.items()}
    assert len(rule(tree)) == 1


def test_rules_accept_arrows_that_point_down() -> None:
    sources = {
        "bertfused.__init__": '"""Doc."""\n__version__ = "1"',
        "bertfused.text": '"""Doc."""',
        "bertfused.model": '"""Doc."""\nimport torch',
        "bertfused.run": '"""Doc."""\nfrom bertfused import __version__, text',
        "bertfused.cli": dedent('''
            """Doc."""
            from typing import TYPE_CHECKING
            import typer
            from bertfused import text
            if TYPE_CHECKING:
                from bertfused import model
            def main():
                """Doc."""
                from bertfused import model
            def _helper(): ...
        '''),
        "docnmt.cli": '"""Doc."""\nfrom bertfused.cli import main',
    }
    tree = {name: Module(name, ast.parse(source)) for name, source in sources.items()}
    assert [rule(tree) for rule in RULES] == [[]] * len(RULES)
