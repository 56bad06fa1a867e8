# SPDX-License-Identifier: Apache-2.0
"""Names that a config is checked against before jax is loaded."""

# Optimizer (optim.py) -> the settings of optim.* that it takes.
OPTIMIZERS = {
    "adamw": ("wd", "b1", "b2", "eps", "bias_correction"),
    "lamb": ("wd", "b1", "b2", "eps", "bias_correction"),
    "stableadamw": ("wd", "b1", "b2", "eps"),
    "adafactor": ("wd",),
    "muon": ("wd", "b1", "b2", "eps"),
}
# Schedule (schedules.py) -> the settings of optim.* that it alone takes.
SCHEDULES = {
    "linear": (),
    "polynomial": ("power",),
    "cosine": (),
    "wsd": ("decay",),
    "constant": (),
}
