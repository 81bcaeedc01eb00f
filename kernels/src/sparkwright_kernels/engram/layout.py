# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Which row of an Engram table an n-gram is in, and which rows a rank holds.

A position's last 2, 3, .. `max_ngram_size` tokens are each hashed by `n_heads` hash heads. Every (n-gram size, head) is
a *column* and owns a range of rows of its layer's table; the range's size is a prime, the next above `vocab_size` - 1
that no column before it has taken (columns in the order layer, n-gram size, head; each n-gram size starts anew). A
layer's table is its columns one after the other. A row is `head_dim` fp8 (e4m3fn) weights and one e8m0 scale per 32 of
them.

    row = (t[0]*m[0] ^ t[1]*m[1] ^ ..) mod prime + offset of the column

t[0] is the position's token, t[1] the one before it, both in the compressed vocabulary; m are the layer's multipliers,
odd and small enough that no product overflows 63 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from sparkwright_kernels.engram.errors import EngramError

Rule = Literal["heads", "rows"]
RULES: tuple[Rule, ...] = get_args(Rule)
"""How a table is split over ranks: whole hash heads (columns), or rows in equal numbers. Never to be confused."""

SCALE_BLOCK = 32
"""Weights that share a scale."""

IntArray = np.ndarray[Any, np.dtype[np.int64]]

# Miller-Rabin with these bases is exact below 3,215,031,751 (Jaeschke 1993), which no table reaches.
_BASES = (2, 3, 5, 7)
_MAX_PRIME = 3_215_031_751
_MAX_COLUMNS = 1024  # a limit of ours, so that a damaged config is an error at once
_SEED = 10007  # times the layer's number, for the generator of its multipliers


