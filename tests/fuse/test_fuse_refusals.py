# SPDX-License-Identifier: Apache-2.0
"""What may not run on a tile stays outside, with the reason in the report, and nothing changes.
What is too heavy for shared memory gives up its heaviest tile, and what reads it, alone."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, randn, reasons, side_by_side
from harness import Harness

from coda_inductor.fuse.tile import MAX_TILE_OPERANDS, MAX_VECTORS
from coda_inductor.lowering import driver
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.refusal import refuse
from coda_inductor.sites import Sites

B, T, N, K = 2, 3, 10, 8
LINEAR = ((B, T, K), (N, K))


def linear(*more):
    return [randn(*shape) for shape in (*LINEAR, *more)]


def of_their_own(table):
    """What :func:`check` takes."""
    function, tensors = side_by_side([each for each, *_ in table.values()], *LINEAR)
    return function, *tensors


# Function of a (B, T, K) input and an (N, K) weight -> reason why its GEMM absorbs nothing.
NOTHING_ABSORBED = {
    "scan": (lambda x, w: F.linear(x, w).cumsum(0), "cumsum"),
    "transpose": (lambda x, w: F.linear(x, w).transpose(0, 1).contiguous(), "transposes the tile"),
    "heads": (lambda x, w: F.linear(x, w).view(B, T, 2, 5).sum(2), "changes the tile's shape"),
    "column sum": (lambda x, w: F.linear(x, w).sum(0), "does not reduce one row"),
    "full sum": (lambda x, w: F.linear(x, w).sum(), "is not elementwise"),
    "nothing there": (F.linear, "the caller reads it"),
    "part of the batch": (lambda x, w: F.linear(x, w) + x[:, :1, :1] * w[:, 0], "broadcasts over"),
    "mask": (lambda x, w: torch.where(x[..., :1] > 0, F.linear(x, w), 0.0), "torch.bool"),
    "integer tile": (lambda x, w: F.linear(x, w) * x.new_ones(N).int(), "not a floating type"),
    "bool result": (lambda x, w: F.linear(x, w) > 0, "not a floating tile"),
    "unknown power": (lambda x, w: F.linear(x, w) ** 1.7, "is not in the epilogue vocabulary"),
    "alpha": (lambda x, w: torch.addmm(w[:, 0], x[0], w.t(), alpha=2).relu(), "alpha/beta"),
    # atan is no epilogue op; Inductor fuses exp with it.
    "a store": (lambda x, w: torch.atan((z := F.linear(x, w)).exp()) - z, "only adds a store"),
    # A maximum's gradient compares so: in a tile, of unrounded values, it would hold nowhere.
    "equal": (lambda x, w: torch.where((z := F.linear(x, w)) == w[:, 0], z, -z), "vocabulary"),
}  # fmt: skip


def test_gemm_that_absorbs_nothing_is_left_alone():
    sites = check(*of_their_own(NOTHING_ABSORBED)).report.sites
    for (name, (_, reason)), site in zip(NOTHING_ABSORBED.items(), sites, strict=True):
        assert site.how == "unfused", name
        assert reason in site.reason, name


def through(outside):
    """Through what stays outside and back: absorbing the sum would make a cycle."""
    return lambda x, w: (z := F.linear(x, w).relu()) + outside(z)


# Function -> what of it runs on the tile, and what does not.
PARTLY = {
    "softmax": (through(lambda z: z.softmax(-1)), "relu", "add"),
    "reversed": (through(lambda z: z.flip(-1) * 2), "relu", "add"),
    "statistics": (lambda x, w: (z := F.linear(x, w)) - z.amax(-1, keepdim=True), "amax", "sub"),
    "a bool that others read": (
        lambda x, w: (torch.where(p := (z := F.linear(x, w).tanh()) > 0, z, 0.0), p),
        "tanh", "where",
    ),
}  # fmt: skip


def test_a_part_stays_outside_but_the_rest_fuses():
    sites = check(*of_their_own(PARTLY)).fused
    for (name, (_, inside, outside)), site in zip(PARTLY.items(), sites, strict=True):
        assert inside in site.absorbed, name
        assert outside not in site.absorbed, name


def test_at_most_three_tiles_are_stored():
    def function(x, w):
        z = F.linear(x, w)
        return [value.cumsum(0) for value in (z, z.sin(), z.cos(), z.tanh(), z.exp())]

    (site,) = check(function, *linear()).fused
    assert len(site.program.stores) == 3


def test_a_gemm_with_nothing_to_absorb_is_no_failure(monkeypatch):
    """Weight gradients of a ragged number of rows: no kernel, and none wanted."""
    odd = refuse("unaligned", "an odd shape", failure=True)
    monkeypatch.setattr(Sites, "refusal", lambda *_: odd)
    assert reasons(check(F.linear, *linear())) == "nothing to absorb, and an odd shape"
    with pytest.raises(Exception, match="an odd shape"):
        check(lambda x, w: F.linear(x, w).relu(), *linear())


def test_scalar_on_another_device_is_no_operand():
    harness = Harness()
    x, w = torch.empty(4, K, device="meta"), torch.empty(N, K, device="meta")
    harness.run(lambda x, w, s: F.linear(x, w) * s, x, w, torch.tensor(2.0))
    assert "is on cpu, the GEMM on meta" in reasons(harness)


def test_failure_while_planning_costs_that_site_alone(monkeypatch):
    grow = driver.grow

    def broken(anchors, *how):
        if anchors[0].meta["val"].shape[-1] == N:
            raise IndexError("a bug of ours")
        return grow(anchors, *how)

    def two_layers(x, w):
        return F.linear(F.linear(x, w).relu(), w.t()).tanh()

    monkeypatch.setattr(driver, "grow", broken)
    harness = check(two_layers, *linear(), strict=False)
    assert [site.how for site in harness.report.sites] == ["unfused", "reference"]
    assert "IndexError in our own passes: a bug of ours" in reasons(harness)


AWKWARD = (
    lambda x, w: F.linear(x, w).masked_fill(F.linear(x, w) > 0, float("nan")),
    lambda x, w: torch.logical_and(F.linear(x, w), x[..., :1]).to(x.dtype),
    lambda x, w: (F.linear(x, w) > 0) == (F.linear(x, w) > 1),
    lambda x, w: F.linear(x, w).clamp(w[:, 0], w[:, 1]),
    lambda x, w: F.linear(x, w) * True, lambda x, w: 2 ** F.linear(x, w),
    lambda x, w: F.linear(x, w).sum(-1, dtype=torch.float32),
    lambda x, w: F.linear(x, w).to(torch.bool), lambda x, w: (F.linear(x, w) * 1j).abs(),
    lambda x, w: F.normalize(F.linear(x, w), dim=-1),
    lambda x, w: torch.cat([F.linear(x, w), F.linear(x, w) + 1], -1),
    lambda x, w: F.linear(x, w).expand(4, B, T, N).relu(),
    lambda x, w: F.linear(x, w).flatten().view(B, T, N).relu() * F.linear(x, w),
)  # fmt: skip


def test_awkward_neighbours_never_fail_and_never_change_the_value():
    """In one graph, each with a weight of its own. Strict: an exception of ours is an error."""
    check(*of_their_own(dict(enumerate((each,) for each in AWKWARD))))


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(
    ("shape", "most"), [((B, T, N), MAX_TILE_OPERANDS), ((N,), MAX_TILE_OPERANDS + MAX_VECTORS)]
)
def test_the_operand_that_is_one_too_many_stays(shape, most, more):
    def function(x, w, *others):
        y = F.linear(x, w)
        for other in others:
            y = y.sigmoid() * other  # in turn: a sum of them could be made elsewhere
        return y

    (site,) = check(function, *linear(*[shape] * (most + more))).fused
    assert len(site.program.operands) == most
    assert any("operands" in stop.text for stop in site.stops) == bool(more)


def test_a_pair_reads_no_tile():
    def function(x, gate, up, tile):
        return F.silu(F.linear(x, gate)) * F.linear(x, up) + tile

    (site,) = check(function, *linear((N, K), (B, T, N))).fused
    assert site.program.paired
    assert not site.program.operands
    assert any("a paired tile reads only" in stop.text for stop in site.stops)


def residual(x, w, narrow, wide):
    y = x @ w + narrow  # then something that reads a wider tile
    return y, (y * wide).sum(-1)


def stores(x, w, *_):
    y = x @ w
    return torch.sigmoid(y), torch.exp(torch.sin(y)), torch.tanh(y)


#: A function, the dtype of its product, bytes of tiles an element that kernels may have, what is
#: absorbed then and how many tiles are stored.
ROOM = [
    (residual, torch.bfloat16, 8, ("add", "mul", "sum"), 1),
    (residual, torch.bfloat16, 7, ("add",), 1),
    (residual, torch.bfloat16, 3, (), 0),
    (stores, torch.float64, 16, ("sigmoid",), 2),  # nothing is loaded
]


@pytest.mark.parametrize(("function", "dtype", "room", "absorbed", "stored"), ROOM)
def test_the_heaviest_tile_leaves_first(function, dtype, room, absorbed, stored, monkeypatch):
    def fits(_self, site):
        tiles = *site.program.loads, *site.program.stores
        return sum(WIDTHS[t.dtype] for t in tiles) <= room

    monkeypatch.setattr(Sites, "fits", fits)
    wide = {torch.bfloat16: torch.float32}.get(dtype, dtype)
    tensors = (randn(*shape).to(dtype) for shape in ((6, 16), (16, 24), (6, 24)))
    (site,) = check(function, *tensors, randn(6, 24, dtype=wide)).report.sites
    assert (site.absorbed if site.fused else ()) == absorbed
    assert (len(site.program.stores) if site.fused else 0) == stored
    why = {why.code for why in (*site.stops, site.refusal) if why}
    assert ("shared-memory" in why) == (room != 8)
