# SPDX-License-Identifier: Apache-2.0
"""One page from workdirs: what bertjax.report shows and how it looks."""
