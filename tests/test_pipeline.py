"The main job in its smoke form: from start to end, killed and resumed, refused, and through the step notebooks"
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from deepspec.model.target import save_toy_target
from deepspec.report.render import execute_report, report_parameters, reports_folder
from train_tools import write_rows

STEPS = ['target', 'prompts', 'regenerate', 'cache', 'train', 'evaluate', 'report']


def command(*arguments):
    "The command line of `deepspec`, in this interpreter"
    return [sys.executable, '-m', 'deepspec', *map(str, arguments)]


def run(*arguments, **kwargs):
    "Run `deepspec` and wait"
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, **kwargs)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A run of the smoke job that was killed in the middle of each of its early steps, and then left alone"
    out = tmp_path_factory.mktemp('smoke')/'run'
    env = {**os.environ, 'DEEPSPEC_CACHE_DIR': str(out.parent/'cache-home')}
    for after in ('prompts', 'regenerate', 'cache'):
        process = subprocess.Popen(command('quickstart', '--smoke', '--out', out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        deadline = time.monotonic() + 120
        while not (out/'steps'/f'{after}.json').exists() and process.poll() is None and time.monotonic() < deadline: time.sleep(.02)
        time.sleep(.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (out/'steps'/f'{after}.json').exists()
    done = run('quickstart', '--smoke', '--out', out, env=env)
    assert done.returncode == 0, done.stderr
    return out, done, env


def test_killed_runs_end_whole(finished):
    out, done, _ = finished
    assert sorted(p.stem for p in (out/'steps').iterdir()) == sorted(STEPS)
    assert 'trained' in done.stdout and 'untrained' in done.stdout and '.html' in done.stdout
    results = json.loads((out/'eval'/'results.json').read_text())
    assert results['total']['drafts']['dspark']['identical_share'] == 1.0
    for name in ('pipeline', 'storage_cost', 'loss'):
        page = (out/'reports'/f'{name}.html').read_text()
        assert '<img' in page and not re.search(r'(src|href)="(https?:)?//', page), 'a page links to the outside'
    assert '>target</th>' in (out/'reports'/'loss.html').read_text(), 'the loss report compares draft and target token by token'
    assert not list(out.rglob('*.tmp')), 'half-written files stay behind'


def test_every_step_says_what_it_ran_on(finished):
    out, *_ = finished
    for path in (out/'steps').iterdir():
        marker = json.loads(path.read_text())
        assert {'versions', 'git_sha', 'host', 'created_at'} <= set(marker['run']) and marker['wall_s'] >= 0


def test_a_finished_run_is_not_done_again(finished):
    out, _, env = finished
    before = {p: p.stat().st_mtime_ns for p in out.rglob('*') if p.is_file()}
    again = run('quickstart', '--smoke', '--out', out, env=env)
    assert again.returncode == 0 and '[1/7]' not in again.stdout and 'trained' in again.stdout
    assert {p: p.stat().st_mtime_ns for p in out.rglob('*') if p.is_file()} == before


def test_other_settings_want_another_folder(finished):
    out, _, env = finished
    other = run('quickstart', '--smoke', '--seed', 7, '--out', out, env=env)
    assert other.returncode == 2 and 'seed was 42 and is now 7' in other.stderr and 'Traceback' not in other.stderr


def test_step_notebooks_run_the_whole_pipeline(tmp_path):
    target = save_toy_target(tmp_path/'target')
    steps = [('prompts', dict(out=tmp_path/'prompts', sample_size=24, test_size=.2)),
             ('regenerate', dict(jsonl=tmp_path/'prompts'/'train.jsonl', out=tmp_path/'regenerated.jsonl', target=target, preset='greedy', max_tokens=24)),
             ('cache', dict(jsonl=tmp_path/'regenerated.jsonl', out=tmp_path/'cache', target=target, layers=[0, 1], max_length=192)),
             ('train', dict(recipe='dspark_toy', cache=tmp_path/'cache', out=tmp_path/'train', opts=[f'target={target}', 'max_steps=4', 'seed=1'])),
             ('evaluate', dict(prompts={'heldout': str(tmp_path/'prompts'/'eval.jsonl')}, drafts={'dspark': str(tmp_path/'train')},
                               out=tmp_path/'eval', target=target, max_new_tokens=8, num_prompts=2))]
    for name, parameters in steps:
        execute_report(f'step_{name}', tmp_path/'executed', cwd=tmp_path, html=False, **parameters)
    assert json.loads((tmp_path/'eval'/'results.json').read_text())['total']['num_prompts'] == 2


@pytest.mark.slow # two more notebook kernels, and two processes under one of them
@pytest.mark.parametrize('nproc', [1, 2])
def test_the_training_notebook_captures_online(tmp_path, nproc):
    target = save_toy_target(tmp_path/'target')
    execute_report('step_train', tmp_path/'executed', cwd=tmp_path, html=False, recipe='dspark_toy', features='online', jsonl=str(write_rows(tmp_path/'rows.jsonl')),
                   out=tmp_path/'train', opts=[f'target={target}', 'max_steps=4'], nproc=nproc)
    assert (tmp_path/'train'/'step_latest'/'model.safetensors').exists()


@pytest.mark.parametrize('path', sorted(reports_folder().glob('*.ipynb')), ids=lambda p: p.stem)
def test_reports_declare_parameters(path):
    assert report_parameters(path)
