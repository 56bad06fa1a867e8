# SPDX-License-Identifier: Apache-2.0
"""The task types of finetuning: each module has a TASK_TYPE."""
