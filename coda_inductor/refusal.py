# SPDX-License-Identifier: Apache-2.0
"""The reason why there is no rewrite or fusion: one object, from the condition to the report.

A refusal has a *code*, for which ``remedies`` has advice, and a *text* for users. Nothing parses
the text: a sentence may be reworded at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coda_inductor.remedies import REMEDIES, Remedy


@dataclass(frozen=True)
class Refusal:
    """One reason why a rewrite or a fusion did not happen.

    Attributes:
        code: an entry of :data:`coda_inductor.remedies.REMEDIES`.
        text: a sentence for users, without ``what`` and ``where``.
        what: the pass, pattern or kind of site; callers fill it in.
        where: the module path or the node's name.
        failure: something failed, or is missing (a dtype without kernels, no compiler, an exception
            of ours): worth one warning, and an error with ``options["strict"]``; no mere choice.
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
        """``rms_norm at model.norm``; without a module the node's name, which contains ``what``."""
        alone = self.where.startswith(self.what) and "." not in self.where
        return self.where if alone else f"{self.what} at {self.where}"

    @property
    def reason(self) -> str:
        """The refusal's text, under the name that reports use."""
        return self.text

    @property
    def remedy(self) -> Remedy:
        """The advice for a user."""
        return REMEDIES[self.code]

    def at(self, what: str, where: str) -> Refusal:
        """The same refusal with this ``what`` and ``where``."""
        return replace(self, what=what, where=where)

    def within(self, text: str) -> Refusal:
        """The same cause for a larger unit: ``text`` with this refusal's text instead of ``{}``."""
        return replace(self, text=text.replace("{}", self.text))

    def excused(self) -> Refusal:
        """The same refusal, but not as a failure, because nothing is lost."""
        return replace(self, failure=False)


class Refused(Exception):  # noqa: N818 (carries a reason to the caller; not a failure)
    """The request cannot be met; ``refusal`` says why."""

    def __init__(self, refusal: Refusal):
        super().__init__(refusal.text)
        self.refusal = refusal


def refuse(code: str, text: str, *, failure: bool = False) -> Refusal:
    """Create a refusal. Raises KeyError if ``code`` has no remedy; every code must have one."""
    REMEDIES[code]
    return Refusal(code, text, failure=failure)


def failed(error: BaseException) -> Refusal:
    """The refusal for an exception in our own code."""
    return refuse("defect", f"{type(error).__name__} in our own passes: {error}", failure=True)
