# SPDX-License-Identifier: Apache-2.0
"""Writes one random program: inputs, statements, outputs. ``write(seed, ...)`` is the door.

Most of a program is residual blocks of a norm and the linears that read it, since that is what is
rewritten; the rest is there to be in their way.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import fuzz_spellings as spell
from fuzz_program import Program

#: Batch and length; one entry in four is degenerate.
LEADS = (
    (2, 3), (3, 2), (2, 4), (4, 5), (9,), (6,), (2, 3), (1, 1), (0, 3), (1, 5), (3, 1), (1,), (0,),
)  # fmt: skip
USUAL = 7
LAYOUTS = ("{s} * randn({m}, {n})",) * 8 + (
    "({s} * randn({n}, {m})).t()",
    "{s} * randn({m}, {n} * 2)[:, ::2]",
    "{s} * randn({m} * 2, {n})[::2]",
    "({s} * randn({m} + 1, {n} + 2))[1:, 2:]",
    "({s} * randn({m}, 1)).expand({m}, {n})",
    "{s} * randn({m}, {n}).flip(0)",
)


@dataclass
class Writer:
    """What has been written so far. ``more`` draws what was added later, and ``extra`` who sees
    which memory, so that a seed means what it meant where neither is drawn. ``late``: statements
    before the last one. ``smooth``: nothing makes a large error of a small one. ``norms``: how
    often a norm is RMSNorm, LayerNorm, or none but like one. ``x``: the stream; ``streams``: all
    of its shape."""

    rng: random.Random
    lead: tuple[int, ...]
    d: int
    h: int
    vocabulary: int
    heads: int
    smooth: bool = False
    norms: tuple[int, int, int] = (60, 34, 6)
    more: random.Random = field(default_factory=random.Random)
    extra: random.Random = field(default_factory=random.Random)
    late: list[str] = field(default_factory=list)
    x: str = "x"
    inputs: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    indent: int = 0
    count: int = 0

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def line(self, text: str) -> None:
        self.lines += ["    " * self.indent + part for part in text.split("\n")]

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def new(self, text: str) -> str:
        name = self.name()
        self.line(f"{name} = {text}")
        return name

    def input(self, kind: str, text: str, shape: tuple[int, ...] = ()) -> str:
        name = f"{kind}{len(self.inputs)}"
        self.inputs[name], self.shapes[name] = text, shape
        return name

    def weight(self, *shape: int) -> str:
        """A weight of this shape: at times one that is there, strided, or a part of another."""
        same = [
            n for n, known in self.shapes.items() if known == shape and n[0] in "wg" and n != "x"
        ]
        if same and self.chance(0.12):
            return self.rng.choice(same)
        if len(shape) == 1:
            text = "1 + 0.3 * randn({n})" if self.chance(0.7) else "randn({n} * 2)[::2]"
            return self.input("g", text.format(n=shape[0]), shape)
        m, n = shape
        if same and self.chance(0.05):
            return self.input("w", self.rng.choice(same), shape)
        if self.chance(0.05):  # two inputs in one storage
            packed = self.input("w", f"0.4 * randn({2 * m}, {n})", (2 * m, n))
            return self.input("w", f"{packed}[{m}:]", shape)
        s = round(0.8 / max(1, n) ** 0.5, 2)
        layout = self.rng.choice(LAYOUTS[:8] if self.smooth else LAYOUTS)
        return self.input("w", layout.format(s=s, m=m, n=n), shape)

    def vector(self, none: bool = False) -> str:
        return "None" if none and self.chance(0.25) else self.weight(self.d)

    def number(self) -> str:
        if self.chance(0.5):
            return "0.7"
        return self.input("s", "randn(1)[0]") if self.chance(0.5) else "torch.tensor(0.7).to(low)"

    def fill(self, spellings: tuple[str, ...], **values: str) -> str:
        """One of the spellings, with new weights where it asks for some."""
        text = self.rng.choice(spellings)
        makers = {
            "{w}": ("w", lambda: self.vector(none="_norm(" in text and "{w}.to" not in text)),
            "{b}": ("b", lambda: self.vector(none="_norm(" in text and "{b}.to" not in text)),
            "{number}": ("number", self.number),
        }
        wanted = [each for hole, each in makers.items() if hole in text and each[0] not in values]
        made = {key: make() for key, make in wanted}
        eps = self.rng.choice(["1e-3", "1e-2", "1e-5"])
        y = self.rng.choice(self.streams or ["x"])
        defaults = {"x": self.x, "y": y, "d": self.d, "eps": eps}
        return text.format(**{**defaults, **made, **values})

    def norm(self) -> str:
        kinds = (spell.RMS_NORMS, spell.LAYER_NORMS, spell.NEARLY_NORMS)
        (kind,) = self.rng.choices(kinds, self.norms)
        return self.new(self.fill(kind))

    def linear(self, n: str, k: int, out: int, fixed: str | None = None) -> str:
        """Text of ``n`` (..., k) times a new weight; ``fixed``: the spelling."""
        spellings = spell.LINEARS + (
            spell.BATCHED if len(self.lead) == 2 and self.chance(0.12) else ()
        )
        text = fixed or self.rng.choice(spellings)
        shapes = {"wt": (k, out), "w": (out, k), "b": (out,)}
        made = {name: self.weight(*s) for name, s in shapes.items() if f"{{{name}}}" in text}
        text = text.format(n=n, k=k, out=out, **made)
        return f"({text})" if " @ " in text or ") + " in text else text

    def become(self, text: str) -> None:
        self.x = self.new(text)
        self.streams.append(self.x)

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Statements inside belong to a checkpoint, to autocast, or to neither."""
        kind = self.rng.choices(["plain", "checkpoint", "autocast", "enabled"], [75, 14, 6, 5])[0]
        if kind == "plain":
            yield
            return
        if kind != "checkpoint":
            settings = '"cpu", torch.bfloat16' + (", enabled=False" * (kind == "enabled"))
            self.line(f"with torch.autocast({settings}):")
            self.indent += 1
            yield
            self.indent -= 1
            if kind == "autocast":
                self.become(f"{self.x}.to(low)")
            return
        before, known = self.x, list(self.streams)
        inside, name = self.name(), f"region{self.count}"
        self.line(f"def {name}({inside}):")
        self.indent += 1
        self.x, self.streams = inside, [inside]
        outputs = list(self.outputs)
        yield
        self.line(f"return {self.x}")
        self.indent -= 1
        self.outputs = outputs  # names of the region are not known outside
        self.streams = known
        self.become(f"checkpoint({name}, {before}, use_reentrant=False)")


