# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Engram's n-gram tables: where a row is, files of rows, packing them and reading them at the speed of the disk."""
