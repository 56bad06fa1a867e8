# SPDX-License-Identifier: Apache-2.0
"""What a run keeps in its workdir, and how it is verified."""