def write(seed: int, *, training: bool, smooth: bool = False) -> Program:
    """The program of this seed. ``smooth``: one whose rounding errors can be compared."""
    from fuzz_blocks import block, end, start

    rng = random.Random(f"{seed} {training} {smooth}")  # noqa: S311  no secret
    lead = rng.choice(LEADS[:USUAL] if smooth or rng.random() < 0.75 else LEADS)
    d = rng.choice([8, 8, 8, 8, 16, 4] if smooth or rng.random() < 0.92 else [1, 2, 3])
    h = rng.choice([12, 24, 8, 40] if smooth or rng.random() < 0.95 else [1, 2, 0])
    if smooth:  # few numbers have no reliable error
        lead, d, h = (4, 8), 4 * d, 2 * h
    heads = rng.choice([n for n in (1, 2, 4) if d % n == 0])
    norms = rng.choice([(94, 0, 6), (97, 3, 0), (0, 100, 0), (0, 94, 6), (50, 40, 10)])
    vocabulary = rng.choice([11, 50, 300])
    more, extra = (random.Random(f"{seed} {of}") for of in ("others", "memory"))  # noqa: S311
    writer = Writer(rng, lead, d, h, vocabulary, heads, smooth, norms, more, extra)
    start(writer)
    for _ in range(rng.choice([1, 1, 2])):
        block(writer)
    end(writer)
    for line in writer.late:
        writer.line(line)
    if not smooth and extra.random() < 0.06 and "x" in writer.inputs:
        writer.line(extra.choice(["x.zero_()", "x.mul_(2)", "x.add_(1)"]))
    writer.line(f"return [{', '.join(dict.fromkeys(writer.outputs))}]")
    changed = any(line.startswith("x.") for line in writer.lines)
    floats = [n for n, text in writer.inputs.items() if "randint" not in text and n[:2] != "st"]
    floats = [n for n in floats if n != "x" or not changed]
    frozen = rng.choice([0.0, 0.0, 0.25, 0.6])
    trained = [name for name in floats if rng.random() >= frozen] or floats[:1]
    weights = tuple(n for n in floats if n[0] in "wgs") if rng.random() < 0.7 else ()
    return Program(
        inputs=tuple(writer.inputs.items()),
        body="\n".join(writer.lines),
        trained=tuple(trained) if training else (),
        weights=weights,
        dynamic=rng.random() < 0.3,
        custom=rng.random() < 0.3,
        memory=extra.choice([None, None, 0.0, 0.3, 0.6]) if training else None,
        seed=seed,
    )
