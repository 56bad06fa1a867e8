# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: meaningful names, short functions, no circular imports."""

import ast
import functools
import graphlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bertjax"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 80  # lines of a function, its docstring included

# Words that do not say what a value is; use a plain noun instead.
VAGUE = {"told", "said", "tell", "lived", "held", "made", "there"}
VAGUE |= {"course", "Course", "NEVER"}

# File stems that occur more than once -> (files relative to bertjax/, the reason).
A_TYPE_HAS_AN_OBJECTIVE = "a task type and the objective that it trains, one name"
HALVES = "the host half and the device half of an objective"
SHARED_STEMS = {
    "mlm": (
        {"data/features/mlm", "objectives/mlm", "scoring/mlm"},
        f"{HALVES}; `evaluate --what=mlm` finds the scorer by the objective's name",
    ),
    "choose": (
        {"tasks/types/choose", "objectives/choose", "data/masking/choose"},
        f"{A_TYPE_HAS_AN_OBJECTIVE}; a masker chooses, then corrupts",
    ),
    "classify": (
        {"tasks/types/classify", "objectives/classify"},
        A_TYPE_HAS_AN_OBJECTIVE,
    ),
    "complete": (
        {"tasks/types/complete", "objectives/complete"},
        A_TYPE_HAS_AN_OBJECTIVE,
    ),
    "edges": ({"tasks/types/edges", "objectives/edges"}, A_TYPE_HAS_AN_OBJECTIVE),
    "mlmlm": ({"tasks/types/mlmlm", "objectives/mlmlm"}, A_TYPE_HAS_AN_OBJECTIVE),
    "regions": (
        {"tasks/types/regions", "objectives/regions", "data/features/regions"},
        f"{A_TYPE_HAS_AN_OBJECTIVE}; {HALVES}",
    ),
    "regress": ({"tasks/types/regress", "objectives/regress"}, A_TYPE_HAS_AN_OBJECTIVE),
    "retrieve": (
        {"tasks/types/retrieve", "objectives/retrieve"},
        A_TYPE_HAS_AN_OBJECTIVE,
    ),
    "rag": ({"tasks/types/rag", "objectives/rag"}, A_TYPE_HAS_AN_OBJECTIVE),
    "read": ({"tasks/types/read", "objectives/read"}, A_TYPE_HAS_AN_OBJECTIVE),
    "rerank": ({"tasks/types/rerank", "objectives/rerank"}, A_TYPE_HAS_AN_OBJECTIVE),
    "splade": ({"tasks/types/splade", "objectives/splade"}, A_TYPE_HAS_AN_OBJECTIVE),
    "colbert": ({"tasks/types/colbert", "objectives/colbert"}, A_TYPE_HAS_AN_OBJECTIVE),
    "seq2seq": ({"tasks/types/seq2seq", "objectives/seq2seq"}, A_TYPE_HAS_AN_OBJECTIVE),
    "span": ({"tasks/types/span", "objectives/span"}, A_TYPE_HAS_AN_OBJECTIVE),
    "tag": ({"tasks/types/tag", "objectives/tag"}, A_TYPE_HAS_AN_OBJECTIVE),
    "answers": (
        {"generation/answers", "scoring/answers"},
        "texts for rows; `evaluate --what=answers` finds its scorer by this name",
    ),
    "cache": (
        {"models/cache", "data/token_store/cache"},
        "of keys and values, as Flax and Hugging Face say; and of files",
    ),
    "electra": (
        {"interop/families/electra", "objectives/electra"},
        "a family of models is found by the model_type of its config.json",
    ),
    "batches": (
        {"data/batches", "assembly/batches"},
        "assembly makes the arguments of data's batches from a config",
    ),
    "metrics": (
        {"objectives/metrics", "tasks/metrics"},
        "sums on the device in a training step; scores of whole sets in numpy",
    ),
}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of everything that code binds: variables, attributes, ..."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, node.lineno
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name, node.lineno
            case ast.alias(name=name, asname=asname):
                yield asname or name, node.lineno


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported_files(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of bertjax that a file imports, also inside functions.

    In bertjax/__init__.py only the top-level imports count: its functions
    (`bertjax.load`) import the rooms, which all import its errors.
    """
    tree = parse(path)
    nodes = tree.body if path == PACKAGE / "__init__.py" else ast.walk(tree)
    imported = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in modules else node.module for name in names}
    return imported & modules - {module_name(path)}


def test_the_walk_sees_every_way_to_bind_a_name():
    code = """
import a as b, c
def d(e, *f, g=1, **h):
    i = [j for j in e]
    self.k: int = 2
    for l, (m, *n) in e: o += 1
    with e as p: (q := 3)
    try: lambda r: r
    except E as s: pass
    match e:
        case [t, *u]: pass
        case {"x": v, **w}: pass
class Y: z: int
"""
    names = [name for name, _ in defined_names(ast.parse(code))]
    assert sorted(names, key=str.lower) == list("abcdefghijklmnopqrstuvwYz")[1:]


def test_names_say_what_a_value_is():
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for name, line in defined_names(parse(path))
        if name.strip("_") in VAGUE
    ]
    assert not vague, "\n".join(vague)


def test_functions_are_short():
    lengths = {
        f"{path.relative_to(ROOT)}:{f.lineno}: {f.name}": f.end_lineno - f.lineno + 1
        for path in FILES
        for f in functions(parse(path))
    }
    assert len(lengths) > len(FILES)
    assert not {name: n for name, n in lengths.items() if n > LONGEST}


def test_a_file_stem_occurs_once_or_is_explained():
    stems = defaultdict(set)
    for path in FILES:
        stems[path.stem].add(path.relative_to(PACKAGE).with_suffix("").as_posix())
    del stems["__init__"]
    shared = {stem: files for stem, files in stems.items() if len(files) > 1}
    explained = {stem: files for stem, (files, _) in SHARED_STEMS.items()}
    for stem, files in shared.items():
        if files == {f"data/features/{stem}", f"objectives/{stem}"}:
            explained[stem] = files  # the two halves of an objective
    assert shared == explained


def test_files_do_not_import_each_other_in_a_circle():
    modules = {module_name(path) for path in FILES}
    graph = {module_name(path): imported_files(path, modules) for path in FILES}
    assert sum(map(len, graph.values())) > len(FILES)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_a_test_file_has_a_name_of_its_own():
    """pytest collects only one of two test files of the same name in any folders."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_slow_cases_are_there():
    text = (ROOT / "tests/slow.txt").read_text(encoding="utf-8")
    for case in text.splitlines():
        path, function = case.split("[")[0].split("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / path).read_text(), case