def is_prime(n: int) -> bool:
    """Whether `n` is prime; exact for n < 3,215,031,751."""
    if n < 2:
        return False
    for base in _BASES:
        if n % base == 0:
            return n == base
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _BASES:
        power = pow(base, odd, n)
        if power in (1, n - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % n
            if power == n - 1:
                break
        else:
            return False
    return True


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `lo` to `hi` (exclusive) of a layer's table of `total` rows: what one rank holds."""

    lo: int
    hi: int
    total: int

    @property
    def rows(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class EngramLayout:
    """The tables of one model. Equal to vLLM's class of that name, number by number; needs neither vLLM nor torch."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    vocab_size: int
    max_ngram_size: int
    n_heads: int
    head_dim: int
    compressed_vocab_size: int
    pad_token_id: int

    def __post_init__(self) -> None:
        needed = {
            "n_heads": 1,
            "vocab_size": 2,
            "max_ngram_size": 2,
            "compressed_vocab_size": 1,
            "head_dim": SCALE_BLOCK,
        }
        for name, least in needed.items():
            if getattr(self, name) < least:
                raise EngramError(f"engram_{name}", str(getattr(self, name)), f"at least {least}")
        if self.columns > _MAX_COLUMNS:
            raise EngramError("n-gram sizes times engram_n_heads", str(self.columns), f"at most {_MAX_COLUMNS}")
        if self.head_dim % SCALE_BLOCK:
            raise EngramError("engram_head_dim", str(self.head_dim), f"a multiple of {SCALE_BLOCK}")
        if len(set(self.layer_ids)) != len(self.layer_ids) or not self.layer_ids or min(self.layer_ids) < 0:
            raise EngramError("engram_layer_ids", str(list(self.layer_ids)), "distinct layer numbers")
        if len(self.num_embeddings) != len(self.layer_ids):
            raise EngramError("engram_num_embeddings", f"{len(self.num_embeddings)} numbers", "one for each layer")
        for layer, stated in zip(self.layer_ids, self.num_embeddings, strict=True):
            if stated != sum(self.primes[layer]):
                needs = f"{sum(self.primes[layer])}, the sum of layer {layer}'s {self.columns} column sizes"
                raise EngramError("engram_num_embeddings", str(stated), needs)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> EngramLayout:
        """Of a model's config (the object in config.json, or the text config in it)."""
        nested = config.get("text_config")
        config = {**config, **(nested if isinstance(nested, dict) else {})}

        def number(name: str) -> int:
            value = config.get(f"engram_{name}")
            if not isinstance(value, int) or isinstance(value, bool):
                raise EngramError(f"engram_{name}", repr(value), "an integer, as the config of a model with Engram has")
            return value

        def numbers(name: str) -> tuple[int, ...]:
            value = config.get(f"engram_{name}")
            if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
                raise EngramError(f"engram_{name}", repr(value), "a list of integers, as a model with Engram has")
            return tuple(value)

        scalars = ("vocab_size", "max_ngram_size", "n_heads", "head_dim", "compressed_vocab_size", "pad_token_id")
        return cls(numbers("layer_ids"), numbers("num_embeddings"), *map(number, scalars))

    @classmethod
    def from_model(cls, model_dir: Path) -> EngramLayout:
        """Of the config.json in a model directory."""
        path = model_dir / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError) as reason:
            raise EngramError(path, f"{reason}", "the model's config.json") from None
        if not isinstance(config, dict):
            raise EngramError(path, type(config).__name__, "an object")
        try:
            return cls.from_config(config)
        except EngramError as error:
            raise EngramError(f"{path}: {error.subject}", error.found, error.needed, error.repair) from None

    @property
    def columns(self) -> int:
        """Columns of a table: n-gram sizes times heads."""
        return (self.max_ngram_size - 1) * self.n_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: its weights, then its scales."""
        return self.head_dim + self.head_dim // SCALE_BLOCK

    @cached_property
    def primes(self) -> dict[int, tuple[int, ...]]:
        """Layer to the sizes of its columns, in rows."""
        taken: set[int] = set()

        def sizes() -> Iterator[int]:
            for _ in range(self.max_ngram_size - 1):
                candidate = self.vocab_size - 1
                for _ in range(self.n_heads):
                    candidate += 1
                    while candidate in taken or not is_prime(candidate):
                        candidate += 1
                    if candidate >= _MAX_PRIME:
                        raise EngramError("engram_vocab_size", str(self.vocab_size), f"less than {_MAX_PRIME}")
                    taken.add(candidate)
                    yield candidate

        return {layer: tuple(sizes()) for layer in self.layer_ids}

    @cached_property
    def offsets(self) -> dict[int, tuple[int, ...]]:
        """Layer to the first row of each column, and last the number of rows: columns + 1 numbers."""
        return {layer: tuple(accumulate(sizes, initial=0)) for layer, sizes in self.primes.items()}

    @cached_property
    def multipliers(self) -> dict[int, tuple[int, ...]]:
        """Layer to its hash multipliers, the current token's first."""
        bound = max(1, (2**63 - 1) // self.compressed_vocab_size // 2)

        def draw(layer: int) -> tuple[int, ...]:
            drawn = np.random.default_rng(_SEED * layer).integers(0, bound, self.max_ngram_size, np.int64)
            return tuple(int(value) * 2 + 1 for value in drawn)

        return {layer: draw(layer) for layer in self.layer_ids}

    def total(self, layer: int) -> int:
        """Rows of a layer's table."""
        self._check_layer(layer)
        return self.offsets[layer][-1]

    def head_columns(self, rank: int, ranks: int) -> range:
        """Columns of a rank under rule `heads`: ceil(columns / ranks) each, the last rank what is left."""
        _check_rank(rank, ranks)
        each = -(-self.columns // ranks)
        if (ranks - 1) * each >= self.columns:
            found = f"{ranks} ranks of {each} columns, which leaves rank {ranks - 1} none of {self.columns}"
            raise EngramError("tensor-parallel size", found, "at least one column for each rank", "use rule rows")
        return range(rank * each, min((rank + 1) * each, self.columns))

    def shard(self, layer: int, rule: Rule, rank: int, ranks: int) -> RowRange:
        """Rows of `layer` that `rank` of `ranks` holds."""
        total = self.total(layer)
        if rule == "heads":
            columns = self.head_columns(rank, ranks)
            return RowRange(self.offsets[layer][columns.start], self.offsets[layer][columns.stop], total)
        if rule != "rows":
            raise EngramError("sharding rule", repr(rule), f"one of {', '.join(RULES)}")
        _check_rank(rank, ranks)
        if ranks > total:
            raise EngramError("tensor-parallel size", f"{ranks} ranks", f"at most {total}, the rows of layer {layer}")
        return RowRange(total * rank // ranks, total * (rank + 1) // ranks, total)

    def hash_rows(self, layer: int, tokens: IntArray) -> IntArray:
        """Rows of every position of one sequence: compressed ids `[T]` (-1: in no n-gram) to rows `[T, columns]`.

        As in the engine, an n-gram that meets the sequence's beginning or a -1 reads pad tokens from there back.
        """
        self._check_layer(layer)
        tokens = np.asarray(tokens, np.int64)
        rolling = np.zeros(len(tokens), np.int64)
        blocked = np.zeros(len(tokens), bool)
        rows = np.empty((len(tokens), self.columns), np.int64)
        for back, multiplier in enumerate(self.multipliers[layer]):
            before = np.concatenate([np.full(min(back, len(tokens)), -1), tokens[: max(len(tokens) - back, 0)]])
            blocked |= before == -1
            rolling ^= np.where(blocked, self.pad_token_id, before) * multiplier
            if back:
                mine = slice((back - 1) * self.n_heads, back * self.n_heads)
                rows[:, mine] = rolling[:, None] % np.array(self.primes[layer][mine], np.int64)
                rows[:, mine] += np.array(self.offsets[layer][mine], np.int64)
        return rows

    def _check_layer(self, layer: int) -> None:
        if layer not in self.layer_ids:
            raise EngramError("layer", str(layer), f"one of {', '.join(map(str, self.layer_ids))}")


def _check_rank(rank: int, ranks: int) -> None:
    if ranks < 1:
        raise EngramError("tensor-parallel size", str(ranks), "at least 1")
    if not 0 <= rank < ranks:
        raise EngramError("rank", str(rank), f"0 to {ranks - 1} at tensor-parallel size {ranks}")
