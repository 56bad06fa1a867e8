# SPDX-License-Identifier: Apache-2.0
"""What an objective can be finetuned on: each module has a TASK_TYPE."""
