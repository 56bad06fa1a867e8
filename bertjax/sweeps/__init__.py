# SPDX-License-Identifier: Apache-2.0
"""Many runs of one config side by side in one program."""
