# SPDX-License-Identifier: Apache-2.0
"""What a run stores in its workdir, and how that is verified."""
