"The loop: dealing out, resuming, stopping, and what it writes down"
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepspec.cache.build import build_cache
from deepspec.io import write_json
from deepspec.model.drafts import draft_from_target, load_draft
from deepspec.model.target import toy_target
from deepspec.pipeline.launch import launch as launch_command
from deepspec.train.config import recipe_to_dict
from deepspec.train.stream import micro_batches, sample_at
from deepspec.train.trainer import launch, train
from train_tools import losses, records, toy_job, toy_samples, write_rows

HEAD = 'model.safetensors'


def with_training(recipe, **changes): return replace(recipe, training=replace(recipe.training, **changes))


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    "Recipe, cache with more silent samples than others, and an uninterrupted run of eight steps in one process"
    folder = tmp_path_factory.mktemp('job')
    recipe,cache = toy_job(folder, silent=range(6))
    train(recipe, cache=cache, out_dir=folder/'one', device='cpu')
    return types.SimpleNamespace(recipe=recipe, cache=cache, one=folder/'one', folder=folder)


def test_a_run_leaves_what_it_promises(job):
    names = {p.name for p in job.one.iterdir()}
    assert {'config.json', 'run.json', 'metrics.jsonl', 'tensorboard', 'step_3', 'step_6', 'step_8', 'step_latest'} <= names
    assert os.readlink(job.one/'step_latest') == 'step_8'
    assert list((job.one/'tensorboard').iterdir())
    last = records(job.one)[-1]
    assert {'loss', 'ce', 'tv', 'confidence', 'acceptance_rate', 'tau_probabilistic', 'lr', 'grad_norm', 'tokens_per_s', 'loader_wait_s'} <= set(last)
    assert load_draft(job.one/'step_latest').config.architectures == ['Qwen3DSparkModel']
    assert load_file(job.one/'step_8'/HEAD)['lm_head.weight'].dtype == torch.bfloat16


def test_it_learns(job):
    found = losses(job.one)
    assert found[-1] < .97*found[0]


@pytest.mark.parametrize('changes', [dict(micro_batch_size=1), dict(micro_batch_size=3), dict(gradient_checkpointing=True), dict(loss_chunk=5), dict(blocks_at_once=3), dict(num_workers=1)],
                         ids=str)
def test_how_a_step_is_cut_does_not_change_it(job, tmp_path, changes):
    train(with_training(job.recipe, **changes), cache=job.cache, out_dir=tmp_path/'run', device='cpu')
    assert losses(tmp_path/'run') == pytest.approx(losses(job.one), rel=2e-5)


@pytest.mark.slow # the compiler takes ten seconds and more
@pytest.mark.skipif(shutil.which('g++') is None, reason='torch.compile needs a C++ compiler on a CPU')
@pytest.mark.parametrize('kind,changes', [('dspark', {}), ('dspark', dict(blocks_at_once=3, gradient_checkpointing=True)), ('eagle3', {})], ids=str)
def test_compiled_layers_compute_the_same(tmp_path, kind, changes):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recipe,cache = toy_job(tmp_path, kind, **changes)
    train(recipe, cache=cache, out_dir=tmp_path/'plain', device='cpu')
    train(with_training(recipe, compile=True), cache=cache, out_dir=tmp_path/'compiled', device='cpu')
    assert losses(tmp_path/'compiled') == pytest.approx(losses(tmp_path/'plain'), rel=1e-5)
    assert 0 < torch._dynamo.utils.counters['stats']['unique_graphs'] <= 6  # not one for each number of slots


def test_bf16_with_fp32_masters_follows_fp32(job, tmp_path):
    train(with_training(job.recipe, dtype='bf16'), cache=job.cache, out_dir=tmp_path/'run', device='cpu')
    assert losses(tmp_path/'run') == pytest.approx(losses(job.one), rel=.03)
    state = torch.load(tmp_path/'run'/'step_8'/'training_state.pt', weights_only=True)
    assert all(v.dtype == torch.float32 for part in state['optimizer'].values() for v in part.values())


def silent_rank_steps(recipe, num_samples, world_size, silent):
    "Steps in which some rank reads samples without a single supervised token"
    t = recipe.training
    def quiet(step, rank):
        at = [p for m in micro_batches(step, t.global_batch_size, 1, rank, world_size) for p in m]
        return all(sample_at(p, num_samples, t.seed) in silent for p in at)
    return [s for s in range(t.max_steps) if any(quiet(s, r) for r in range(world_size))]


@pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
def test_two_ranks_equal_one_process(job, tmp_path, parallel):
    "Losses, gradient norms and weights, to fp32 rounding; FSDP goes on from what one process had saved"
    assert silent_rank_steps(job.recipe, 10, 2, range(6)) # a rank without a block takes part in every collective
    out = tmp_path/'run'
    if parallel == 'fsdp':
        out.mkdir()
        for name in ('config.json', 'metrics.jsonl'): shutil.copy(job.one/name, out)
        shutil.copytree(job.one/'step_3', out/'step_3')
    summary = launch(with_training(job.recipe, parallel=parallel), cache=job.cache, out_dir=out, nproc=2, device='cpu')
    assert summary.finished and summary.steps == 8
    assert losses(out) == pytest.approx(losses(job.one), rel=2e-5)
    assert [r['grad_norm'] for r in records(out)] == pytest.approx([r['grad_norm'] for r in records(job.one)], rel=1e-4)
    states = [torch.load(d/'step_8'/'training_state.pt', weights_only=True)['optimizer'] for d in (out, job.one)]
    for name in states[1]: torch.testing.assert_close(states[0][name]['master'], states[1][name]['master'], rtol=1e-3, atol=2e-4)


def test_a_step_without_any_slot_is_legal(tmp_path):
    recipe,cache = toy_job(tmp_path, silent=range(10), max_steps=2)
    train(recipe, cache=cache, out_dir=tmp_path/'run', device='cpu')
    assert losses(tmp_path/'run') == [0., 0.]


@pytest.fixture(scope='module')
def online(tmp_path_factory):
    "Conversations, a recipe, and a run of six steps that captured their hidden states in one process"
    folder = tmp_path_factory.mktemp('online')
    # one sample at a time, so that two ranks pad, and therefore round to bf16, exactly as one process does
    recipe,_ = toy_job(folder, max_steps=6, micro_batch_size=1)
    rows = write_rows(folder/'rows.jsonl')
    train(recipe, samples=rows, out_dir=folder/'one', device='cpu')
    return types.SimpleNamespace(recipe=recipe, rows=rows, one=folder/'one')


def test_online_trains_on_what_a_cache_would_hold(online, tmp_path):
    build_cache(online.rows, tmp_path/'cache', online.recipe.target, target_layer_ids=(0, 1), max_length=256)
    train(online.recipe, cache=tmp_path/'cache', out_dir=tmp_path/'run', device='cpu')
    assert losses(tmp_path/'run') == pytest.approx(losses(online.one), rel=2e-3)


def test_online_on_two_ranks_equals_one_process(online, tmp_path):
    "Through the trainer's own launcher: losses and weights, to fp32 rounding"
    summary = launch(online.recipe, samples=[online.rows], out_dir=tmp_path/'run', nproc=2, device='cpu')
    assert summary.finished and summary.num_samples == 10
    assert losses(tmp_path/'run') == pytest.approx(losses(online.one), rel=2e-5)
    states = [torch.load(d/'step_6'/'training_state.pt', weights_only=True)['optimizer'] for d in (tmp_path/'run', online.one)]
    for name in states[1]: torch.testing.assert_close(states[0][name]['master'], states[1][name]['master'], rtol=1e-3, atol=2e-4)


def test_the_command_trains_online_on_two_ranks(online, tmp_path):
    "As `torchrun -m deepspec train ... --features online`, which is how the step notebook starts it"
    opts = [f'target={online.recipe.target}', 'max_steps=6', 'global_batch_size=4', 'micro_batch_size=1', 'save_steps=3', 'keep_last=9']
    launch_command(['train', 'dspark_toy', '--features', 'online', '--jsonl', online.rows, '--out', tmp_path/'run', '--device', 'cpu',
                    *[x for o in opts for x in ('-o', o)]], 2)
    assert losses(tmp_path/'run') == pytest.approx(losses(online.one), rel=2e-5)


@pytest.mark.slow # another start of two processes; the sharded path itself is tested above
def test_eagle3_on_two_fsdp_ranks(tmp_path):
    recipe,cache = toy_job(tmp_path, 'eagle3', max_steps=3)
    train(recipe, cache=cache, out_dir=tmp_path/'one', device='cpu')
    launch(with_training(recipe, parallel='fsdp'), cache=cache, out_dir=tmp_path/'two', nproc=2, device='cpu')
    assert losses(tmp_path/'two') == pytest.approx(losses(tmp_path/'one'), rel=2e-5)


