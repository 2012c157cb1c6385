# SPDX-License-Identifier: Apache-2.0
"""The parts of a random program: its start, residual blocks, what is between them, its end."""

from collections.abc import Callable

import fuzz_spellings as spell
from fuzz_memory import remember, watch
from fuzz_writer import Writer


def start(w: Writer) -> None:
    """The stream: from numbers or tokens, and mostly behind a GEMM, so that the first norm is."""
    lead = ", ".join(map(str, w.lead))
    if w.chance(0.25):
        tokens = w.input("tokens", f"torch.randint(0, {w.vocabulary}, ({lead},))", w.lead)
        table = w.weight(w.vocabulary, w.d)
        text = w.rng.choice(["F.embedding({t}, {w})", "F.embedding({t}, {w}, 0)", "{w}[{t}]"])
        w.become(text.format(t=tokens, w=table))
    else:
        w.inputs["x"], w.shapes["x"] = f"randn({lead}, {w.d})", (*w.lead, w.d)
        if not w.smooth and w.chance(0.06):
            bad = w.rng.choice(["torch.nan", "torch.inf", "-torch.inf"])
            w.inputs["x"] += f".index_fill(-1, torch.tensor([0]), {bad})"
        elif w.smooth and w.chance(0.15):  # a channel that is larger than the rest, or a mean
            w.inputs["x"] += w.rng.choice([f".mul(torch.eye({w.d})[0] * 50 + 1)", " + 10"])
        w.streams.append("x")
        if not w.smooth and w.chance(0.04):
            w.line("x.add_(1)")
    if w.chance(0.7):
        w.become(w.linear(w.x, w.d, w.d))
    if w.smooth and w.chance(0.2):
        bias = w.input("g", f"{w.rng.choice([10, 100])} + randn({w.d})", (w.d,))
        w.become(
            w.linear(w.x, w.d, w.d, "F.linear({n}, {w}, {b})").replace(", None)", f", {bias})")
        )


def block(w: Writer) -> None:
    """Something in between, then norm, branch and residual; or parallel branches, or no norm."""
    if w.chance(0.3):
        between(w)
    remember(w)
    with w.region():
        n = w.norm() if w.chance(0.93) else w.x
        y = branch(w)(w, n)
        if w.chance(0.12):
            y = f"({y} + {branch(w)(w, n)})"
        y = w.new(y)
        text = w.fill(spell.RESIDUALS, y=y) if w.chance(0.93) else y
        w.become(w.more.choice(spell.TWICE).format(x=w.x, y=y) if w.more.random() < 0.06 else text)
    if w.chance(0.15):
        w.outputs.append(output(w))
    if w.more.random() < 0.12:
        w.outputs += [w.x, w.more.choice(spell.COPIES).format(x=w.x)]
    watch(w, *w.streams[:2])


def output(w: Writer) -> str:
    """Something of the stream. Which of two elements is the larger one is not smooth."""
    text = w.fill(spell.OUTPUTS)
    return text.replace("amax", "mean") if w.smooth else text


def between(w: Writer) -> None:
    """A step of the stream that is no block."""
    tables = [spell.ELEMENTWISE, spell.VIEWS, spell.IN_PLACE, *([] if w.smooth else [spell.JUMPS])]
    table = w.rng.choices(tables, [5, 3, 3, *([] if w.smooth else [2])])[0]
    if table is not spell.IN_PLACE:
        w.become(w.fill(table))
        return
    name = w.name()
    w.line(w.fill(table, v=name))
    w.x = name
    w.streams.append(name)


Branch = Callable[[Writer, str], str]


def branch(w: Writer) -> Branch:
    """How a branch is made: ``(writer, normalized stream) -> text of what is added``."""
    kinds: list[Branch] = [gated, packed, plain, attention, summed, mixed]
    usual = w.rng.choices(kinds, [32, 12, 16, 18, 8, 8])[0]
    return adapted if w.more.random() < 0.08 else usual


def gated(w: Writer, n: str) -> str:
    same = w.rng.choice([None, None, "F.linear({n}, {w})", "{n} @ {wt}"])
    g, u = (w.new(w.linear(n, w.d, w.h, same)) for _ in range(2))
    if w.chance(0.06):
        w.outputs.append(g)
    watch(w, g, u)
    return w.linear(w.new(w.rng.choice(spell.GATES).format(g=g, u=u)), w.h, w.d)


def packed(w: Writer, n: str) -> str:
    z = w.new(w.linear(n, w.d, 2 * w.h))
    g, u = w.name(), w.name()
    w.line(w.rng.choice(spell.HALVES).format(g=g, u=u, z=z, h=w.h))
    if w.chance(0.12):
        w.outputs += [g, u]
    watch(w, g, u, z)
    return w.linear(w.new(w.rng.choice(spell.GATES).format(g=g, u=u)), w.h, w.d)


