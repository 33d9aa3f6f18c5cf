"Exactness on the default target, whose weights the embedded package brings"
from dataclasses import replace

import pytest
import torch

from deepspec.data.template import encode_prompts, resolve_template
from deepspec.eval.decode import DecodeConfig, generate, speculative_generate
from deepspec.eval.evaluate import explain_divergence
from deepspec.eval.prompt_sets import sample_prompt_sets
from deepspec.model.drafts import draft_from_target
from deepspec.model.dspark import DSparkConfig
from deepspec.model.target import default_layer_ids, load_target
from toy_drafts import Reciter

pytestmark = pytest.mark.slow # loads 135 million parameters and decodes for about a minute
CONFIG = DecodeConfig(max_new_tokens=32)


@pytest.fixture(scope='module')
def target(): return load_target()


@pytest.fixture(scope='module')
def prompts(target):
    talks = [[dict(role='user', content=rows[1]['turns'][0])] for rows in sample_prompt_sets().values()]
    return encode_prompts(talks, target.tokenizer, resolve_template(target.tokenizer))


def test_fp32_answers_are_identical(target, prompts):
    plain = generate(target, prompts, CONFIG).generations
    for p, g in zip(prompts, plain):
        reference = target.model.generate(torch.tensor([p]), max_new_tokens=32, do_sample=False)[0, len(p):].tolist()
        assert list(g.tokens) == reference
    choices = DSparkConfig(target_layer_ids=default_layer_ids(target.num_layers, 3), mask_token_id=target.vocab_size - 1,
                           num_hidden_layers=1, markov_rank=16)
    for draft in (draft_from_target(target, choices), Reciter(target, prompts, 32, block_size=7, error_rate=.2)):
        fast = speculative_generate(target, draft, prompts, CONFIG)
        assert [g.tokens for g in fast.generations] == [g.tokens for g in plain]
        assert fast.overhead < .05
    for i, p in enumerate(prompts[:2]):
        draft = Reciter(target, [p], 32, block_size=7, error_rate=.2, seed=i)
        assert speculative_generate(target, draft, [p], CONFIG).generations[0].tokens == plain[i].tokens


def test_bf16_divergences_are_near_ties(prompts):
    target = load_target(dtype=torch.bfloat16)
    prompts, config = prompts[:2], replace(CONFIG, max_new_tokens=24)
    for p in prompts:
        plain = generate(target, [p], config).generations[0].tokens
        fast = speculative_generate(target, Reciter(target, [p], 24, block_size=7, error_rate=.2), [p], config).generations[0].tokens
        found = explain_divergence(target, p, plain, fast)
        assert found is None or found['near_tie'], found
