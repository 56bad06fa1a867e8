# SPDX-License-Identifier: Apache-2.0
"""What a masked LM is worth on text: losses, pseudo-log-likelihoods, minimal pairs."""
