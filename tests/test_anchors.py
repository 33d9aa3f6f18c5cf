"Anchors and labels under random masks, against a definition in plain loops"
import pytest
import torch
from hypothesis import given, settings, strategies as st

from deepspec.model.anchors import eligible_anchors, make_blocks, position_generator, sample_anchors


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_blocks_follow_the_definition(mask, num_anchors, block_size, seed):
    mask_BS = torch.tensor(mask).to(torch.uint8)
    ids = torch.arange(mask_BS.numel()).view_as(mask_BS)
    b = make_blocks(ids, mask_BS, num_anchors, block_size, seed, range(len(mask)))
    for row in range(len(mask)):
        valid = [a for a in range(8) if mask[row][a] and mask[row][a+1]]
        got = b.anchors_N[b.rows_N == row].tolist() if b.supervised_NK.any() else []
        assert len(got) == min(num_anchors, len(valid)) and set(got) <= set(valid) and got == sorted(set(got))
    for n in range(len(b)):
        row,a = b.rows_N[n].item(),b.anchors_N[n].item()
        alive = b.supervised_NK.any().item()
        for k in range(block_size):
            inside = a + 1 + k < 9
            alive = alive and inside and bool(mask[row][a+1+k])
            assert b.supervised_NK[n, k].item() == alive
            if inside: assert b.labels_NK[n, k] == ids[row, a+1+k] and b.prev_NK[n, k] == ids[row, a+k]


def test_every_eligible_position_is_equally_likely():
    eligible,counts = eligible_anchors(torch.ones(1, 11))[0],torch.zeros(11)
    for p in range(600): counts[sample_anchors(eligible, 3, position_generator(0, p))] += 1
    assert counts[10] == 0
    assert ((counts[:10] - 180).abs() < 5*(600*.3*.7)**.5).all()


def test_the_draw_is_a_function_of_seed_and_position():
    mask = torch.ones(4, 40)
    ids = torch.zeros(4, 40, dtype=torch.long)
    whole = make_blocks(ids, mask, 5, 3, 1, [3, 8, 2, 9])
    single = make_blocks(ids[:1], mask[:1], 5, 3, 1, [2])
    assert whole.anchors_N[whole.rows_N == 2].tolist() == single.anchors_N.tolist()
    assert make_blocks(ids[:1], mask[:1], 5, 3, 2, [2]).anchors_N.tolist() != single.anchors_N.tolist()
    with pytest.raises(ValueError): make_blocks(ids, mask, 5, 3, 1, [1, 2])
