# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with Engram tables."""

from __future__ import annotations


class EngramError(Exception):
    """One thing that cannot be used, or cannot be done, as it is.

    Attributes: `subject` (a file, an option, a tensor), the value `found`, the value `needed`, and what `repair`s it
    ("" where nothing but the needed value does).
    """

    def __init__(self, subject: object, found: str, needed: str, repair: str = "") -> None:
        super().__init__(subject, found, needed, repair)  # all of them: exceptions are pickled through their args
        self.subject, self.found, self.needed, self.repair = str(subject), found, needed, repair

    def __str__(self) -> str:
        repair = f"; {self.repair}" if self.repair else ""
        return f"{self.subject}: found {self.found}, needed {self.needed}{repair}"


class EngramErrors(EngramError):
    """Several of them, all findings at once."""

    def __init__(self, errors: list[EngramError]) -> None:
        first = errors[0]
        super().__init__(first.subject, first.found, first.needed, first.repair)
        self.errors = errors

    def __reduce__(self) -> tuple[type[EngramErrors], tuple[list[EngramError]]]:
        return type(self), (self.errors,)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


def raise_all(errors: list[EngramError]) -> None:
    """Raise the one there is, all there are, or nothing."""
    if errors:
        raise errors[0] if len(errors) == 1 else EngramErrors(errors)
