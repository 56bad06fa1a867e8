# SPDX-License-Identifier: Apache-2.0
"""What each layer of a frozen encoder knows: features, probes, description lengths."""
