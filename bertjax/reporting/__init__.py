# SPDX-License-Identifier: Apache-2.0
"""Runs for people: the page of bertjax.report, and previews of batches."""
