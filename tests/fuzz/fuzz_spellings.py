# SPDX-License-Identifier: Apache-2.0
"""How people write what Transformers are made of: one table a thing, each entry an expression.

In an entry {x} and {y} are streams (..., D), {g} and {u} the halves of a gate, {w} a weight vector
or None, {b} a bias vector or None, {eps} a number, {d} the width. Entries that only look like the
idiom stand among the others: the matcher must tell them apart.
"""

RMS_NORMS = (
    "F.rms_norm({x}, ({d},), {w}, {eps})",
    "F.rms_norm({x}, ({d},), {w})",
    "F.rms_norm({x}, ({d},), {w}, {eps})",
    "F.rms_norm({x}.to(high), ({d},), {w}.to(high), {eps}).to(low)",
    "{w} * ({x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + {eps}))",
    "({x} * torch.rsqrt(({x} * {x}).mean(-1, True) + {eps})) * {w}",
    "{w} * ({x} / torch.sqrt({x}.square().mean(-1, keepdim=True) + {eps}))",
    "{x} * torch.rsqrt(torch.mean({x} ** 2, dim=-1, keepdim=True) + {eps}) * (1 + {w})",
    "{w} * ({x}.to(high) * torch.rsqrt("
    "{x}.to(high).pow(2).mean(-1, keepdim=True) + {eps})).to(low)",
    "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + {eps})",
    "({x}.to(high) * (1.0 + {w}.to(high)) * ({x}.to(high).square().mean(-1, True) + {eps}).rsqrt())"
    ".to(low)",
)
LAYER_NORMS = (
    "F.layer_norm({x}, ({d},), {w}, {b}, {eps})",
    "F.layer_norm({x}, ({d},), {w}, {b}, {eps})",
    "F.layer_norm({x}, ({d},), {w}, None, {eps})",
    "F.layer_norm({x}, ({d},))",
    "F.layer_norm({x}.to(high), ({d},), {w}.to(high), {b}.to(high), {eps}).to(low)",
    "({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt("
    "{x}.var(-1, keepdim=True, unbiased=False) + {eps}) * {w} + {b}",
    "{w} * (({x} - {x}.mean(-1, True)) / torch.sqrt("
    "({x} - {x}.mean(-1, True)).pow(2).mean(-1, True) + {eps})) + {b}",
)
#: Not norms, or not along the rows.
NEARLY_NORMS = (
    "{w} * ({x} * torch.rsqrt({x}.pow(2).mean(-2, keepdim=True) + {eps}))",
    "{w} * ({x} * torch.rsqrt({x}.pow(2).sum(-1, keepdim=True) + {eps}))",
    "{x} * torch.rsqrt({x}.abs().mean(-1, keepdim=True) + {eps}) * {w}",
    "{x} / ({x}.pow(2).mean(-1, keepdim=True).sqrt() + {eps})",
    "F.normalize({x}, dim=-1) * {w}",
    "({x} - {x}.mean(-1, True)) * torch.rsqrt({x}.pow(2).mean(-1, True) + {eps}) * {w}",
    "F.group_norm({x}.reshape(-1, {d}), 1, {w}, {b}, {eps}).view({x}.shape)",
)

#: {n} (..., k) times {w} (out, k) or {wt} (k, out), with a bias {b} (out,).
LINEARS = (
    "F.linear({n}, {w})", "F.linear({n}, {w})", "F.linear({n}, {w})", "F.linear({n}, {w})",
    "F.linear({n}, {w}, {b})", "F.linear({n}, {w}, {b})", "{n} @ {w}.t()", "{n} @ {wt}",
    "torch.matmul({n}, {w}.mT) + {b}",
    "torch.addmm({b}, {n}.reshape(-1, {k}), {wt}).view(*{n}.shape[:-1], {out})",
    "torch.addmm({b}, {n}.reshape(-1, {k}), {wt}, beta=0.5, alpha=2).view(*{n}.shape[:-1], {out})",
    "torch.mm({n}.reshape(-1, {k}), {wt}).unflatten(0, {n}.shape[:-1])",
    "({n}.reshape(-1, {k}) @ {w}.t()).view(*{n}.shape[:-1], {out})",
    "{n}.matmul({wt}).add_({b})",
)  # fmt: skip
#: Of a stream with three dimensions; what these read of a norm keeps it from being deferred.
BATCHED = (
    'torch.einsum("...d,hd->...h", {n}, {w})', 'torch.einsum("...d,dh->...h", {n}, {wt})',
    "torch.bmm({n}, {wt}.expand({n}.shape[0], {k}, {out}))",
    'torch.einsum("btd,hd->bth", {n}, {w})',
    "torch.baddbmm({b}, {n}, {wt}.expand({n}.shape[0], {k}, {out}))",
)  # fmt: skip

