# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: functions from an update's time to its learning rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bertjax import UserError, registry

Schedule = Callable[[jax.Array | int], jax.Array]
Shape = Callable[[jax.Array], jax.Array]

# If the clock drives a run, its whole budget counts as this many "updates".
CLOCK_UPDATES = 1_000_000


def make_schedule(
    name: str, lr: float, warmup: int, total: int, decay: int = 0, power: float = 1.0
) -> Schedule:
    """Return a function from update (0-based) to learning rate.

    All schedules rise linearly over `warmup` updates, the first of which is above 0.
    Let f be the share of the updates after the warm-up that is left: 1 at its end and 0
    after update `total` - 1. The rate is then

      linear      lr x f, as in transformers (google-research/bert counts f from update
                  0, so that its rate drops at the end of the warm-up)
      polynomial  lr x f^power
      cosine      lr x (1 - cos(pi f)) / 2
      wsd         lr until the last `decay` updates, then lr x (1 - g^power), where g is
                  the share of them that is over; a power of 0.5 is the 1 - sqrt(g) of
                  Haegele et al. 2024, arXiv 2405.18392
      constant    lr

    "my_lab.triangle:cycles=3" is a module from outside the package. Its `make_schedule`
    accepts those of warmup, total, decay and power that it needs, and its own options.
    It returns a function from the update, f32, to the fraction of lr, which is clipped
    to [0, 1] and to the linear rise.

    Raises UserError if warm-up and decay are longer than the run, for a power of 0 with
    wsd, and for an unknown module or option.
    """
    if warmup > total:
        raise UserError(
            f"optim.warmup is {warmup} steps, more than total's {total}: give "
            "optim.warmup.percent instead, for instance 10"
        )
    if name == "wsd" and warmup + decay > total:
        raise UserError(
            f"optim.decay is {decay} steps after optim.warmup's {warmup}: more than "
            f"total's {total}"
        )
    if name == "wsd" and not power:
        raise UserError(
            "optim.power=0 with optim.schedule=wsd would be a rate of 0 from the first "
            "update on: give one above 0, or leave it out (0.5)"
        )

    def left(step: jax.Array) -> jax.Array:
        return jnp.clip((total - step) / max(total - warmup, 1), 0.0, 1.0)

    def wsd(step: jax.Array) -> jax.Array:
        over = jnp.clip((step - (total - decay)) / max(decay, 1), 0.0, 1.0)
        return 1.0 - (jnp.sqrt(over) if power == 0.5 else over**power)

    shapes: dict[str, Shape] = {
        "linear": left,
        "polynomial": lambda step: left(step) ** power,
        "cosine": lambda step: (1.0 - jnp.cos(jnp.pi * left(step))) / 2,
        "wsd": wsd,
        "constant": lambda step: jnp.ones_like(step),
    }
    if registry.is_outside(name):
        key, maker = "optim.schedule", "make_schedule"
        module, options = registry.load_outside(key, name, maker)
        lengths = dict(warmup=warmup, total=total, decay=decay, power=power)
        shapes[name] = registry.make(key, module, maker, options, **lengths)

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rise = (step + 1) / max(warmup, 1)
        return lr * jnp.clip(jnp.minimum(rise, shapes[name](step)), 0.0, 1.0)

    return schedule
