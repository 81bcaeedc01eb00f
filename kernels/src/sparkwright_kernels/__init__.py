# SPDX-License-Identifier: Apache-2.0
"""EXL3 weights for vLLM. Importing this package loads nothing but the standard library."""

__version__ = "0.1.0"
