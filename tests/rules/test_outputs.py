"""What leaves a fused graph is as independent as what left the original one: a caller may write to
one result without changing another."""

import torch
from harness import Harness

W = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()


def several(x):
    y = torch.relu(x @ W)
    return y, y.clone(), y.float().bfloat16(), y.float(), y.view(2, 2, 8)


def test_copies_are_copies_and_views_are_views():
    x = torch.randn(4, 16).bfloat16()
    ours, eager = Harness().run(several, x), several(x)
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs)
    for outputs in (ours, eager):
        first, *copies, view = outputs
        first.zero_()
        assert all(copy.abs().sum() > 0 for copy in copies)
        assert view.abs().sum() == 0


def test_a_step_that_does_nothing_is_not_absorbed():
    def twice(x):
        y = torch.relu(x @ W)
        return y, torch.pow(y, 1)

    first, second = Harness().run(twice, torch.randn(4, 16).bfloat16())
    assert first.data_ptr() != second.data_ptr()


def test_one_value_in_two_half_types_is_stored_wide():
    def both(x):
        y = torch.sigmoid(x @ W)
        return y, y.to(torch.float16)

    x = torch.randn(4, 16).bfloat16()
    harness = Harness()
    ours = harness.run(both, x)
    assert [s.dtype for s in harness.fused[0].program.stores] == ["float32"]
    assert [t.dtype for t in ours] == [torch.bfloat16, torch.float16]
    exact = torch.sigmoid((x @ W).float())
    assert (ours[1].float() - exact).abs().max() < 1e-3  # a detour over bfloat16 costs 4e-3
