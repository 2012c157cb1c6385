# SPDX-License-Identifier: Apache-2.0
"""Why something was not rewritten or not fused: one object, from the condition to the report.

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
            of ours): worth one warning, and an error with ``options["strict"]``. False for a mere
            choice.
    """

    code: str
    text: str
    what: str = ""
    where: str = ""
    failure: bool = False

    def __str__(self) -> str:
        """``rms_norm at model.norm: no GEMM reads it``; only the text if ``what`` is empty."""
        return f"{self.subject}: {self.text}" if self.what else self.text

    @property
    def subject(self) -> str:
        """``rms_norm at model.norm``; outside of modules the node's name, which holds ``what``."""
        alone = self.where.startswith(self.what) and "." not in self.where
        return self.where if alone else f"{self.what} at {self.where}"

    @property
    def reason(self) -> str:
        """The text, by the name that reports use."""
        return self.text

    @property
    def remedy(self) -> Remedy:
        """The advice for a user."""
        return REMEDIES[self.code]

    def at(self, what: str, where: str) -> Refusal:
        """The same refusal, for this ``what`` and ``where``."""
        return replace(self, what=what, where=where)

    def within(self, text: str) -> Refusal:
        """The same cause for something larger: ``text`` with this text in place of ``{}``."""
        return replace(self, text=text.replace("{}", self.text))

    def failing(self) -> Refusal:
        """The same as a failure: the user asked for something that is not possible."""
        return replace(self, failure=True)

    def excused(self) -> Refusal:
        """The same, but not a failure: nothing is lost."""
        return replace(self, failure=False)


class Refused(Exception):  # noqa: N818 (carries a reason to the caller; not a failure)
    """The request cannot be met; ``refusal`` says why."""

    def __init__(self, refusal: Refusal):
        super().__init__(refusal.text)
        self.refusal = refusal


def refuse(code: str, text: str, *, failure: bool = False) -> Refusal:
    """A new refusal.

    Raises:
        KeyError: ``code`` has no remedy; every code must have one.
    """
    REMEDIES[code]
    return Refusal(code, text, failure=failure)


def failed(error: BaseException) -> Refusal:
    """The refusal for an exception in our own code."""
    return refuse("defect", f"{type(error).__name__} in our own passes: {error}", failure=True)
