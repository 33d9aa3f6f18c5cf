"The report of the memory experiment runs with passed parameters, experiment included"
import subprocess, sys
from pathlib import Path

import pytest

from deepspec.io import read_json

ROOT = Path(__file__).parents[1]


@pytest.mark.slow  # trains two tiny arms and starts a kernel and a fresh process
def test_report_runs_and_parameters_arrive(tmp_path):
    passed = dict(out=str(tmp_path/'run'), num_samples=2, curriculum='64:2:2:32,512:1:1:256')
    lists = dict(seeds='[4, 5]', lengths='[512]', cost_lengths='[600]')
    papermill = [sys.executable, '-m', 'papermill', '--cwd', '.']
    command = [*papermill, 'reports/babilong_memory.ipynb', str(tmp_path/'out.ipynb')]
    for k, v in passed.items(): command += ['-p', k, str(v)]
    for k, v in lists.items(): command += ['-y', f'{k}: {v}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results = read_json(tmp_path/'run'/'results.json')
    assert [(r['train_seed'], r['num_samples']) for r in results['accuracy']] == [(4, 2)]*3 + [(5, 2)]*3
    assert results['run']['config']['curriculum'] == passed['curriculum']
