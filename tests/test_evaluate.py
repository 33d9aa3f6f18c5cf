import json, os, subprocess, sys
from dataclasses import dataclass, replace

import pytest
import torch

from deepspec.eval.calibrate import load_recorded
from deepspec.eval.decode import Cycle, DecodeConfig, Generation, generate
from deepspec.eval.evaluate import color_pieces, evaluate_draft, evaluate_drafts, explain_divergence
from deepspec.eval.metrics import Acceptance, bootstrap_interval, count_cycles, summarize_acceptance
from deepspec.eval.prompt_sets import load_prompt_set, sample_prompt_sets
from deepspec.io import read_json
from deepspec.model.drafts import draft_from_target
from deepspec.model.dspark import DSparkConfig
from deepspec.model.target import Target, toy_target

CHOICES = DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=1, block_size=4, markov_rank=8)
CONFIG = DecodeConfig(max_new_tokens=20, stop_ids=())
PROMPTS = {name: rows[:3] for name, rows in sample_prompt_sets().items()}


@pytest.fixture(scope='module')
def target(): return toy_target('qwen3')


@pytest.fixture(scope='module')
def draft(target): return draft_from_target(target, CHOICES)


def rates(results, name='dspark'):
    "Everything of a draft that does not depend on the clock"
    timed = ('wall_s', 'tokens_per_s', 'overhead', 'speedup', 'speedup_interval')
    return {s: {k: v for k, v in found['drafts'][name].items() if k not in timed} for s, found in
            (*results['sets'].items(), ('total', results['total']))}


def test_sets_add_up_to_the_total(target, draft, tmp_path):
    results = evaluate_drafts(target, dict(dspark=draft), PROMPTS, tmp_path/'e', CONFIG)
    total = results['total']['drafts']['dspark']
    for key in ('num_cycles', 'num_committed', 'num_tokens'):
        assert total[key] == sum(s['drafts']['dspark'][key] for s in results['sets'].values())
    rows = [json.loads(line) for line in open(tmp_path/'e'/'cycles.jsonl')]
    assert len(rows) == total['num_cycles'] and sum(r['num_accepted'] + 1 for r in rows) == total['num_committed']
    assert total['num_committed'] == total['num_tokens'] - 12 # the prompt's pass commits the first token of each answer
    assert total['identical_share'] == 1 and results['total']['plain']['num_tokens'] == 12*20
    assert total['acceptance_length_interval'][0] <= total['acceptance_length'] <= total['acceptance_length_interval'][1]
    assert read_json(tmp_path/'e'/'results.json') == json.loads(json.dumps(results))
    assert all(len(r['confidence_logits']) == len(r['proposed']) == len(r['accepted']) for r in rows)


@pytest.mark.parametrize('batch_size', [2, 5])
def test_batches_change_no_rate(target, draft, tmp_path, batch_size):
    one = evaluate_drafts(target, dict(dspark=draft), PROMPTS, tmp_path/'a', CONFIG, multi_turn=True)
    many = evaluate_drafts(target, dict(dspark=draft), PROMPTS, tmp_path/'b', CONFIG, batch_size=batch_size, multi_turn=True)
    assert rates(one) == rates(many)
    assert one['total']['num_answers'] == 12 + 4 # one second turn a set


def test_second_turns_continue_the_plain_answer(target, tmp_path):
    evaluate_draft(target, None, PROMPTS['chat'][:1], tmp_path/'e', config=CONFIG, multi_turn=True)
    answers = [json.loads(line) for line in open(tmp_path/'e'/'answers.jsonl')]
    assert [(a['turn'], a['draft'], a['num_tokens']) for a in answers] == [(0, 'plain', 20), (1, 'plain', 20)]


