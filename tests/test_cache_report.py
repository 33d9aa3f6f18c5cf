"The storage report runs with and without a cache, and comes out at the known order of size"
import json

import matplotlib
import pytest
import torch
from conftest import ROOT

from deepspec.cache.writer import write_cache

matplotlib.use('agg')


def run_report(**parameters):
    "Run the report's code cells in this process; returns its variables"
    notebook = json.loads((ROOT/'reports'/'storage_cost.ipynb').read_text())
    cells = [c for c in notebook['cells'] if c['cell_type'] == 'code']
    scope = {}
    for c in cells:
        exec(''.join(c['source']), scope)
        if 'parameters' in c['metadata'].get('tags', []): scope.update(parameters)
    return scope


def test_without_a_cache(capsys):
    full = run_report()['full']
    assert 3e13 < full.num_bytes < 6e13 and '30,726' in capsys.readouterr().out


@pytest.mark.parametrize('dropped', [{}, {'too short': 3}])
def test_with_a_cache(dropped, tmp_path):
    def sample(n): return dict(input_ids=torch.ones(n, dtype=torch.int32), loss_mask=torch.ones(n, dtype=torch.uint8),
                               target_hidden_states=torch.zeros(n, 8).bfloat16(),
                               target_last_hidden_states=torch.zeros(n, 4).bfloat16())
    write_cache(tmp_path/'c', map(sample, range(1, 30)), [0, 1], 4, dropped=dropped)
    scope = run_report(cache=str(tmp_path/'c'), num_samples=1000)
    assert scope['full'].num_samples == 1000 and sorted(scope['lengths']) == list(range(1, 30))
