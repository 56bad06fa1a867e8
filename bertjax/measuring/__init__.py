# SPDX-License-Identifier: Apache-2.0
"""What bertjax.benchmark measures, and how."""
