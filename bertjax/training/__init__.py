# SPDX-License-Identifier: Apache-2.0
"""Names that a config is checked against before jax is loaded."""

from bertjax import registry

DECAY = ("wd", "cautious_decay")
ADAM = (*DECAY, "b1", "b2", "eps")
# Optimizer (optim.py) -> the settings of optim.* that it takes.
OPTIMIZERS = {
    "adamw": (*ADAM, "bias_correction"),
    "lamb": (*ADAM, "bias_correction"),
    "stableadamw": ADAM,
    "adafactor": DECAY,
    "muon": ADAM,
    "normuon": ADAM,
    "adamuon": ADAM,
}
# Schedule (schedules.py) -> the settings of optim.* that it alone takes.
SCHEDULES = {
    "linear": (),
    "polynomial": ("power",),
    "cosine": (),
    "wsd": ("decay",),
    "constant": (),
}
# Config key -> the names of the package, and what a module from outside defines.
CHOICES = {
    "optim.name": (OPTIMIZERS, "make_optimizer"),
    "optim.schedule": (SCHEDULES, "make_schedule"),
}


def settings_of(key: str, name: str) -> tuple[str, ...]:
    """Return the settings of optim.* that an optimizer or a schedule takes.

    Imports a module from outside the package, and reads them from its arguments.
    Raises UserError where there is none of that name.
    """
    known, maker = CHOICES[key]
    if not registry.is_outside(name):
        return registry.pick(key, name, known)
    module, _ = registry.load_outside(key, name, maker)
    return registry.argument_names(key, module, maker)
