# SPDX-License-Identifier: Apache-2.0
"""Read a compiled program (HLO text): cycles, collectives and kernels of one run.

Instructions in a loop count as often as the loop runs; of a conditional only the
slowest branch counts.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{[ \t]*\n(.*?)^\}[ \t]*$", re.M | re.S
)
_NEXT = re.compile(r"\n(?=\s+(?:ROOT )?%?[\w.\-]+ = )")
_INSTRUCTION = re.compile(
    r"\s+(ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][a-z0-9\-]*)\((.*)", re.S
)
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")


class Instruction(NamedTuple):
    """`name = shape op(operands...)...`; text is everything after the op."""

    name: str
    shape: str
    op: str
    text: str
    root: bool = False

    def find(self, pattern: str) -> str | None:
        """Return the first group of a pattern in the text."""
        match = re.search(pattern, self.text)
        return match[1] if match else None

    def callee(self, attribute: str) -> str:
        """Return the name of the computation in an attribute, "" if there is none."""
        return self.find(rf"\b{attribute}=%?([\w.\-]+)") or ""

    @property
    def operands(self) -> list[str]:
        """The names between the op's parentheses."""
        return re.findall(r"%([\w.\-]+(?:#\d+)?)", " ".join(parts(self.text)))


Computation = dict[str, Instruction]  # by name, in the order of the text


class Program(NamedTuple):
    """The computations of a module by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    def called(self, one: Instruction, attribute: str) -> Computation:
        """Return the computation that an instruction's attribute names."""
        return self.computations.get(one.callee(attribute), {})


class Kernel(NamedTuple):
    """A custom kernel: how often it runs, and the stated cost of one run.

    flops and moved (bytes) are None if the program does not state them; shapes: of its
    operands; touched: bytes of operands and results.
    """

    name: str
    times: int
    flops: float | None
    moved: float | None
    shapes: tuple[tuple[int, ...], ...]
    touched: int


def read(text: str) -> Program:
    """Split the text of a module into computations and instructions.

    Intermediate text of the compiler refers to elements of tuples as `%name#2`. These
    become instructions as in the text of a compiled program.
    """
    program = Program({}, "")
    for entry, name, body in _COMPUTATION.findall(text):
        known = program.computations[name] = {}
        if entry:
            program = program._replace(entry=name)
        for lines in _NEXT.split(f"\n{body}"):
            for whole, index in _ELEMENT.findall(lines):
                element = f"{whole}#{index}"
                if whole in known and element not in known:
                    shape = parts(known[whole].shape[1:])[int(index)]
                    rest = f"%{whole}), index={index}"
                    get = Instruction(element, shape, "get-tuple-element", rest)
                    known[element] = get
            if match := _INSTRUCTION.match(lines.replace("\n", " ")):
                root, name, shape, op, rest = match.groups()
                known[name] = Instruction(name, shape.strip(), op, rest, bool(root))
    return program


