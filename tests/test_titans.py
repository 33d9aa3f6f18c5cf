"QwenTitansForBABILong over a grid of families, depths and lengths"
import pytest
import torch

from deepspec.longmem.memory import MemoryConfig
from deepspec.longmem.model import QwenTitansForBABILong, load_memory_state, memory_state_dict, tiny_qwen

DEPTHS = [dict(), dict(depth=2, momentum=True, hidden_dim=8)]


def make(family='qwen3', layers=(0, 1), from_scratch=True, memory=DEPTHS[0], **options):
    "A small model with memories that speak"
    torch.manual_seed(0)
    rule = MemoryConfig(num_heads=2, head_dim=8, subchunk=4, **memory)
    qwen = tiny_qwen(family, vocab_size=300, hidden_size=16)
    return QwenTitansForBABILong(qwen, layers, rule, chunk_size=16, from_scratch=from_scratch, **options).eval()


def tokens(rows, length, seed=1):
    return torch.randint(0, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **kw):
    "All positions of one row"
    longer = torch.cat([ids, ids[:, :1]], 1)
    return model(longer, labels=longer, **kw).logits_NV


@pytest.mark.parametrize('family', ['qwen3', 'qwen2'])
def test_plain_qwen_at_step_0_and_block_diagonal_without_memory(family):
    plain, ids = tiny_qwen(family, vocab_size=300, hidden_size=16), tokens(1, 40)
    block = torch.arange(40)//16
    hidden = (block[:, None] != block) | torch.ones(40, 40).triu(1).bool()
    bias = torch.zeros(40, 40).masked_fill(hidden, torch.finfo().min)
    want = plain(ids, attention_mask=bias[None, None], position_ids=(torch.arange(40) % 16)[None]).logits[0]
    torch.testing.assert_close(logits(make(family, from_scratch=False), ids), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(make(family), ids, memory='off'), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(make(family), ids, memory='reset'), want, rtol=1e-4, atol=1e-5)
    assert (logits(make(family), ids) - want).abs().max() > 1e-3


@pytest.mark.parametrize('family', ['qwen3', 'qwen2'])
@pytest.mark.parametrize('memory', DEPTHS)
@pytest.mark.parametrize('length', [1, 15, 16, 17, 32])
def test_decoding_is_the_full_forward(family, memory, length):
    model, text = make(family, memory=memory), tokens(1, length)
    for token in model.generate(text, 20):
        assert token == logits(model, text)[-1].argmax()
        text = torch.cat([text, torch.tensor([[token]])], 1)


@pytest.mark.parametrize('memory', DEPTHS)
def test_batch_padding_and_truncation(memory):
    model, ids = make(memory=memory), tokens(2, 50)
    both = model(ids, labels=ids)
    for row in range(2):
        one = model(ids[row:row + 1], labels=ids[row:row + 1])
        torch.testing.assert_close(both.logits_NV[both.rows_N == row], one.logits_NV, rtol=1e-4, atol=1e-5)
    mask = (torch.arange(50) < torch.tensor([[50], [20]])).long()
    padded = model(torch.where(mask == 1, ids, 9), mask, torch.where(mask == 1, ids, -100))
    short = model(ids[1:, :20], labels=ids[1:, :20])
    torch.testing.assert_close(padded.logits_NV[padded.rows_N == 1], short.logits_NV, rtol=1e-4, atol=1e-5)
    for a, b in zip(padded.states[0], short.states[0]):
        if a is not None: torch.testing.assert_close(a[1:], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('memory', DEPTHS)
@pytest.mark.parametrize('place', [1, 16, 17, 47])
def test_checkpointed_gradients_and_labels_at_borders(memory, place):
    ids, labels = tokens(1, 48), torch.full((1, 48), -100)
    labels[0, place] = ids[0, place]
    found = []
    for checkpointing in (False, True):
        model = make(memory=memory, checkpointing=checkpointing)
        out = model(ids, labels=labels)
        assert out.num_labels == 1 and out.targets_N.tolist() == [ids[0, place]]
        want = torch.nn.functional.cross_entropy(logits(model, ids[:, :place])[-1:], ids[0, place:place + 1])
        torch.testing.assert_close(out.loss_sum, want, rtol=1e-4, atol=1e-5)
        out.loss.backward()
        assert all(p.grad is not None for p in model.parameters())  # the tie: every weight, wherever the answer is
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_no_labels_is_a_connected_zero():
    model = make()
    out = model(tokens(1, 40))
    assert out.loss.item() == 0 and out.logits_NV.shape == (0, 300)
    out.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for n, p in model.named_parameters() if 'memory' in n)


def test_state_is_a_value():
    model, ids = make(), tokens(1, 48)
    whole, first = model(ids).states, model(ids[:, :16]).states
    before = first[0].w1.clone()
    rest = model(ids[:, 16:], states=first).states
    torch.testing.assert_close(rest[1].w1, whole[1].w1, rtol=1e-4, atol=1e-6)
    assert first[0].w1.equal(before)
    assert model(ids, states=first, memory='read_only').states[0].w1.equal(before)


def test_errors_name_what_is_wrong(tmp_path):
    model, ids = make(), tokens(1, 20)
    with pytest.raises(ValueError, match='expected one of on, off'): model(ids, memory='maybe')
    with pytest.raises(ValueError, match='labels has shape'): model(ids, labels=ids[:, :3])
    with pytest.raises(ValueError, match='layers 0 to 1'): make(layers=(5,))
    with pytest.raises(ValueError, match='prompt is empty'): model.generate(ids[:, :0])
    torch.save(dict(memory_state_dict=memory_state_dict(model.state_dict()), global_step=1), tmp_path/'m.pt')
    with pytest.raises(ValueError, match='has unknown layers.1'): load_memory_state(make(layers=(0,)), tmp_path/'m.pt')
    with pytest.raises(ValueError, match='lacks layers.0.long_term_memory.w1'):
        load_memory_state(make(memory=DEPTHS[1]), tmp_path/'m.pt')
    with pytest.raises(ValueError, match='no such file'): load_memory_state(model, tmp_path/'absent.pt')
