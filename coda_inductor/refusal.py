# SPDX-License-Identifier: Apache-2.0
"""Why something was not rewritten or not fused: an object from where it is found to the page.

A refusal has a *code*, by which ``remedies`` says what a user can do, and a *text* for people.
Nothing parses the text: a sentence may be reworded at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coda_inductor.remedies import REMEDIES, Remedy


@dataclass(frozen=True)
class Refusal:
    """One reason.

    Attributes:
        code: an entry of :data:`coda_inductor.remedies.REMEDIES`.
        text: a sentence for users, without what and where.
        what: the pass, pattern or kind of site that it is about; filled in on the way up.
        where: the module path or the node's name.
        failure: something failed, or is missing (a dtype without kernels, no compiler, an exception
            of ours): worth one warning, and an error with ``options["strict"]``. A choice is none.
    """

    code: str
    text: str
    what: str = ""
    where: str = ""
    failure: bool = False

    def __str__(self) -> str:
        """``rms_norm at model.norm: no GEMM reads it``; the text alone where no place is known."""
        return f"{self.what} at {self.where}: {self.text}" if self.what else self.text

    @property
    def reason(self) -> str:
        """The text, under the name that it has in reports."""
        return self.text

    @property
    def remedy(self) -> Remedy:
        """What a user can do about it."""
        return REMEDIES[self.code]

    def at(self, what: str, where: str) -> Refusal:
        """The same, of this thing at this place."""
        return replace(self, what=what, where=where)

    def within(self, text: str) -> Refusal:
        """The same cause, told of something larger: ``text`` with ``{}`` for this text."""
        return replace(self, text=text.replace("{}", self.text))

    def failing(self) -> Refusal:
        """The same, a failure: somebody asked for what cannot be had."""
        return replace(self, failure=True)

    def excused(self) -> Refusal:
        """The same, no failure: nothing is lost."""
        return replace(self, failure=False)


class Refused(Exception):  # noqa: N818 (a reason on its way up, no failure)
    """What was asked for cannot be; ``refusal`` says why."""

    def __init__(self, refusal: Refusal):
        super().__init__(refusal.text)
        self.refusal = refusal


def refuse(code: str, text: str, *, failure: bool = False) -> Refusal:
    """A new refusal.

    Raises:
        KeyError: ``code`` has no remedy. Every reason owes its user one.
    """
    REMEDIES[code]
    return Refusal(code, text, failure=failure)


def failed(error: BaseException, doing: str = "in our own passes") -> Refusal:
    """The refusal that stands for an exception of ours."""
    return refuse("defect", f"{type(error).__name__} {doing}: {error}", failure=True)
