# SPDX-License-Identifier: Apache-2.0
"""Names that a config is checked against before jax is loaded."""

from bertjax import registry

# Optimizer (optim.py) -> the settings of optim.* that it takes.
OPTIMIZERS = {
    "adamw": ("wd", "b1", "b2", "eps", "bias_correction"),
    "lamb": ("wd", "b1", "b2", "eps", "bias_correction"),
    "stableadamw": ("wd", "b1", "b2", "eps"),
    "adafactor": ("wd",),
    "muon": ("wd", "b1", "b2", "eps"),
    "normuon": ("wd", "b1", "b2", "eps"),
    "adamuon": ("wd", "b1", "b2", "eps"),
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
