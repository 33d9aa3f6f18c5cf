"Eagle3 on every family: names, the training-time test against a slow definition, drafting"
import json

import pytest
import torch

from deepspec.eval.decode import DecodeConfig, generate, speculative_generate
from deepspec.model.drafts import draft_from_target, load_draft
from deepspec.model.eagle3 import Eagle3Config
from deepspec.model.target import capture, toy_target

CHOICES = Eagle3Config(target_layer_ids=(0, 1), ttt_length=3)
LAYER = {f'{a}.weight' for a in ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj', 'self_attn.q_norm', 'self_attn.k_norm',
         'mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj', 'hidden_norm', 'input_layernorm', 'post_attention_layernorm')}


def row(target, n=12):
    ids = torch.randint(4, target.vocab_size, (2, n), generator=torch.Generator().manual_seed(0))
    return ids, capture(target, ids, None, (0, 1))[0]


def test_names_and_config(tmp_path):
    draft = draft_from_target(toy_target(), CHOICES)
    assert set(draft.state_dict()) == {'embed_tokens.weight', 'lm_head.weight', 'fc.weight', 'norm.weight'} | {f'layers.0.{n}' for n in LAYER}
    assert draft.layers[0].self_attn.q_proj.weight.shape == (32, 64)
    draft.save_pretrained(tmp_path)
    config = json.loads((tmp_path/'config.json').read_text())
    assert config['architectures'] == ['Qwen3Eagle3Model'] and config['target_model_name_or_path'] == 'toy-llama'
    assert {'ttt_length', 'step_loss_decay', 'draft_num_hidden_layers', 'target_layer_ids'} <= set(config)


@pytest.mark.parametrize('kind', ['llama', 'qwen3', 'gemma4', 'gemma4_unified'])
def test_saved_and_loaded(kind, tmp_path):
    draft = draft_from_target(toy_target(kind), CHOICES)
    draft.save_pretrained(tmp_path, dtype=torch.float32)
    ids,hidden = row(toy_target(kind))
    with torch.no_grad(): assert torch.equal(draft(hidden, ids)[-1], load_draft(tmp_path)(hidden, ids)[-1])


@pytest.mark.parametrize('kind', ['llama', 'gemma4'])
@pytest.mark.parametrize('layers', [1, 2])
def test_training_time_test_is_a_chain_of_drafting_steps(kind, layers):
    "For each position on its own: prefill up to it, then feed the draft's own states and the source's tokens"
    target = toy_target(kind)
    draft = draft_from_target(target, Eagle3Config(target_layer_ids=(0, 1), ttt_length=3, draft_num_hidden_layers=layers))
    ids,hidden = row(target)
    with torch.no_grad():
        steps = draft(hidden, ids)
        for t in (0, 4, 8):
            p = draft.proposer(1)
            p.extend([hidden[0, :t+1]], [ids[0, 1:t+2]])
            h = p.last_BH
            torch.testing.assert_close(h[0], steps[0][0, t], rtol=1e-4, atol=1e-5)
            for s in (1, 2):
                h = p._run(draft.embed_tokens(ids[:1, t+1+s])[:, None], h[:, None], (p.lengths + s - 1)[:, None])[:, 0]
                torch.testing.assert_close(h[0], steps[s][0, t], rtol=1e-4, atol=1e-5)


def test_later_steps_do_not_see_other_chains():
    "The key that step 1 adds at position 3 is seen by position 3 alone"
    target = toy_target()
    draft = draft_from_target(target, CHOICES)
    ids,hidden = row(target)
    other = ids.clone()
    other[0, 5] = (other[0, 5] + 1)%300 + 4 # read at position 4 in step 0, at 3 in step 1, at 2 in step 2
    with torch.no_grad(): a,b = draft(hidden, ids), draft(hidden, other)
    changed = [(x[0] != y[0]).any(-1).nonzero().flatten().tolist() for x,y in zip(a, b)]
    assert changed[0][0] == 4 and changed[1][0] == 3 and changed[2][0] == 2
    assert 2 not in changed[1] and 1 not in changed[2]


def test_gradient_checkpointing_changes_nothing():
    target = toy_target()
    draft = draft_from_target(target, CHOICES).train()
    ids,hidden = row(target)
    grads = []
    for draft.gradient_checkpointing in (False, True):
        draft.zero_grad()
        sum(h.sum() for h in draft(hidden, ids)).backward()
        grads.append(draft.fc.weight.grad.clone())
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize('temperature', [0, .8])
def test_decoding_with_it_is_lossless_in_shape(temperature):
    "Greedy output equals the target's own; sampling runs with ragged acceptance"
    target = toy_target()
    draft = draft_from_target(target, CHOICES)
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14], [20]]
    config = DecodeConfig(max_new_tokens=12, stop_ids=(), temperature=temperature)
    found = speculative_generate(target, draft, prompts, config).generations
    if temperature == 0: assert [g.tokens for g in found] == [g.tokens for g in generate(target, prompts, config).generations]
    assert all(len(g.tokens) == 12 for g in found)