def trip_count(program: Program, loop: Instruction, inside: str) -> int | None:
    """Return how often a while loop runs, or None if the text does not tell.

    Newer compilers omit known_trip_count. Then the condition compares an element of the
    loop's tuple with a constant, the body adds a constant to that element, and the
    computation `inside`, which contains the loop, has its first value.
    """
    if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition, body = program.called(loop, "condition"), program.called(loop, "body")
    compare = _root(condition)
    if compare is None or "direction=LT" not in compare.text:
        return None
    element, bound = (condition.get(name) for name in compare.operands[:2])
    most, index = _constant(bound), element and element.find(r"index=(\d+)")
    if most is None or index is None:
        return None
    after = _element(body, _root(body), index)
    steps = [_constant(body.get(name)) for name in (after.operands if after else ())]
    around = program.computations[inside]
    given = around.get(loop.operands[0]) if loop.operands else None
    first = _constant(_element(around, given, index)) or 0
    step = next((n for n in steps if n), 1) if after and after.op == "add" else 1
    return max(0, -(-(most - first) // step))


def _root(computation: Computation) -> Instruction | None:
    return next((one for one in computation.values() if one.root), None)


def _element(
    around: Computation, whole: Instruction | None, index: str
) -> Instruction | None:
    """Return the instruction that computes a tuple's element, without copies of it."""
    if whole is None or whole.op != "tuple":
        return None
    one = around.get(whole.operands[int(index)])
    while one is not None and one.op in ("copy", "bitcast"):
        one = around.get(one.operands[0])
    return one


def _constant(one: Instruction | None) -> int | None:
    """Return the value of a constant whole number."""
    if one is None or one.op != "constant":
        return None
    match = re.match(r"(\d+)\)", one.text)
    return int(match[1]) if match else None


def walk(
    program: Program, name: str | None = None, times: int = 1
) -> Iterator[tuple[Instruction, int, str]]:
    """Yield (instruction, how often it runs, its computation) for everything that runs.

    Instructions inside fusions are not included.
    """
    name = program.entry if name is None else name
    for one in program.computations.get(name, {}).values():
        yield one, times, name
        if one.op == "while":
            trips = trip_count(program, one, name)
            trips = 1 if trips is None else trips
            yield from walk(program, one.callee("body"), times * trips)
        elif one.op == "call":
            yield from walk(program, one.callee("to_apply"), times)
        elif one.op == "conditional":
            names = [one.callee(f"{side}_computation") for side in ("true", "false")]
            listed = one.find(r"branch_computations=\{([^}]*)\}") or ""
            names += re.findall(r"[\w.\-]+", listed)
            longest = max(names, key=lambda branch: cycles(program, branch))
            yield from walk(program, longest, times)


def cycles(program: Program, name: str | None = None) -> int:
    """Add up the compiler's estimated cycles."""
    return sum(
        times * int(one.find(r'"estimated_cycles":"(\d+)"') or 0)
        for one, times, _ in walk(program, name)
    )


def unknown_loops(program: Program) -> list[str]:
    """Name the loops that were counted once because their trip count is unknown."""
    return [
        one.name
        for one, _, name in walk(program)
        if one.op == "while" and trip_count(program, one, name) is None
    ]


def collectives(program: Program) -> dict[str, dict[str, int]]:
    """Count collectives per run, and the bytes of their arrays on one device, by kind.

    The bytes are those of the larger side: the result of a gather, the input of a
    scatter. A collective that is fused into several operations counts once.
    """
    count: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    fusions: dict[str, str] = {}  # channel -> the fusion that is counted

    def add(one: Instruction, times: int, inside: str) -> None:
        kind = one.op.removesuffix("-start")
        if kind in COLLECTIVES:
            scatters = kind == "all-reduce" and "all-reduce-scatter" in inside
            kind = "reduce-scatter" if scatters else kind
            count[kind] += times
            given, result = _operand_bytes(program, one, inside), nbytes(one.shape)
            if one.op.endswith("-start") and result > given:
                result -= given  # the shape is the pair of operands and results
            moved[kind] += times * max(given, result)
        elif one.op in ("fusion", "async-start"):
            called = one.callee("calls")
            for inner in program.called(one, "calls").values():
                channel = inner.find(r"channel_id=(\d+)")
                if channel is None or fusions.setdefault(channel, called) == called:
                    add(inner, times, called)

    for one, times, inside in walk(program):
        add(one, times, inside)
    return {k: {"count": count[k], "bytes": moved[k]} for k in sorted(count)}


def _operand_bytes(program: Program, one: Instruction, inside: str) -> int:
    known = program.computations[inside]
    return sum(nbytes(known[name].shape) for name in one.operands if name in known)


def kernels(program: Program) -> list[Kernel]:
    """Find the custom (Pallas) kernels, for which the compiler estimates no cycles."""
    out = []
    for one, times, inside in walk(program):
        if one.op != "custom-call" or '"tpu_custom_call"' not in one.text:
            continue
        flops = one.find(r'"cost_estimate":\{"flops":"(\d+)"')
        moved = one.find(r'"bytes_accessed":"(\d+)"')
        layouts = one.find(r"operand_layout_constraints=\{(.*?)\}, \w+=") or ""
        given = nbytes(layouts) or _operand_bytes(program, one, inside)
        out.append(
            Kernel(
                name=one.name,
                times=times,
                flops=float(flops) if flops else None,
                moved=float(moved) if moved else None,
                shapes=tuple(dims for _, dims in _arrays(layouts)),
                touched=given + nbytes(one.shape),
            )
        )
    return out


def parts(text: str) -> list[str]:
    """Split the text after an opening parenthesis into elements, up to the closing one.

    >>> parts("f32[2]{0:T(8,128)}, (s32[], /*index=1*/u32[])), more")
    ['f32[2]{0:T(8,128)}', '(s32[], /*index=1*/u32[])']
    """
    elements, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            break
        if letter == "," and not depth:
            elements.append("")
        else:
            elements[-1] += letter
    return [one.strip() for one in elements]


def nbytes(shape: str) -> int:
    """Return the bytes of an array or a tuple of arrays, without padding.

    >>> nbytes("(bf16[2,8]{1,0:T(8,128)(2,1)}, f32[])"), nbytes("s4[3]")
    (36, 2)
    """
    total = 0
    for kind, dims in _arrays(shape):
        digits = re.search(r"\d+", kind)
        bits = _BITS.get(kind, int(digits[0]) if digits else 0)
        total += -(-math.prod(dims) * bits // 8)
    return total


def _arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (kind, tuple(int(n) for n in dims.split(",") if n))
        for kind, dims in _ARRAY.findall(shape)
    ]


def summary(text: str) -> dict[str, Any]:
    """Return the known facts about a program as plain values."""
    program = read(text)
    return {
        "cycles": cycles(program),
        "collectives": collectives(program),
        "kernels": [kernel._asdict() for kernel in kernels(program)],
        "unknown_loops": unknown_loops(program),
    }
