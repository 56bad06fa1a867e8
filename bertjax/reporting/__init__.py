# SPDX-License-Identifier: Apache-2.0
"""Show runs to people: the page of bertjax.report, and previews of batches."""
