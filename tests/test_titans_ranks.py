"Two gloo ranks under DDP and FSDP2 equal one process, with answers in different chunks"
import os, subprocess, sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def launched(out, how, base, depth, ranks):
    "What longmem_ranks.py saved after a run on this many ranks"
    path = os.pathsep.join([str(HERE.parent), os.environ.get('PYTHONPATH', '')])
    env = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=path)
    torchrun = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}'] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(HERE/'longmem_ranks.py'), str(out), how, base, str(depth)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


# the second case starts five more processes that import torch
@pytest.mark.parametrize('base,depth', [('frozen', 1), pytest.param('trained', 2, marks=pytest.mark.slow)])
def test_two_ranks_equal_one(tmp_path, base, depth):
    want = launched(tmp_path/'one.pt', 'ddp', base, depth, 1)
    assert want['count'] == 11
    for how in ('ddp', 'fsdp'):
        got = launched(tmp_path/f'{how}.pt', how, base, depth, 2)
        assert got['count'] == want['count'] and got['loss'] == pytest.approx(want['loss'], rel=1e-5)
        assert got['norm'] == pytest.approx(want['norm'], rel=1e-4)
        assert got['grads'].keys() == want['grads'].keys() and got['after'].keys() == want['after'].keys()
        for kind in ('grads', 'after'):
            for name in want[kind]: torch.testing.assert_close(got[kind][name], want[kind][name], rtol=1e-4, atol=1e-6)
        # five rows on two ranks: the repeated one is not counted
        assert got['found'] == pytest.approx(want['found'], rel=1e-4)