@pytest.mark.parametrize('temperature', [0., 1.])
def test_ranks_agree_with_one_process(tmp_path, temperature):
    script = tmp_path/'evaluate.py'
    script.write_text(f'''
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_evaluate import *
torch.manual_seed(0) # of everything the draft's own seed does not reach
target = toy_target('qwen3')
config = replace(CONFIG, temperature={temperature}, max_new_tokens=12)
evaluate_drafts(target, dict(dspark=draft_from_target(target, CHOICES)), PROMPTS, sys.argv[1], config, batch_size=2)
''')
    env = dict(os.environ, OMP_NUM_THREADS='1')
    launch = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2']
    subprocess.run([sys.executable, *launch, str(script), str(tmp_path/'two')], check=True, env=env, capture_output=True, timeout=120)
    subprocess.run([sys.executable, str(script), str(tmp_path/'one')], check=True, env=env, capture_output=True, timeout=120)
    one, two = (read_json(tmp_path/n/'results.json') for n in ('one', 'two'))
    assert (one['run']['config']['world_size'], two['run']['config']['world_size']) == (1, 2)
    assert rates(one) == rates(two)
    for name in ('cycles.jsonl', 'answers.jsonl', 'examples.json'):
        assert (tmp_path/'one'/name).read_text() == (tmp_path/'two'/name).read_text()


def test_bf16_divergences_are_near_ties(tmp_path):
    target = toy_target('llama', seed=3, num_layers=8, hidden_size=64)
    target = Target(target.name, target.model.bfloat16(), target.tokenizer)
    draft = draft_from_target(target, replace_layers()).bfloat16()
    prompts = {k: v for k, v in sample_prompt_sets().items()}
    found = evaluate_drafts(target, dict(dspark=draft), prompts, tmp_path/'e', replace(CONFIG, max_new_tokens=40), batch_size=4)
    found = found['total']['drafts']['dspark']
    assert found['unexplained'] == 0
    assert found['identical_share'] == 1 - len(found['divergences'])/16


def replace_layers(): return replace(CHOICES, target_layer_ids=(0, 1, 2))


def test_a_real_difference_is_no_near_tie(target):
    prompt = target.tokenizer('The sea is wide')['input_ids']
    greedy = list(generate(target, [prompt], CONFIG).generations[0].tokens)
    swapped = greedy[:7] + [(greedy[7] + 1) % 300] + greedy[8:]
    found = explain_divergence(target, prompt, greedy, swapped)
    assert found['position'] == 7 and not found['near_tie']
    shorter = explain_divergence(target, prompt, greedy, greedy[:5])
    assert shorter['position'] == 5 and not shorter['near_tie']


def test_a_policy_cuts_proposals_and_is_recorded(target, draft, tmp_path):
    free = evaluate_drafts(target, dict(dspark=draft), PROMPTS, tmp_path/'a', CONFIG)
    one = evaluate_drafts(target, dict(dspark=draft), PROMPTS, tmp_path/'b', CONFIG, policy=FixedOne())
    assert len(one['total']['drafts']['dspark']['survival']) == 1 < len(free['total']['drafts']['dspark']['survival'])
    assert one['total']['drafts']['dspark']['identical_share'] == 1
    assert one['run']['config']['policy'] == 'FixedOne()'
    with pytest.raises(ValueError, match='under a confidence threshold or a policy'):
        load_recorded(tmp_path/'b'/'cycles.jsonl', 'dspark')
    assert load_recorded(tmp_path/'a'/'cycles.jsonl', 'dspark').num_slots == 4


@dataclass(frozen=True)
class FixedOne:
    def __call__(self, survival_RK): return [1]*len(survival_RK)


def test_folders_and_names(target, draft, tmp_path):
    (tmp_path/'mine').mkdir()
    (tmp_path/'mine'/'thesis.tex').write_text('precious')
    with pytest.raises(ValueError, match='thesis.tex'): evaluate_draft(target, draft, PROMPTS['chat'], tmp_path/'mine')
    with pytest.raises(ValueError, match='something else'): evaluate_drafts(target, dict(plain=draft), PROMPTS, tmp_path/'e')
    with pytest.raises(ValueError, match='holds 3 prompts'): evaluate_drafts(target, {}, PROMPTS, tmp_path/'e', num_prompts=4)
    with pytest.raises(ValueError, match='no such file'): load_prompt_set(tmp_path/'absent.jsonl')


