# SPDX-License-Identifier: Apache-2.0
"""What a device holds and sends with fsdp on more and more chips, by the TPU compiler.

  python tests/peers/scaling.py [--config=bert.py:base] [--chips=1,4,8,16,64,256]

A Markdown row for each v5e slice, 32 rows of 128 tokens a chip, layers in a loop. No
TPU is needed, and no machine code is waited for: the bytes are those of the compiled
program's inputs, the collectives those in its text (a loop's as often as it runs).
Beside them what theory says: parameters and two moments, 12 bytes each parameter, are
split evenly.
"""

import argparse
import json
import math
import multiprocessing
import re
import tempfile
import time
from pathlib import Path

from bertjax.measuring import topologies

SLICES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 256: "16x16"}
ROWS = 32  # a chip
MB = 1e6


def target_of(name, chips):
    """Return the train step's compiled.Target and its shape."""
    from bertjax.measuring import compiled, table

    config = table.shipped(name)
    config.batch_size = ROWS * chips
    config.mesh.data, config.mesh.fsdp = 1, chips
    config.model.unroll = 1
    topology = f"v5e:{SLICES[chips]}"
    devices = topologies.find_devices(topology)
    made = compiled.Target(config, config.data.vocab_size, topology, devices)
    return made, made.shapes()[0]


def compile_into(name, chips, folder):
    from bertjax.measuring import compiled

    target, shape = target_of(name, chips)
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    found = compiled.compile_lowered(target.lower("train", shape), options)
    Path(folder, "failed.json").write_text(json.dumps(found["fits"]))


def program_of(name, chips):
    """Return the text of the optimized program and the bytes that it needs."""
    from bertjax.measuring import memory

    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(
            target=compile_into, args=(name, chips, folder), daemon=True
        )
        process.start()
        while process.is_alive() and not list(Path(folder).glob(memory.DONE)):
            time.sleep(1)
        # The text may still be being written.
        (file,) = Path(folder).glob(memory.DONE)
        size = -1
        while size < (size := file.stat().st_size) or not size:
            time.sleep(5)
        text = file.read_text()
        (report,) = Path(folder).glob(memory.REPORT)
        needed = memory.total(report.read_text())
        process.kill()
        process.join()
        return text, needed


def trips(program, loop, inside):
    """Return how often a loop runs, in text where tuples' elements are %name#3."""

    def named(part):
        return {i.name: i for i in program.computations[loop.find(part)]}

    condition, body = named(r"condition=%?([\w.\-]+)"), named(r"body=%?([\w.\-]+)")
    compare, root = (
        next(i for i in part.values() if i.root) for part in (condition, body)
    )
    match = re.match(r"%[\w.\-]+#(\d+), %([\w.\-]+)\)", compare.text)
    bound = int(condition[match[2]].text.split(")")[0])
    elements = re.findall(r"%([\w.\-]+)(?:#\d+)?", root.text.split(")")[0])
    one = body[elements[int(match[1])]]
    while one.op in ("copy", "bitcast"):
        one = body[one.operands[0]]
    assert one.op == "add", one
    constants = [body[n].text for n in one.operands if body[n].op == "constant"]
    return -(-bound // int(constants[0].split(")")[0])) if constants else bound


def payload(program, one, inside):
    """Return the bytes of a collective's result."""
    from bertjax.measuring import hlo

    # That of an asynchronous permute is the pair of what is sent and what comes.
    return hlo.nbytes(one.shape) // (1 + one.op.endswith("-start"))


def measure(name, chips):
    """Return what the compiler says of the step on so many chips."""
    import jax

    from bertjax.measuring import compiled, hlo

    target, shape = target_of(name, chips)
    text, needed = program_of(name, chips)
    program = hlo.read(text)
    hlo.trip_count, hlo._payload = trips, payload
    given = [i for i in program.computations[program.entry] if i.op == "parameter"]
    arrays = compiled.batch_arrays(target.config, target.objective, shape).values()
    batch = sum(4 * math.prod(dims) for dims, _ in arrays) // chips
    number = sum(x.size for x in jax.tree.leaves(target.update.shapes.params))
    return {
        "chips": chips,
        "parameters": number,
        "state": sum(hlo.nbytes(i.shape) for i in given) - batch,
        "needed": needed,
        "collectives": hlo.collectives(program),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="bert.py:base")
    parser.add_argument("--chips", default="1,4,8,16,64,256")
    args = parser.parse_args()
    topologies.prepare()
    for n in map(int, args.chips.split(",")):
        found = measure(args.config, n)
        state = found["state"] / MB, 12 * found["parameters"] / n / MB
        said = [str(n), *(f"{x:,.2f}" for x in state), f"{found['needed'] / 2**30:.2f}"]
        kinds = sorted(found["collectives"].items())
        said.append(", ".join(f"{x['count']} {kind}" for kind, x in kinds))
        said.append(f"{sum(x['bytes'] for _, x in kinds) / MB:,.0f}")
        print(f"| {' | '.join(said)} |", flush=True)


if __name__ == "__main__":
    main()
