"Every command that takes `--device`, on one that is not the CPU: nothing stays behind, nothing is mixed"
import json
import subprocess
import sys

import pytest
import torch.utils.backend_registration
from conftest import ROOT

from deepspec.model.target import save_toy_target

pytestmark = pytest.mark.skipif(not hasattr(torch.utils.backend_registration, '_setup_privateuseone_for_python_backend'),
                                reason='this torch cannot have a device that is written in Python')
HELPER = ROOT/'tests'/'pretend_device.py'


def on_pretend(folder, *commands):
    "Run command lines in one process with the device, in `folder`; its output"
    (folder/'commands.json').write_text(json.dumps([line.split() for line in commands]))
    done = subprocess.run([sys.executable, HELPER, 'commands.json'], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f'{done.stdout[-2000:]}\n{done.stderr[-4000:]}'
    return done.stdout


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A toy target, conversations, prompts, a cache, and trained drafts"
    here = tmp_path_factory.mktemp('pretend')
    save_toy_target(here/'target')
    asked = [f'What is the sum of {i} and 3?' for i in range(8)]
    said = dict(role='assistant', content='The answer is four and the sea is wide. The answer is four.')
    rows = [dict(id=str(i), conversations=[dict(role='user', content=q), said]) for i, q in enumerate(asked)]
    (here/'x.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    for name, num in (('p.jsonl', 3), ('one.jsonl', 1)):
        (here/name).write_text('\n'.join(json.dumps(dict(id=str(i), turns=[q])) for i, q in enumerate(asked[:num])))
    shared = ['target=target', 'target_layer_ids=1', 'max_steps=2', 'global_batch_size=4', 'micro_batch_size=2', 'eval_steps=2']
    def train(recipe, *words, **options):
        given = [w for o in (*shared, *(f'{k}={v}' for k, v in options.items())) for w in ('-o', o)]
        return ' '.join(['train', recipe, *words, *given, '--eval-prompts', 'one.jsonl', '--device', 'pretend'])
    on_pretend(here, 'cache build x.jsonl --out cache --target target --layers 1 --device pretend',
        train('dspark_smollm2_135m', '--cache cache --out dspark', num_anchors=4, blocks_at_once=3, gradient_checkpointing=True),
        train('dspark_smollm2_135m', '--cache cache --out gated', num_anchors=4, markov_head_type='gated'),
        train('dflash_smollm2_135m', '--features online --jsonl x.jsonl --out dflash', num_anchors=4),
        train('eagle3_smollm2_135m', '--features online --jsonl x.jsonl --out eagle3'))
    return here


def test_a_tensor_left_on_the_cpu_is_refused():
    code = f"""
import sys; sys.path.insert(0, {str(HELPER.parent)!r})
import torch, pretend_device
kept = pretend_device.install()
x = torch.ones(2, device='pretend', requires_grad=True)
x.square().sum().backward()
assert x.grad.device.type == 'pretend' and x.grad.cpu().tolist() == [2., 2.]
try: x + torch.ones(2)
except RuntimeError as e: print(e)
"""
    said = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert 'expected all tensors on the same device' in said.stdout, said.stderr


def test_drafts_train_and_decode_while_they_train(folder):
    for draft in ('dspark', 'gated', 'dflash', 'eagle3'):
        records = [json.loads(line) for line in (folder/draft/'metrics.jsonl').read_text().splitlines()]
        assert [r['step'] for r in records if 'eval_acceptance_length' in r] == [2]
        assert json.loads((folder/draft/'run.json').read_text())['config']['device'] == 'pretend'


def test_the_cache_was_captured_in_the_dtype_of_a_gpu(folder):
    assert '"target_dtype": "bfloat16"' in (folder/'cache'/'manifest.json').read_text()


def test_drafts_are_measured(folder):
    drafts = ' '.join(f'--draft {d}={d}' for d in ('dspark', 'gated', 'dflash', 'eagle3'))
    shared = 'p.jsonl --target target --max-new-tokens 8 --device pretend'
    on_pretend(folder, f'evaluate {shared} {drafts} --out greedy --batch-size 2',
        f'evaluate {shared} --draft gated=gated --draft eagle3=eagle3 --out sampled --batch-size 2 --temperature .7 --dtype bf16',
        f'evaluate {shared} --draft dspark=dspark --out sure --confidence-threshold .2',
        'calibrate greedy/cycles.jsonl --draft dspark=dspark',
        'sweep p.jsonl --target target --draft dspark=dspark --out sweep.json --max-new-tokens 8 --confidence-threshold .1 --device pretend',
        'schedule greedy/cycles.jsonl --draft dspark=dspark --target target --max-pass-tokens 64 --num-steps 20 --device pretend')
    found = json.loads((folder/'greedy'/'results.json').read_text())
    assert {d['identical_share'] for d in found['total']['drafts'].values()} == {1.}


def test_answers_are_written_and_a_cache_is_mended(folder):
    shard = folder/'cache'/'shard-00000.bin'
    whole = shard.read_bytes()
    shard.write_bytes(whole[:len(whole)//2])
    on_pretend(folder, 'regenerate x.jsonl --out answers.jsonl --target target --engine transformers --preset greedy --max-tokens 8 --device pretend',
               'cache repair cache --device pretend')
    assert shard.read_bytes() == whole
    assert len((folder/'answers.jsonl').read_text().splitlines()) == 8


def test_a_memory_trains_and_answers(tmp_path):
    shared = '--data_path generate:qa1 --model_name_or_path tiny --train_base --max_length 128 --chunk_size 32 --max_samples 8'
    on_pretend(tmp_path, f'babilong train {shared} --output_dir run --max_steps 2 --gradient_accumulation_steps 2 --device pretend',
               'babilong evaluate run --max-samples 2 --device pretend --out found.json')
    assert json.loads((tmp_path/'found.json').read_text())['memory'] == 'on'