GATES = (
    "F.silu({g}) * {u}", "F.silu({g}) * {u}", "F.silu({g}) * {u}", "{u} * F.silu({g})",
    "{g} * torch.sigmoid({g}) * {u}", "{u} * ({g} * {g}.sigmoid())",
    "{g} / (1 + torch.exp(-{g})) * {u}", "F.gelu({g}) * {u}",
    'F.gelu({g}, approximate="tanh") * {u}', "torch.relu({g}) * {u}", "torch.tanh({g}) * {u}",
    "F.glu(torch.cat([{u}, {g}], -1))", "F.softplus({g}) * {u}", "F.relu({g}).square() * {u}",
    "{g} * torch.sigmoid(1.702 * {g}) * {u}", "F.mish({g}) * {u}", "F.elu({g}) * ({u} + 1)",
    "{g} * {u}", "torch.lerp({g}, {u}, 0.25)", "F.silu({g}.to(high)).to(low) * {u}",
    "F.silu({g}) * F.silu({u})", "F.silu({g}) * {g}",
)  # fmt: skip
#: The two halves of {z} (..., 2 * {h}).
HALVES = (
    "{g}, {u} = {z}.chunk(2, -1)", "{g}, {u} = {z}.split([{h}, {h}], -1)",
    "{g}, {u} = {z}[..., :{h}], {z}[..., {h}:]",
    "{g}, {u} = {z}.unflatten(-1, (2, {h})).unbind(-2)",
    "{u}, {g} = torch.tensor_split({z}, 2, -1)", "{g}, {u} = {z}[..., ::2], {z}[..., 1::2]",
)  # fmt: skip

ACTIVATIONS = (
    "F.silu({x})", "F.gelu({x})", 'F.gelu({x}, approximate="tanh")', "torch.relu({x})",
    "torch.relu({x}).square()", "{x}.sigmoid()", "{x}.tanh()", "F.leaky_relu({x}, 0.2)",
    "F.softplus({x})", "0.5 * {x} * (1 + torch.erf({x} / 1.4142135623730951))", "F.hardswish({x})",
    "F.silu({x}) * F.silu({x})", "F.relu({x}, inplace=True)",
)  # fmt: skip

RESIDUALS = (
    "{x} + {y}", "{x} + {y}", "{x} + {y}", "{x} + {y}", "{y} + {x}", "{y} + {x}",
    "torch.add({x}, {y})",
    "{x} + 0.5 * {y}", "{x}.add({y}, alpha=2)", "{x} + {y} * {w}", "{x} + {y}.clone().mul_(0.5)",
    "{y}.add_({x})", "torch.addcmul({x}, {y}, {w})", "{x} + {y} * {number}", "{x} - {y}",
    "({x}.to(high) + {y}.to(high)).to(low)", "{x} * 0.5 + {y} + {y} * {w}", "{x} + {y} + {w}",
    "{x} + F.dropout({y}, 0.0)", "torch.lerp({x}, {y}, 0.5)",
)  # fmt: skip
#: A term occurs twice.
TWICE = ("({x} + {y}) + {x}", "{x} + ({y} + {y})", "({y} + {x}) + {y}")
#: Tensors of their own, equal to {x}.
COPIES = ("{x} + 0", "{x} * 1", "{x}.clone()")

#: Work on a stream between blocks.
ELEMENTWISE = (
    "torch.sin({x})", "-{x}", "{x} * 0.5 + 1", "{x}.clamp(-1, 1)", "{x} * {w}", "{x} * {number}",
    "{x} * {x}[..., :1]", "torch.maximum({x}, {y})", "{x} * {y}", "{w} - {x}",
    "{x} * torch.full((), 3.7, dtype=torch.int64)", "{x} * torch.full((), 3, dtype=torch.uint8)",
    "{x} + torch.full((), -1, dtype=torch.uint8)", "{x} * torch.tensor(2)", "{x}.to(high).to(low)",
    "{x}.to(torch.float32).to(low)", "{x} * torch.ones({d}, dtype=torch.bool)",
    "{x}.to(high).sigmoid().to(low)", "{x} - {x}.mean(-1, keepdim=True)",
    "{x} * {x}.sum(-1, keepdim=True).tanh()", "{x} + torch.arange({d}).to(low)",
    "{x}.nan_to_num(0.5)", "{x} * torch.full_like({x}, 2)",
)  # fmt: skip
#: Only where single values need not be smooth.
JUMPS = (
    "torch.where({x} > 0, {x}, -0.1 * {x})", "{x} * ({x} > 0)", "{x}.masked_fill({x} > 1, 0.5)",
    "{x}.round() + {x}", "torch.where({x} > {y}, {x}, {y} * 2)", "{x} * {x}.to(torch.int64)",
)  # fmt: skip
VIEWS = (
    "{x}.transpose(0, 1).contiguous().transpose(0, 1)", "{x}.flip(-1)", "{x}.roll(1, 0)",
    "{x}.flatten(0, -2).sin().view({x}.shape)", "torch.cat([{x}[..., 1:], {x}[..., :1]], -1)",
    "{x}.transpose(0, -1).clone().transpose(0, -1)", "{x}.unsqueeze(1).expand_as({x}.unsqueeze(1))"
    ".squeeze(1)", "{x}.cumsum(0)", "{x}.softmax(-1)", "{x}.repeat_interleave(2, -1)[..., ::2]",
    "torch.stack([{x}, {y}]).sum(0)", "{x}.reshape(-1, 1).view({x}.shape)",
    "{x}.index_select(-1, torch.arange({d} - 1, -1, -1))",
)  # fmt: skip
#: Statements that change a copy or a value nobody else reads: {v} becomes another stream.
IN_PLACE = (
    "{v} = {x}.clone()\n{v}.mul_(0.5).add_({y})", "{v} = {x} + 1\n{v}[..., 0] = 0",
    "{v} = {x} * 1\n{v} += {v}.mean(-1, keepdim=True)", "{v} = {x}.clone()\n{v}[..., :1].zero_()",
    "{v} = torch.empty_like({x})\n{v}.copy_({x})", "{v} = torch.zeros_like({x})\n{v} += {x}",
    "{v} = {x} + 0.5\n{v}.flatten()[:1].fill_(2)", "{v} = {x} * 2\n{v}.masked_fill_({v} == 0, 1)",
)  # fmt: skip

