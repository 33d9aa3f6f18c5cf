"The trainer: seed flags, flush of the tail, bad gradients, exact resume, torchrun"
import json, os, subprocess, sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspec.longmem.tasks import generate_babilong
from deepspec.longmem.train import (Ranks, TrainingConfig, build_model, epoch_windows, evaluate_checkpoint,
                                    parse_training_args, train_babilong)

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch): monkeypatch.setenv('DEEPSPEC_CACHE_DIR', str(tmp_path/'cache'))


@pytest.fixture
def config(tmp_path):
    "Eight rows from a file at 64 tokens"
    path = generate_babilong(tmp_path/'qa1'/'64.json', num_samples=8, length_tokens=60)
    return TrainingConfig(model_name_or_path='tiny', train_base=True, data_path=str(path), max_length=64,
                          chunk_size=32, answer_reserve_tokens=4, memory_subchunk=8, log_every_batches=1,
                          output_dir=str(tmp_path/'out'))


def test_seed_defaults():
    c = parse_training_args([])
    assert (c.max_length, c.answer_reserve_tokens, c.chunk_size) == (32768, 64, 4096)
    assert (c.batch_size, c.train_ratio, c.truncation) == (1, .9, 'keep_question')
    assert (c.gradient_accumulation_steps, c.log_every_batches, c.logging_steps) == (8, 80, 10)
    assert c.output_dir == './outputs/qwen_titans_babilong' and not c.fsdp and c.max_samples is None


def test_the_tail_steps_with_its_own_count(config):
    found = train_babilong(config)  # seven training samples, accumulation 8: one step
    assert found['global_step'] == 1
    lines = [json.loads(l) for l in (Path(config.output_dir)/'metrics.jsonl').read_text().splitlines()]
    assert [l['kind'] for l in lines] == ['train', 'eval'] and lines[0]['batches'] == 7
    assert lines[0]['loss'] == pytest.approx(found['losses'][0])
    assert list((Path(config.output_dir)/'tensorboard').iterdir())


def test_two_runs_with_one_seed_are_equal_and_resume_is_exact(config, tmp_path):
    long = replace(config, gradient_accumulation_steps=2, num_epochs=2, save_steps=3)
    whole = train_babilong(long)
    again = replace(long, output_dir=str(tmp_path/'again'))
    first = train_babilong(replace(again, max_steps=3))  # stops inside the first epoch
    rest = train_babilong(replace(again, resume=True))
    assert first['losses'] + rest['losses'] == whole['losses']
    a, b = (torch.load(f['files'][1], weights_only=True)['state_dict'] for f in (whole, rest))
    assert all(a[n].equal(b[n]) for n in a)
    lines = (Path(again.output_dir)/'metrics.jsonl').read_text().splitlines()
    steps = [json.loads(l)['step'] for l in lines if '"train"' in l]
    assert steps == list(range(1, 9))


def test_curriculum_resumes_in_its_stage(config, tmp_path):
    plan = replace(config, data_path='generate:qa1', curriculum='48:2:2:16,64:3:1:32', gradient_accumulation_steps=1,
                   save_steps=1)
    whole = train_babilong(plan)
    again = replace(plan, output_dir=str(tmp_path/'again'))
    first = train_babilong(replace(again, max_steps=3))
    assert first['losses'] + train_babilong(replace(again, resume=True))['losses'] == whole['losses']


def test_every_epoch_has_its_own_order_and_ranks_share_it():
    rows = [dict(row=torch.tensor(i)) for i in range(9)]

    def order(epoch, rank=0, world=1, seed=1):
        windows = epoch_windows(rows, TrainingConfig(seed=seed), Ranks(rank=rank, world_size=world), 1, epoch)
        return [b['row'].item() for w in windows for b in w]
    assert sorted(order(0)) == sorted(order(1)) == list(range(9))
    # torch adds the epoch to the seed, so two of the four agree
    assert order(0) == order(0) and len({tuple(order(e, seed=s)) for e in (0, 1) for s in (1, 2)}) == 3
    mine, other = (order(1, rank=r, world=2) for r in (0, 1))
    assert len(mine) == len(other) == 5 and {*mine, *other} == set(range(9))


@pytest.mark.parametrize('scale', [0., .1, 1.])
def test_memory_keys_learn_at_their_own_rate(config, tmp_path, scale):
    one = replace(config, max_steps=1, lr=1e-2, weight_decay=0., key_lr_scale=scale)
    start = dict(build_model(one)[0].named_parameters())
    trained = torch.load(train_babilong(one)['files'][1], weights_only=True)['state_dict']
    # Adam's first step is as long as its rate, wherever there is a gradient
    moved = {n: (trained[n] - p.detach()).abs().max().item() for n, p in start.items()}
    for part in ('q_proj', 'k_proj'):
        assert moved[f'layers.0.long_term_memory.{part}.weight'] == pytest.approx(scale*1e-2, rel=.01)
        assert moved[f'layers.0.block.self_attn.{part}.weight'] == pytest.approx(1e-2, rel=.01)
    assert moved['layers.0.long_term_memory.v_proj.weight'] == pytest.approx(1e-2, rel=.01)


