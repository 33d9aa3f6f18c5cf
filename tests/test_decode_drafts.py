"The drafts of this package inside the loop: exact answers, and the same proposals in a batch as alone"
import pytest
import torch

from deepspec.eval.decode import DecodeConfig, generate, speculative_generate
from deepspec.eval.export import check_export, export_draft, public_keys
from deepspec.model.base import read_draft_config
from deepspec.model.drafts import draft_from_target
from deepspec.model.dspark import DSparkConfig
from deepspec.model.eagle3 import Eagle3Config
from deepspec.model.target import toy_target

DSPARK = dict(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=2, block_size=5, markov_rank=8)
DRAFTS = dict(vanilla=DSparkConfig(**DSPARK), gated=DSparkConfig(**DSPARK, markov_head_type='gated'),
              rnn=DSparkConfig(**DSPARK, markov_head_type='rnn'),
              dflash=DSparkConfig(**DSPARK, markov_head_type=None, enable_confidence_head=False),
              eagle3=Eagle3Config(target_layer_ids=(0, 1, 2, 3, 4), ttt_length=5))
PROMPTS = [[5, 6, 7], list(range(10, 80)), [9, 8]]


def untrained_draft(target, choices):
    "An untrained draft, the same in every run"
    torch.manual_seed(0)
    return draft_from_target(target, choices).eval()


@pytest.mark.parametrize('name', DRAFTS)
@pytest.mark.parametrize('kind', ['llama', 'gemma4', 'gemma4_unified'])
def test_greedy_answers_and_batched_proposals(kind, name):
    target = toy_target(kind, num_layers=7)
    draft = untrained_draft(target, DRAFTS[name])
    config = DecodeConfig(max_new_tokens=16, stop_ids=())
    plain = generate(target, PROMPTS, config).generations
    together = speculative_generate(target, draft, PROMPTS, config).generations
    assert [g.tokens for g in together] == [g.tokens for g in plain]
    for p, g in zip(PROMPTS, together):
        alone = speculative_generate(target, draft, [p], config).generations[0]
        assert [c.proposed for c in alone.cycles] == [c.proposed for c in g.cycles]
        a, b = (torch.tensor([x for c in y.cycles for x in c.confidence_logits]) for y in (alone, g))
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('name', DRAFTS)
def test_sampling_reports_what_it_drew_from(name):
    target = toy_target('qwen3', num_layers=7)
    draft = untrained_draft(target, DRAFTS[name])
    proposer = draft.proposer(1)
    proposer.extend([torch.randn(4, len(draft.config.target_layer_ids)*32)], [torch.tensor([5, 6, 7, 8])])
    found = proposer.propose(torch.tensor([8]), 5, .7, torch.Generator().manual_seed(0))
    assert found.probs_BKV.dtype == torch.float32
    torch.testing.assert_close(found.probs_BKV.sum(-1), torch.ones(1, 5))
    assert (found.probs_BKV.gather(2, found.tokens_BK[..., None]) > 0).all()
    config = DecodeConfig(max_new_tokens=24, stop_ids=(), temperature=.7)
    assert all(len(g.tokens) == 24 for g in speculative_generate(target, draft, PROMPTS, config).generations)


@pytest.mark.parametrize('kind', ['qwen3', 'gemma4'])
def test_eagle3_export(tmp_path, kind):
    target = toy_target(kind, num_layers=7)
    untrained_draft(target, DRAFTS['eagle3']).save_pretrained(tmp_path/'step_1')
    export_draft(tmp_path/'step_1', tmp_path/'public')
    keys = public_keys(read_draft_config(tmp_path/'public'))
    assert check_export(tmp_path/'public', tmp_path/'step_1', target)['num_tensors'] == len(keys)
    if kind == 'qwen3':
        layer = ['hidden_norm', 'input_layernorm', 'mlp.down_proj', 'mlp.gate_proj', 'mlp.up_proj', 'post_attention_layernorm',
                 'self_attn.k_norm', 'self_attn.k_proj', 'self_attn.o_proj', 'self_attn.q_norm', 'self_attn.q_proj', 'self_attn.v_proj']
        golden = ['embed_tokens', 'fc', *(f'layers.0.{k}' for k in layer), 'lm_head', 'norm']
        assert keys == [f'{k}.weight' for k in golden]
