# SPDX-License-Identifier: Apache-2.0
"""The EXL3 weight format. `decode` needs NumPy; `layout`, `checkpoint`, `shards` and `check` need nothing."""
