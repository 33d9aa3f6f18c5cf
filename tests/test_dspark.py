"DSpark and DFlash on every family of targets: names, shapes, context rules, drafting"
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from deepspec.model import dspark
from deepspec.model.anchors import blocks_at
from deepspec.model.blocks import QWEN3_KEYS, Qwen3Rope
from deepspec.model.drafts import draft_from_target, load_draft
from deepspec.model.dspark import DSparkConfig
from deepspec.model.target import capture, toy_target

CHOICES = DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=2, block_size=4, markov_rank=8)
QWEN_LAYER = {f'{a}.weight' for a in ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj', 'self_attn.q_norm',
              'self_attn.k_norm', 'mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj', 'input_layernorm', 'post_attention_layernorm')}
TOP = {'embed_tokens.weight', 'lm_head.weight', 'fc.weight', 'hidden_norm.weight', 'norm.weight'}
MARKOV = {'markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'}
EXTRA = dict(vanilla=set(), gated={'markov_head.gate_proj.weight', 'markov_head.gate_proj.bias'}, rnn={'markov_head.joint_proj.weight', 'markov_head.joint_proj.bias'})
CONFIDENCE = {'confidence_head.proj.weight', 'confidence_head.proj.bias'}


def lively(draft, seed=5):
    "Random weights in every trained matrix, the sequential head included"
    g = torch.Generator().manual_seed(seed)
    for p in draft.parameters():
        if p.requires_grad and p.ndim > 1: p.data.copy_(torch.randn(p.shape, generator=g)*p.shape[-1]**-.5)
    return draft


def row(target, n=14, seed=0):
    ids = torch.randint(4, target.vocab_size, (2, n), generator=torch.Generator().manual_seed(seed))
    return ids, capture(target, ids, None, (0, 1))[0]


@pytest.mark.parametrize('head', ['vanilla', 'gated', 'rnn'])
def test_state_dict_names_are_the_public_ones(head):
    draft = draft_from_target(toy_target(), replace(CHOICES, markov_head_type=head))
    layers = {f'layers.{i}.{n}' for i in range(2) for n in QWEN_LAYER}
    assert set(draft.state_dict()) == TOP | layers | MARKOV | EXTRA[head] | CONFIDENCE


def test_shapes_of_the_heads_are_the_public_ones():
    target = toy_target()
    V,d,r = target.vocab_size,32,8
    shapes = {k: tuple(v.shape) for h in ('gated', 'rnn') for k,v in draft_from_target(target, replace(CHOICES, markov_head_type=h)).state_dict().items()}
    assert shapes['fc.weight'] == (d, 2*d)
    assert shapes['markov_head.markov_w1.weight'] == shapes['markov_head.markov_w2.weight'] == (V, r)
    assert shapes['markov_head.gate_proj.weight'] == (r, d + r) and shapes['markov_head.joint_proj.weight'] == (3*r, 2*r + d)
    assert shapes['confidence_head.proj.weight'] == (1, d + r)
    plain = draft_from_target(target, replace(CHOICES, confidence_head_with_markov=False))
    assert plain.state_dict()['confidence_head.proj.weight'].shape == (1, d)


def test_dflash_is_the_same_class_without_heads():
    draft = draft_from_target(toy_target(), replace(CHOICES, markov_head_type=None, enable_confidence_head=False))
    assert set(draft.state_dict()) == TOP | {f'layers.{i}.{n}' for i in range(2) for n in QWEN_LAYER}
    assert draft.config.markov_rank == 0


@pytest.mark.parametrize('kind', ['llama', 'qwen2', 'qwen3', 'gemma4', 'gemma4_unified'])
def test_a_saved_draft_loads_with_nothing_missing(kind, tmp_path):
    draft = lively(draft_from_target(toy_target(kind), CHOICES))
    draft.save_pretrained(tmp_path, dtype=torch.float32)
    again = load_draft(tmp_path)
    assert all(torch.equal(v, again.state_dict()[k]) for k,v in draft.state_dict().items())
    config = json.loads((tmp_path/'config.json').read_text())
    assert config['architectures'] == ['Gemma4DSparkModel' if kind.startswith('gemma4') else 'Qwen3DSparkModel']
    assert config['layer_types'] == ['full_attention']*2 and config['num_target_layers'] == 4 and config['tie_word_embeddings'] is False
    assert {'block_size', 'mask_token_id', 'target_layer_ids', 'num_anchors', 'enable_confidence_head', 'confidence_head_with_markov', 'markov_rank',
            'markov_head_type', 'num_hidden_layers'} <= set(config)
    assert AutoConfig.from_pretrained(tmp_path).markov_rank == 8
    ids,hidden = row(toy_target(kind))
    b = blocks_at(ids, torch.ones_like(ids), torch.tensor([0, 1]), torch.tensor([3, 9]), 4)
    with torch.no_grad(): assert torch.equal(draft(hidden, b), again(hidden, b))


def test_loading_is_strict(tmp_path):
    draft_from_target(toy_target(), CHOICES).save_pretrained(tmp_path)
    state = load_file(tmp_path/'model.safetensors')
    save_file({k: v for k,v in state.items() if k != 'lm_head.weight'} | {'extra.weight': torch.ones(1)}, tmp_path/'model.safetensors')
    with pytest.raises(ValueError, match='missing lm_head.weight; unexpected extra.weight'): load_draft(tmp_path)
    save_file(state | {'fc.weight': torch.ones(3, 3)}, tmp_path/'model.safetensors')
    with pytest.raises(ValueError, match=r'fc.weight has shape \(3, 3\), wanted \(32, 64\)'): load_draft(tmp_path)