@pytest.mark.parametrize('row', [None, 5, {}, dict(id=3, turns=['a']), dict(id='a'), dict(id='a', turns='text'),
                                 dict(id='a', turns=['']), dict(id='a', turns=[None])])
def test_malformed_rows_are_named(row):
    with pytest.raises(ValueError, match='row 1'): load_prompt_set([dict(id='ok', turns=['fine']), row])


# --- counts

def cycle(n, accepted, stop=False):
    return Cycle(proposed=tuple(range(n)), num_accepted=accepted, bonus_id=None if stop else 9)


@pytest.mark.parametrize('cycles,expected', [
    ([cycle(0, 0)], dict(acceptance_length=1., draft_acceptance=None, verify_rate=1., survival=[])),
    ([cycle(4, 0)], dict(acceptance_length=1., draft_acceptance=0., verify_rate=.2, survival=[0.]*4)),
    ([cycle(4, 4)], dict(acceptance_length=5., draft_acceptance=1., verify_rate=1., survival=[1.]*4)),
    ([cycle(2, 2, stop=True)], dict(acceptance_length=2., draft_acceptance=1., verify_rate=2/3, survival=[1.]*2)),
    ([cycle(3, 1), cycle(1, 1)], dict(acceptance_length=2., draft_acceptance=.5, verify_rate=4/6, survival=[1., 0., 0.])),
])
def test_rates_by_hand(cycles, expected):
    counts = count_cycles(cycles)
    for name, value in expected.items(): assert getattr(counts, name) == pytest.approx(value), name


def test_conditional_rates_multiply_to_survival():
    g = torch.Generator().manual_seed(0)
    counts = count_cycles(cycle(5, int(n)) for n in torch.randint(6, (300,), generator=g))
    product = 1.
    for rate, survival in zip(counts.acceptance_rate, counts.survival):
        product *= rate
        assert survival == pytest.approx(product)


def test_counts_add_in_any_split():
    g = torch.Generator().manual_seed(1)
    cycles = [cycle(int(n), int(a) % (int(n) + 1)) for n, a in torch.randint(6, (100, 2), generator=g)]
    for at in (0, 1, 37, 100): assert count_cycles(cycles[:at]) + count_cycles(cycles[at:]) == count_cycles(cycles)
    assert sum((count_cycles([c]) for c in cycles), Acceptance()) == count_cycles(cycles)


def test_bootstrap_draws_prompts_not_cycles():
    "Ten prompts of one hundred alike cycles are ten observations"
    counts = [count_cycles([cycle(4, n)]*100) for n in (0, 4)*5]
    low, high = summarize_acceptance(counts)['acceptance_length_interval']
    assert high - low > 1.5
    assert bootstrap_interval([1]*9, [2]*9) == [.5, .5]
    assert bootstrap_interval([1, 2], [3, 4], seed=1) == bootstrap_interval([1, 2], [3, 4], seed=1)


def test_colored_pieces_spell_the_answer(target):
    ids = target.tokenizer('The river runs to the sea.')['input_ids']
    g = Generation(tokens=tuple(ids), finish_reason='length', cycles=(
        Cycle(proposed=tuple(ids[1:4]) + (7,), num_accepted=3, bonus_id=ids[4]),
        Cycle(proposed=tuple(ids[5:]), num_accepted=len(ids) - 5, bonus_id=None)))
    pieces = color_pieces(g, target.tokenizer)
    assert ''.join(p['text'] for p in pieces if p['kind'] != 'rejected') == target.tokenizer.decode(ids)