def plain(w: Writer, n: str) -> str:
    z = w.new(w.linear(n, w.d, w.h))
    return w.linear(w.new(w.rng.choice(spell.ACTIVATIONS).format(x=z)), w.h, w.d)


def summed(w: Writer, n: str) -> str:
    """A sum of products whose left operands are made of one another, or are one and the same."""
    lefts = [n, *(w.rng.choice(spell.ACTIVATIONS[:-1]).format(x=n) for _ in range(2)), f"{n} * {n}"]
    lefts = [n, *(w.new(text) if w.chance(0.7) else f"({text})" for text in lefts[1:])]
    watch(w, *lefts[1:])
    terms = [w.linear(w.rng.choice(lefts), w.d, w.d) for _ in range(w.rng.choice([2, 2, 3]))]
    text = " + ".join(terms)
    return f"F.gelu({text})" if w.chance(0.3) else text


def adapted(w: Writer, n: str) -> str:
    """A sum of products of full and of low rank, in any order and nesting, some of them twice."""
    terms = [w.new(w.linear(n, w.d, w.d)) for _ in range(w.more.choice([1, 2, 2]))]
    for _ in range(w.more.choice([1, 1, 2, 3])):
        low = w.new(w.linear(n, w.d, 1))
        terms.append(w.new(f"{w.linear(low, 1, w.d)}{w.more.choice(['', '', ' * 0.7'])}"))
    terms += w.more.choices([*terms, w.x], k=w.more.choice([0, 1, 1, 2]))
    w.more.shuffle(terms)
    while len(terms) > 1:
        i = w.more.randrange(len(terms) - 1)
        terms[i : i + 2] = [f"({terms[i]} + {terms[i + 1]})"]
    return terms[0]


def mixed(w: Writer, n: str) -> str:
    """Linears of two widths around something that cannot run on a tile."""
    a = w.new(w.linear(n, w.d, w.d))
    text = w.rng.choice(["{a}.cumsum(0)", "{a}.softmax(-1)", "{a}.flip(-1)", "{a}.roll(1, 0)"])
    a = w.new(text.format(a=a))
    b = w.new(w.linear(n, w.d, w.h))
    return f"{w.linear(a, w.d, w.d)} * {w.linear(b, w.h, w.d)}"


