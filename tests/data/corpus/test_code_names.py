# SPDX-License-Identifier: Apache-2.0
"""Lines of code, and the declared types of names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.data.corpus import code_names
from bertjax.data.corpus.code_names import CLASS, MARK, UNKNOWN, Code

pytest.importorskip("tree_sitter")
pytest.importorskip("tree_sitter_java")
pytest.importorskip("tree_sitter_typescript")


def named(text, language="java"):
    """Return each name of some code with its type, in order."""
    code = Code(text, language)
    return [
        (line[first:last], value)
        for line, names in zip(code.lines, code.names, strict=True)
        for first, last, value in names
    ]


def types_of(name, text, language="java"):
    return [value for own, value in named(text, language) if own == name]


JAVA = """
/* A licence. */
package a.b;
import java.util.List;
@Deprecated
class Box<T> extends Base {   // a comment
  private final List<String> names = new ArrayList<>();
  static int size, depth[];
  Box other;
  int width() { return size; }
  /** Says. */
  String name(int i, String... rest) {
    var inner = new Box<T>();
    for (Item item : items) { String size = item.text; print(size); }
    try { go(); } catch (IOException | Error e) { throw e; }
    return this.names.get(i) + other.width() + other.size + inner.depth + size
        + java.util.Map.of();
  }
}
"""


def test_types_of_java_by_scope():
    assert types_of("names", JAVA) == ["List", "List"]
    # A field, a variable that shadows it in a loop, another class's field, the field.
    assert types_of("size", JAVA) == ["int", "int", "String", "String", "int", "int"]
    assert types_of("depth", JAVA) == ["int[]", "int[]"]
    assert types_of("width", JAVA) == ["int", "int"]  # other.width()
    assert types_of("rest", JAVA) == ["String[]"]
    assert types_of("inner", JAVA) == ["Box", "Box"]
    assert types_of("item", JAVA) == ["Item", "Item"]
    assert types_of("e", JAVA) == ["IOException|Error"] * 2
    assert types_of("i", JAVA) == ["int", "int"]
    assert types_of("other", JAVA) == ["Box"] * 3
    assert types_of("name", JAVA) == ["String"]
    assert set(types_of("Box", JAVA)) == {CLASS} == set(types_of("List", JAVA))
    assert types_of("Deprecated", JAVA) == [MARK]
    # Names that the file does not declare, and members of unknown types.
    for name in ("print", "text", "get", "Map", "go", "items"):
        assert set(types_of(name, JAVA)) == {UNKNOWN}, name


def test_methods_and_fields_are_apart_in_java():
    text = "class A { int size; String size() { size(); return size; } }"
    assert types_of("size", text) == ["int", "String", "String", "int"]


def test_a_local_is_known_from_its_declaration_to_the_end_of_its_block():
    text = "class A { void f() { { use(x); int x = 1; use(x); } use(x); } }"
    assert types_of("x", text) == [UNKNOWN, "int", "int", UNKNOWN]


TYPESCRIPT = """
import { Repo } from "./repo"
@Entity()
export class Post {
    // text
    title: string
    tags: Array<Tag> = []
    constructor(private repo: Repo<Post>, limit?: number) {}
    find(id: number): Promise<Post | undefined> { return this.repo.get(id, this.title) }
}
interface Shape { area(): number; edge?: string }
enum Colour { Red, Green = 2 }
const post = new Post(), text = "a", late = load()
function area(shape: Shape): number { return shape.area() * post.find(1) }
for (const one of tags) { area(one) }
const pick = (x: (a: number) => void) => x(text)
const red = Colour.Red
"""


def test_types_of_typescript():
    def of(name):
        return types_of(name, TYPESCRIPT, "typescript")

    assert of("title") == ["string", "string"]
    assert of("tags") == ["Array", UNKNOWN]  # members need `this`
    assert of("repo") == ["Repo", "Repo"]
    assert of("limit") == ["number"]
    assert of("find") == ["Promise", "Promise"]
    assert of("edge") == ["string"]
    # A member, a function, a member of a parameter's type, the function again.
    assert of("area") == ["number"] * 4
    assert of("post") == ["Post", "Post"] and of("text") == ["string", "string"]
    assert of("late") == [UNKNOWN] and of("one") == [UNKNOWN] * 2
    assert of("Red") == ["Colour", "Colour"] and of("Colour") == [CLASS] * 2
    assert of("x") == ["(a:number)=>void"] * 2
    assert of("Entity") == [MARK] and of("Post")[0] == CLASS
    tsx = "const a: string = <p>{a}</p>"
    assert types_of("a", tsx, "tsx") == ["string", "string"]
    assert Code(tsx, "typescript").broken and not Code(tsx, "tsx").broken


def test_parameters_of_types_end_with_them():
    text = 'const name = "a"\ntype F = (name: number) => void\nfoo(name)\n'
    assert types_of("name", text, "typescript") == ["string", "number", "string"]
    text = "class A { record P(int x) { } String x; String y = x; }"
    assert types_of("x", text) == ["int", "String", "String"]


def test_brackets_behind_a_name_count_each():
    text = "class A { int a[][]; void f(int... b) { } int[][] c; }"
    kinds = [types_of(name, text) for name in "abc"]
    assert kinds == [["int[][]"], ["int[]"], ["int[][]"]]


def test_lines_are_without_comments_and_what_is_indented():
    text = "  int  a; // one\n\n/* two\n three */ int b /* x */ = 'ü';\n\t\n"
    code = Code(text.replace("\t", " "), "java")
    assert code.lines == ["int a;", "int b = 'ü';"]
    assert code.names == [((4, 5, "int"),), ((4, 5, "int"),)]


def test_ranges_are_of_characters():
    text = 'String s = "äöü — 𝄞"; int größe = 1; use(größe);'
    assert named(text) == [
        ("String", CLASS), ("s", "String"), ("größe", "int"), ("use", UNKNOWN),
        ("größe", "int"),
    ]  # fmt: skip


def test_what_is_broken_is_read_as_far_as_it_is():
    code = Code("class A { int a = ; } }}} ((", "java")
    assert code.broken and code.lines
    assert not Code("class A { int a = 1; }", "java").broken
    assert Code("", "java").lines == [] == Code("// x", "java").lines


def test_very_long_types_are_none():
    long = "{ a: " + "string | " * 20 + "number }"
    assert types_of("x", f"let x: {long} = 1", "typescript") == [UNKNOWN]


PIECES = (
    "int a b Box new = ; { } ( ) . this // /*x*/ \n \n\n for class void return <> é @"
)
pieces = st.lists(st.sampled_from([*PIECES.split(" "), "  "]), max_size=40)


@given(pieces, st.sampled_from(["java", "typescript", "tsx"]))
def test_any_text_gives_ranges_in_order_within_its_lines(words, language):
    code = Code(" ".join(words), language)
    assert len(code.lines) == len(code.names)
    for line, names in zip(code.lines, code.names, strict=True):
        assert line == line.strip() and line and "\n" not in line
        assert "  " not in line
        end = 0
        for first, last, value in names:
            assert end <= first < last <= len(line) and value
            assert line[first:last].strip("@#") == line[first:last].strip()
            end = last


def test_without_the_parser_the_extra_is_named(monkeypatch):
    def missing(name, extra, place):
        raise code_names.registry.UserError(f"{place}: {name} {extra}")

    code_names._open.cache_clear()
    monkeypatch.setattr(code_names.registry, "import_extra", missing)
    with pytest.raises(code_names.registry.UserError, match="tree_sitter code"):
        Code("int a;", "java")
    code_names._open.cache_clear()