#: The other columns of {t} (..., width), with their signs; {half} is half of the width. Then
#: rotations of {t} by {cos} and {sin}. The last of each is another op.
TURNED = (
    "torch.cat([-{t}[..., {half}:], {t}[..., :{half}]], -1)",
    "torch.stack([-{t}[..., 1::2], {t}[..., ::2]], -1).flatten(-2)",
    "torch.cat([{t}[..., {half}:], -{t}[..., :{half}]], -1)",
)
ROTATIONS = (
    "{t} * {cos} + {turned} * {sin}", "{t} * {cos} + {turned} * {sin}",
    "({sin} * {turned} + {t}.to(high) * {cos}).to(low)", "{t} * {cos} - {turned} * {sin}",
)  # fmt: skip

OUTPUTS = (
    "{x}", "{x}", "{x}", "{x}.sum(-1)", "{x}.amax(-1)", "{x}.mean(-1, keepdim=True)", "{x} > 0",
    "{x}.flatten(0, -2)", "{x}.transpose(0, -1)", "{x}.sum()", "{x}.to(high)", "{x}[..., :1]",
    "torch.sum({x}, dim=[])", "({x}.flatten(0, -2).squeeze(0) * 2).sum(dim=[])",
    "{x}.flatten(0, -2).sum(0)", "{x}.pow(2).mean(-1)", "{x}.detach()", "torch.logsumexp({x}, -1)",
)  # fmt: skip

#: Rows of logits {z} (R, V) against {t} (R,).
LOSSES = (
    "F.cross_entropy({z}, {t})", "F.cross_entropy({z}.to(high), {t})",
    "F.cross_entropy({z}.to(high), {t}, ignore_index=3)",
    "F.cross_entropy({z}.to(high), {t}, label_smoothing=0.1)",
    "F.cross_entropy({z}, {t}, label_smoothing=0.2, ignore_index=3, reduction='sum') / 7",
    "F.cross_entropy({z}.to(high), {t}, reduction='none').sum()",
    "F.cross_entropy({z}, {t}, reduction='none') * {z}[:, 0]",
    "F.nll_loss(F.log_softmax({z}.to(high), -1), {t})",
    "F.cross_entropy({z}.to(high), {t}) + 1e-2 * torch.logsumexp({z}.to(high), -1).square().mean()",
    "-torch.log_softmax({z}, -1).gather(1, {t}[:, None]).mean()",
    "(torch.logsumexp({z}, -1) - {z}.gather(1, {t}[:, None]).squeeze(1)).mean()",
    "F.mse_loss({z}, torch.ones_like({z}))",
)  # fmt: skip
#: From logits to logits.
CAPS = ("3 * torch.tanh({z} / 3)", "torch.tanh({z} * 0.5) * 2", "{z} * 8", "{z} / 1.5")

#: (T, T) masks, from the text of T.
MASKS = (
    "torch.ones({t}, {t}, dtype=torch.bool).tril()",
    "torch.tril(torch.ones({t}, {t})) > 0",
    "torch.arange({t})[None, :] <= torch.arange({t})[:, None]",
    "torch.full(({t}, {t}), float('-inf'), dtype=low).triu(1)",
    "torch.zeros({t}, {t}, dtype=low)",
    "(torch.arange({t})[:, None] - torch.arange({t})[None, :]).abs() <= 1",
    "(torch.arange({t})[:, None] >= torch.arange({t})[None, :])"
    " & (torch.arange({t})[:, None] - torch.arange({t})[None, :] < 2)",
    "torch.zeros({t}, {t}, dtype=low).masked_fill(torch.ones({t}, {t}).triu(1).bool(), -torch.inf)",
)
