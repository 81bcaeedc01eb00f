# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from ansible_collections.sparkwright.dsv41.plugins.plugin_utils.watched import WatchedModule


class ActionModule(WatchedModule):
    """The module, with its progress shown while it works."""
