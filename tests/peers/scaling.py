# SPDX-License-Identifier: Apache-2.0
"""Memory and communication per chip with fsdp on 1 to 256 chips, by the TPU compiler.

  python tests/peers/scaling.py [--config=bert.py:base] [--chips=1,4,8,16,64,256]

Prints a Markdown row for each v5e slice, with 32 rows of 128 tokens per chip and the
layers in a loop. It needs no TPU and does not wait for machine code
(measuring/memory_analysis.py). Collectives in a loop count once per iteration. Beside
the state is its size in theory: parameters and two moments, 12 bytes per parameter,
split evenly.
"""

import argparse

from bertjax.measuring import topologies

SLICES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 256: "16x16"}
ROWS = 32  # per chip
MB = 1e6


def measure(name, chips):
    """Return the compiler's analysis of the training step on `chips` chips."""
    import jax

    from bertjax.measuring import compile_steps, estimates_table

    config = estimates_table.shipped(name)
    config.batch_size = ROWS * chips
    config.mesh.data, config.mesh.fsdp = 1, chips
    config.model.unroll = 1
    topology = f"v5e:{SLICES[chips]}"
    devices = topologies.find_devices(topology)
    target = compile_steps.Target(config, config.data.vocab_size, topology, devices)
    found = target.memory("train", target.shapes()[0])
    number = sum(x.size for x in jax.tree.leaves(target.update.shapes.params))
    return {**found, "parameters": number, "state": sum(target.state_parts().values())}


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
        said += [
            ", ".join(
                f"{x['count']} {kind}: {x['bytes'] / MB:,.0f}" for kind, x in kinds
            ),
            f"{sum(x['bytes'] for _, x in kinds) / MB:,.0f}",
        ]
        print(f"| {' | '.join(said)} |", flush=True)


if __name__ == "__main__":
    main()