def test_a_negative_key_rate_is_refused():
    with pytest.raises(ValueError, match='key_lr_scale=-1'): TrainingConfig(key_lr_scale=-1)


def test_bad_gradients_are_skipped_and_then_stop_the_run(config, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, 'get_total_norm', lambda grads: torch.tensor(float('nan')))
    found = train_babilong(config)
    assert found['skipped'] == 1
    with pytest.raises(RuntimeError, match='2 gradients in a row'):
        train_babilong(replace(config, gradient_accumulation_steps=1, max_bad_steps=2))


def test_evaluation_of_a_run_at_other_lengths_and_modes(config, tmp_path):
    train_babilong(config)
    on, off = (evaluate_checkpoint(config.output_dir, data_path='generate:qa1', max_length=128, max_samples=3, memory=m,
                                   out=str(tmp_path/f'{m}.json')) for m in ('on', 'off'))
    assert on['num_samples'] == 3 and on['answer_loss'] != off['answer_loss']
    assert set(on) >= {'answer_loss', 'teacher_forced_exact_match', 'generated_exact_match'}
    assert json.loads((tmp_path/'on.json').read_text())['run']['versions']


def command(config, *flags):
    "Arguments of the trainer for a config that differs from the defaults"
    out = []
    for k, v in vars(config).items():
        if v != getattr(TrainingConfig(), k): out += [f'--{k}'] if v is True else [f'--{k}', str(v)]
    return [*out, *flags]


def run(*argv):
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    env = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=path)
    return subprocess.run([sys.executable, '-m', *argv], env=env, capture_output=True, text=True, timeout=280)


def test_user_errors_end_with_one_line():
    done = run('deepspec.longmem.train', '--model_name_or_path', 'tiny')
    assert done.returncode == 2 and done.stderr.startswith('deepspec: TrainingConfig') and done.stderr.count('\n') == 1


def test_torchrun_with_the_debug_line(config, tmp_path):
    small = replace(config, output_dir=str(tmp_path/'ranks'))
    done = run('torch.distributed.run', '--standalone', '--nproc_per_node=2', '-m', 'deepspec.longmem.train',
               *command(small, '--fsdp', '--max_samples', '8', '--num_epochs', '1', '--eval_steps', '1000000'))
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'train step 1:' in done.stderr
    saved = torch.load(tmp_path/'ranks'/'final_memory_checkpoint.pt', weights_only=True)
    assert saved['global_step'] == 1  # four micro-batches a rank make one step
    assert all('long_term_memory' in n or 'memory_gate' in n for n in saved['memory_state_dict'])


# three launches of two processes that each import torch
@pytest.mark.slow
@pytest.mark.parametrize('how', ['ddp', 'fsdp'])
def test_two_ranks_resume_exactly(config, tmp_path, how):
    base = replace(config, gradient_accumulation_steps=1, num_epochs=2, save_steps=1, fsdp=how == 'fsdp')

    def launch(folder, *flags):
        small = replace(base, output_dir=str(tmp_path/folder))
        done = run('torch.distributed.run', '--standalone', '--nproc_per_node=2', '-m', 'deepspec.longmem.train',
                   *command(small, *flags))
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (tmp_path/folder/'metrics.jsonl').read_text().splitlines()
        figures = [{k: v for k, v in json.loads(l).items() if k != 'tokens_per_s'} for l in lines]
        return figures, torch.load(tmp_path/folder/'full_checkpoint.pt', weights_only=True)
    figures, whole = launch('whole')
    launch('parts', '--max_steps', '3')  # stops inside the first of two epochs of four steps
    resumed, parts = launch('parts', '--resume')
    assert parts['global_step'] == whole['global_step'] == 8
    assert [f for f in resumed if f['kind'] == 'train'] == [f for f in figures if f['kind'] == 'train']
    assert resumed[-1] == figures[-1]
    assert all(parts['state_dict'][n].equal(t) for n, t in whole['state_dict'].items())


@pytest.mark.parametrize('name,value', [
    ('max_length', -3), ('chunk_size', 0), ('max_samples', 0), ('max_eval_samples', 0), ('max_steps', -1),
    ('warmup_steps', -4), ('save_steps', -1), ('bptt_chunks', -1), ('weight_decay', -.1), ('lr', 0.),
    ('max_grad_norm', -1.), ('memory_layers', 'x')])
def test_settings_that_cannot_be_are_refused(name, value):
    with pytest.raises(ValueError, match=f'TrainingConfig: {name}={value} must be'): TrainingConfig(**{name: value})


def test_checkpoints_that_do_not_fit_are_named(config):
    train_babilong(config)
    folder = Path(config.output_dir)
    with pytest.raises(ValueError, match='batch_size=0'): evaluate_checkpoint(folder, batch_size=0)
    saved = json.loads((folder/'config.json').read_text())
    (folder/'config.json').write_text(json.dumps(saved | dict(memory_head_dim=8)))
    with pytest.raises(ValueError, match='has other shapes of layers.0.long_term_memory'): evaluate_checkpoint(folder)
    (folder/'full_checkpoint.pt').write_bytes(b'not a checkpoint')
    with pytest.raises(ValueError, match='not a checkpoint'): evaluate_checkpoint(folder)
