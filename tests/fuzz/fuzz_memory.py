# SPDX-License-Identifier: Apache-2.0
"""Who else sees this memory, in random programs: second readers of a tensor that see how it lies,
and inputs that are written to after they were read, or before."""

from fuzz_writer import Writer

#: Of {x} (..., {d}); what its memory does not have, eager refuses.
READERS = (
    "{x}.as_strided((2, {d}), ({d}, 1)) * 2", "{x}.as_strided((3,), (2,), 1) * 2",
    "torch.as_strided({x} * 2, (2, {d}), ({d}, 1))", "{x}.transpose(0, -1).as_strided((4,), (1,))",
    "{x}.detach().view(torch.uint8).view(low) * 2", "{x}.view(-1) * 2", "{x}.t().view(-1)",
    "torch.ops.coda_tests.ordered({x}.detach())", "torch.ops.coda_tests.exact({x}.detach() * 2)",
    "{x}[..., :2]", "{x}.transpose(0, -1)", "{x}.unsqueeze(0)",
)  # fmt: skip
#: Copies of what {s} is now, or functions of it.
OLD = (
    "{s}.clone()", "{s}.cos()", "({s} * 1)", "torch.cat([{s}[..., :2], {s}[..., 2:]], -1)",
    "{s}.to(torch.float32).to(low)", "{s}.exp().mean(-1, keepdim=True)", "({s} + {s}[..., :1])",
    "(1 / (1 + {s} * {s}))", "torch.cat([{s}[:1], {s}[1:]])",
)  # fmt: skip
#: What becomes of it, from a stream {x} too.
WRITES = (
    "{s}.mul_(0.5)", "{s}.zero_()", "{s}.copy_({s}.flip(-1))", "{s}.add_({x}.detach().mean())",
    "{s}[..., :1].fill_(0.3)", "{s}.lerp_(torch.ones_like({s}), 0.5)", "{s}.copy_({s}.cos() * 2)",
)  # fmt: skip


def watch(w: Writer, *names: str) -> None:
    """Let somebody see the memory of one of ``names`` (..., d), or of the stream, at times."""
    if w.extra.random() < 0.12 and not w.indent and not w.smooth:
        x = w.extra.choice([w.x, *names])
        w.outputs.append(w.new(w.extra.choice(READERS).format(x=x, d=w.d)))


def remember(w: Writer) -> None:
    """Let the stream depend on a state that is written to, at times; not where torch.compile's
    errors or bits are the measure, for it is wrong there."""
    if w.extra.random() > 0.12 or w.indent or w.smooth:
        return
    shape = w.extra.choice([(w.d,), (w.d,), (w.d, w.d)])
    state = w.input("state", f"randn({', '.join(map(str, shape))})", shape)
    write = w.extra.choice(WRITES)
    if w.extra.random() < 0.2:
        w.line(f"with torch.no_grad():\n    {write.format(s=state, x=w.x)}")
    old = w.new(w.extra.choice(OLD).format(s=state))
    if len(shape) == 2:
        forms = ("{x} @ {old}", "F.linear({x}, {old}.expand(" + f"{w.d}, {w.d}))")
    else:
        forms = ("{x} * {old}", "{x} + {old}", "({x} - {old}).tanh()", "{x} / (2 + {old} * {old})")
    w.become(w.extra.choice(forms).format(x=w.x, old=old))
    if w.extra.random() < 0.5:
        w.become(f"{w.x} * {old}.sigmoid()" if len(shape) == 1 else f"{w.x}.sin()")
    w.late.append(f"with torch.no_grad():\n    {write.format(s=state, x=w.x)}")