def start(recipe, cache, out_dir):
    "The trainer in a process of its own"
    write_json(out_dir/'job.json', dict(recipe=recipe_to_dict(recipe), out_dir=str(out_dir), cache=cache, samples=None, device='cpu', evaluate=None))
    return subprocess.Popen([sys.executable, '-m', 'deepspec.train.trainer', '--job', str(out_dir/'job.json')], stderr=subprocess.DEVNULL)


def wait_for_lines(path, count, seconds=60):
    "Until a metrics file has this many lines"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists() and path.read_text().count('\n') >= count: return
        time.sleep(.005)
    raise TimeoutError(path)


def test_sigkill_then_resume_is_bit_equal(job, tmp_path):
    "The whole loss history and the weights, whatever step the kill falls on"
    out = tmp_path/'run'
    process = start(job.recipe, job.cache, out)
    wait_for_lines(out/'metrics.jsonl', 5)
    process.kill()
    process.wait()
    train(job.recipe, cache=job.cache, out_dir=out, device='cpu')
    assert losses(out) == losses(job.one)
    a,b = (load_file(d/'step_latest'/HEAD) for d in (out, job.one))
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_preemption_saves_and_exits_cleanly(job, tmp_path):
    out,recipe = tmp_path/'run', with_training(job.recipe, max_steps=5_000, save_steps=10_000)
    process = start(recipe, job.cache, out)
    wait_for_lines(out/'metrics.jsonl', 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    summary = json.loads((out/'summary.json').read_text())
    assert not summary['finished'] and Path(summary['checkpoint']).name == f"step_{summary['steps']}" == os.readlink(out/'step_latest')
    assert len(losses(out)) == summary['steps']


def test_resume_refuses_another_run(job, tmp_path):
    with pytest.raises(ValueError, match='another configuration.*lr'):
        train(replace(job.recipe, optim=replace(job.recipe.optim, lr=1.)), cache=job.cache, out_dir=job.one, device='cpu')
    with pytest.raises(ValueError, match='holds checkpoints already'): train(job.recipe, cache=job.cache, out_dir=job.one, resume=False, device='cpu')
    with pytest.raises(ValueError, match='num_samples=10, now 9'):
        train(job.recipe, cache=toy_samples(toy_target(), 9), target=toy_target(), out_dir=job.one, device='cpu')


def test_held_out_measurements_are_written(job, tmp_path):
    seen = []
    def evaluate(draft, step):
        seen.append((step, draft.training, type(draft).__name__))
        return dict(acceptance_length=1.5)
    train(with_training(job.recipe, eval_steps=4), cache=job.cache, out_dir=tmp_path/'run', evaluate=evaluate, device='cpu')
    assert seen == [(4, False, 'DSparkModel'), (8, False, 'DSparkModel')]
    assert [r['eval_acceptance_length'] for r in records(tmp_path/'run') if 'eval_acceptance_length' in r] == [1.5, 1.5]


def test_a_tracker_gets_the_scalars(job, tmp_path, monkeypatch):
    got = []
    fake = types.SimpleNamespace(init=lambda **k: got.append(k['project']), log=lambda d, step: got.append((step, 'loss' in d)), finish=lambda: got.append('end'))
    monkeypatch.setitem(sys.modules, 'trackio', fake)
    train(with_training(job.recipe, tracker='trackio', max_steps=2), cache=job.cache, out_dir=tmp_path/'run', device='cpu')
    assert got == ['deepspec', (1, True), (2, True), 'end']


def test_bad_features_stop_the_run(job, tmp_path):
    samples = toy_samples(toy_target(), 4)
    for s in samples: s['target_hidden_states'][5] = float('nan')
    with pytest.raises(ValueError, match='gradient norm is nan'): train(job.recipe, cache=samples, target=toy_target(), out_dir=tmp_path/'run', device='cpu')


def test_a_cache_of_other_layers_is_refused(job, tmp_path):
    with pytest.raises(ValueError, match='target_layer_ids'):
        train(replace(job.recipe, draft=replace(job.recipe.draft, target_layer_ids=(0, 2))), cache=job.cache, out_dir=tmp_path/'run', device='cpu')


def test_launch_says_when_a_worker_fails(job, tmp_path, capfd):
    with pytest.raises(RuntimeError, match='torchrun ended with code 1'):
        launch(job.recipe, cache=tmp_path/'absent', out_dir=tmp_path/'run', nproc=1, device='cpu')
    assert str(tmp_path/'absent') in capfd.readouterr().out


def test_seeds_fix_the_untrained_draft(job):
    target = toy_target()
    a,b,c = (draft_from_target(target, job.recipe.draft, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(a['fc.weight'], c['fc.weight'])