def attention(w: Writer, n: str) -> str:
    """Queries, keys and values in heads, turned or not, masked or not."""
    flat = len(w.lead) == 1
    batch, length = ("1", f"{n}.shape[0]") if flat else (f"{n}.shape[0]", f"{n}.shape[1]")
    heads, width = w.heads, w.d // w.heads
    groups = w.rng.choice([1, 1, heads])
    if w.chance(0.25):
        z = w.new(w.linear(n, w.d, 3 * w.d))
        q, k, v = w.name(), w.name(), w.name()
        w.line(f"{q}, {k}, {v} = {z}.chunk(3, -1)")
        groups = 1
    else:
        q = w.new(w.linear(n, w.d, w.d))
        k, v = (w.new(w.linear(n, w.d, w.d // groups)) for _ in range(2))
    q, k, v = (
        w.new(f"{t}.reshape({batch}, {length}, {count}, {width})")
        for t, count in ((q, heads), (k, heads // groups), (v, heads // groups))
    )
    normed = w.rng.choice(["before", "behind", "", "", ""])  # the transpose
    if normed == "before":
        q, k = (normed_heads(w, t, width) for t in (q, k))
    if width % 2 == 0 and w.chance(0.6):
        q, k = turned(w, q, k, length, width)
    q, k, v = (w.new(f"{t}.transpose(1, 2)") for t in (q, k, v))
    if normed == "behind":
        q, k = (normed_heads(w, t, width) for t in (q, k))
    if groups > 1:
        wide = "{t}.repeat_interleave({g}, 1)"
        if w.chance(0.4):
            wide = "{t}[:, :, None].expand(-1, -1, {g}, -1, -1).flatten(1, 2)"
        before = k
        k, v = (w.new(wide.format(t=t, g=groups)) for t in (k, v))
        if not w.smooth and w.chance(0.2):
            w.line(f"{before}[:, :, :1] = 0")
    y = w.new(attend(w, q, k, v, length))
    y = w.new(f"{y}.transpose(1, 2).reshape({n}.shape)")
    return w.linear(y, w.d, w.d)


def attend(w: Writer, q: str, k: str, v: str, length: str) -> str:
    call = "F.scaled_dot_product_attention({q}, {k}, {v}{how})"
    kind = w.rng.choice(["", ", is_causal=True", "mask", "mask", "scale", "by hand"])
    if kind == "mask":
        mask = w.new(w.rng.choice(spell.MASKS).format(t=length))
        kind = f", attn_mask={mask}"
    if kind == "scale":
        kind = ", scale=0.3, is_causal=True"
    if kind == "by hand":
        scores = w.new(f"{q} @ {k}.transpose(-2, -1) * 0.5")
        if w.chance(0.5):
            mask = w.rng.choice(spell.MASKS[:3]).format(t=length)
            scores = w.new(f"{scores}.masked_fill(~({mask}), -1e4)")
        return f"{scores}.to(high).softmax(-1).to(low) @ {v}"
    return call.format(q=q, k=k, v=v, how=kind)


def normed_heads(w: Writer, t: str, width: int) -> str:
    """An RMSNorm of each head of ``t`` (..., width)."""
    return w.new(w.fill(spell.RMS_NORMS, x=t, d=width, w=w.weight(width)))


def turned(w: Writer, q: str, k: str, length: str, width: int) -> tuple[str, ...]:
    """Rotary embedding of (B, T, heads, width), real or complex."""
    half = width // 2 if 0 in w.lead else -1  # -1 says nothing of no numbers
    angles = w.new(
        f"torch.arange({length}, dtype=high)[:, None]"
        f" * 0.5 ** torch.arange({width // 2}, dtype=high)"
    )
    if w.chance(0.4):
        turns = w.new(f"torch.polar(torch.ones_like({angles}), {angles})[None, :, None]")
        text = (
            "torch.view_as_real(torch.view_as_complex("
            "{t}.to(high).reshape(*{t}.shape[:-1], {half}, 2)) * {turns}).flatten(3).to(low)"
        )
        return tuple(w.new(text.format(t=t, turns=turns, half=half)) for t in (q, k))
    return by_tables(w, q, k, angles, width)


def by_tables(w: Writer, q: str, k: str, angles: str, width: int) -> tuple[str, ...]:
    """The same by cosines and sines of ``angles`` (T, width / 2): of all columns of a head or its
    first, normalized before or not, before a transpose or behind it."""
    part = width // 2 if width % 4 == 0 and w.chance(0.3) else width
    columns = f"torch.cat([{angles}, {angles}], -1)[None, :, None, :{part}]"
    turned, text = w.rng.choice(spell.TURNED), w.rng.choice(spell.ROTATIONS)
    transposed, normed = w.chance(0.4), w.chance(0.25)
    columns += ".transpose(1, 2)" if transposed else ""
    dtype = w.rng.choice(["low", "low", "high"]) if ".to(low)" in text else "low"
    cos, sin = (w.new(f"{columns}.{name}().to({dtype})") for name in ("cos", "sin"))
    made = []
    for each in (q, k):
        t = each
        if normed:
            t = w.new(f"F.rms_norm({t}, ({width},), {w.weight(width)}, 1e-5)")
        t = w.new(f"{t}.transpose(1, 2)") if transposed else t
        x = t if part == width else w.new(f"{t}[..., :{part}]")
        other = turned.format(t=x, half=part // 2)
        y = w.new(text.format(t=x, turned=other, cos=cos, sin=sin))
        if part < width:
            y = w.new(f"torch.cat([{y}, {t}[..., {part}:]], -1)")
        made.append(w.new(f"{y}.transpose(1, 2)") if transposed else y)
    return tuple(made)


def end(w: Writer) -> None:
    """A last norm, mostly, then a loss of logits, logits, or the stream."""
    kind = w.rng.choices(["loss", "logits", "stream"], [45, 15, 40])[0]
    n = w.norm() if w.chance(0.7) else w.x
    if kind == "stream":
        w.outputs += [n if w.chance(0.3) else w.linear(n, w.d, w.h), output(w)]
        return
    tables = [name for name, shape in w.shapes.items() if shape == (w.vocabulary, w.d)]
    if tables and w.chance(0.6):
        z = w.new(f"F.linear({n}, {tables[0]})")
    else:
        z = w.new(w.linear(n, w.d, w.vocabulary))
    if w.chance(0.2):
        z = w.new(w.rng.choice(spell.CAPS).format(z=z))
    if kind == "loss":
        if not w.smooth and w.chance(0.05):
            z = w.new(f"{z}.index_fill(-1, torch.tensor([5]), {w.rng.choice(['-', ''])}torch.inf)")
        rows = "x" if "x" in w.shapes else next(iter(w.inputs))
        shape = f"{rows}.shape[:-1]" if rows == "x" else f"{rows}.shape"
        target = w.input("target", f"torch.randint(0, {w.vocabulary}, {shape})", w.lead)
        t = w.new(f"{target}.flatten()")
        loss = w.rng.choice(spell.LOSSES)
        if w.chance(0.4) and w.lead[0] and "gather" not in loss:
            ignored = 3 if "ignore_index=3" in loss else -100
            w.inputs[target] += f".index_fill(0, torch.tensor([0]), {ignored})"
        w.outputs.append(w.new(loss.format(z=f"{z}.flatten(0, -2)", t=t)))
    if kind == "logits" or w.chance(0.35):
        w.outputs.append(z)
        if not w.smooth and w.chance(0.05):
            w.line(f"{z}.mul_(2)")