@pytest.mark.parametrize('kind', ['llama', 'gemma4', 'gemma4_unified'])
@pytest.mark.parametrize('head', ['vanilla', 'gated', 'rnn'])
def test_drafting_is_the_training_forward(kind, head):
    "Greedy drafting, ragged rows, against logits of the training pass fed with the drafted tokens"
    target = toy_target(kind)
    draft = lively(draft_from_target(target, replace(CHOICES, markov_head_type=head)))
    ids,hidden = row(target)
    proposer = draft.proposer(2)
    proposer.extend([hidden[0, :5], hidden[1, :2]], [ids[0, 1:6], ids[1, 1:3]])
    proposer.extend([hidden[0, 5:5], hidden[1, 2:11]], [ids[0, :0], ids[1, 3:12]])
    anchors = torch.tensor([5, 11])
    got = proposer.propose(ids[[0, 1], anchors], 4, 0)
    prev = torch.cat([ids[[0, 1], anchors][:, None], got.tokens_BK[:, :-1]], 1)
    b = blocks_at(ids, torch.ones_like(ids), torch.tensor([0, 1]), anchors, 4)
    with torch.no_grad():
        h = draft(hidden, b)
        logits = draft.cap(draft.lm_head(h) + draft.markov_head.markov_w2(draft.markov_head.latents(h, prev)))
        confidence = draft.confidence_head(h, draft.markov_head.markov_w1(prev))
    assert torch.equal(got.tokens_BK, logits.argmax(-1))
    torch.testing.assert_close(got.confidence_logits_BK, confidence, rtol=1e-4, atol=1e-5)
    shorter = proposer.propose(ids[[0, 1], anchors], 2, 0)
    assert torch.equal(shorter.tokens_BK, got.tokens_BK[:, :2])


def test_the_cache_grows_without_forgetting():
    target = toy_target()
    draft = lively(draft_from_target(target, CHOICES))
    ids,hidden = row(target, 200)
    slow,fast = draft.proposer(1),draft.proposer(1)
    fast.extend([hidden[0, :190]], [ids[0, 1:191]])
    for i in range(0, 190, 19): slow.extend([hidden[0, i:i+19]], [ids[0, i+1:i+20]])
    a,b = (p.propose(ids[:1, 190], 4, .7, torch.Generator().manual_seed(0)) for p in (slow, fast))
    assert torch.equal(a.tokens_BK, b.tokens_BK)
    torch.testing.assert_close(a.probs_BKV, b.probs_BKV, rtol=1e-4, atol=1e-6)


def test_sampled_probabilities_are_the_ones_drawn_from():
    target = toy_target()
    draft = lively(draft_from_target(target, CHOICES)).to(torch.bfloat16)
    ids,hidden = row(target)
    proposer = draft.proposer(1)
    proposer.extend([hidden[0, :6]], [ids[0, 1:7]])
    p = proposer.propose(ids[:1, 6], 4, 1., torch.Generator().manual_seed(0))
    assert p.probs_BKV.dtype == torch.float32 and torch.allclose(p.probs_BKV.sum(-1), torch.ones(1, 4), atol=1e-6)
    assert (p.probs_BKV.gather(2, p.tokens_BK[..., None]) > 0).all()


@pytest.mark.parametrize('kind', ['llama', 'gemma4', 'gemma4_unified'])
def test_rope_stays_fp32_and_matches_the_fp32_model(kind):
    draft = draft_from_target(toy_target(kind), CHOICES)
    before = {n: b.clone() for n,b in draft.rope.named_buffers()}
    draft.to(torch.bfloat16).to(torch.float32)
    assert before and all(torch.equal(b, before[n]) for n,b in draft.rope.named_buffers())


def test_far_positions_keep_their_angles_in_bf16():
    config = draft_from_target(toy_target(), CHOICES).config
    far = torch.tensor([4096])
    cos = [Qwen3Rope(config).to(dtype).angles(torch.zeros(1, dtype=torch.float32), far)[0] for dtype in (torch.float32, torch.bfloat16)]
    assert torch.equal(*cos)


def test_a_qwen3_shape_copies_what_the_target_has():
    target = toy_target('llama')
    config = draft_from_target(target, CHOICES).config
    assert all(getattr(config, k) == getattr(target.config, k) for k in QWEN3_KEYS) and config.head_dim == 8


def test_gradients_reach_every_trained_weight():
    for kind in ('llama', 'gemma4'):
        target = toy_target(kind)
        draft = lively(draft_from_target(target, CHOICES))
        ids,hidden = row(target)
        h = draft(hidden, blocks_at(ids, torch.ones_like(ids), torch.tensor([0, 1]), torch.tensor([4, 7]), 4))
        h.sum().backward()
        reached = {n for n,p in draft.named_parameters() if p.grad is not None and p.grad.any()}
        assert {n for n,p in draft.named_parameters() if p.requires_grad and n.startswith(('layers', 'fc', 'norm', 'hidden_norm'))} <= reached
        assert not {'embed_tokens.weight', 'lm_head.weight'} & reached


def test_gradient_checkpointing_by_parts_changes_nothing(monkeypatch):
    "Parts of two blocks, groups that end inside a row, and the same gradients"
    monkeypatch.setattr(dspark, 'CHECKPOINTED_BLOCKS', 2)
    target = toy_target()
    draft = lively(draft_from_target(target, CHOICES)).train()
    ids,hidden = row(target)
    b = blocks_at(ids, torch.ones_like(ids), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 4, 9, 3, 7]), 4)
    grads = []
    for draft.gradient_checkpointing in (False, True):
        draft.zero_grad()
        draft(hidden, b).square().sum().backward()
        grads.append({n: p.grad.clone() for n,p in draft.named_parameters() if p.grad is not None})
    for n,g in grads[0].items(): torch.testing.assert_close(grads[1][n], g, rtol=1e-4, atol=1e-4)
