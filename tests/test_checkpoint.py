"Checkpoints under kills: whatever a kill leaves, the latest one is whole"
import os
import subprocess
import sys
import time

import pytest

from deepspec.model.drafts import draft_from_target, load_draft
from deepspec.model.dspark import DSparkConfig  # noqa: F401  evaluated from CHOICES
from deepspec.model.target import toy_target
from deepspec.train import checkpoint
from deepspec.train.checkpoint import checkpoints, latest_checkpoint, load_training_state, save_checkpoint

CHOICES = "DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=1, block_size=4, markov_rank=8)"
SAVER = f'''
import itertools
from deepspec.model.drafts import draft_from_target
from deepspec.model.dspark import DSparkConfig
from deepspec.model.target import toy_target
from deepspec.train.checkpoint import save_checkpoint
import sys
draft = draft_from_target(toy_target(), {CHOICES})
for step in itertools.count(1): save_checkpoint(sys.argv[1], step, draft, draft.state_dict(), dict(step=step), {{}}, keep_last=2)
'''


def draft(): return draft_from_target(toy_target(), eval(CHOICES))


def test_a_kill_at_any_moment_leaves_a_whole_latest_checkpoint(tmp_path):
    process = subprocess.Popen([sys.executable, '-c', SAVER, str(tmp_path)])
    while len(checkpoints(tmp_path)) < 2: time.sleep(.01)
    time.sleep(.137)
    process.kill()
    process.wait()
    state = load_training_state(latest_checkpoint(tmp_path))
    assert state['step'] == int(latest_checkpoint(tmp_path).name[5:])
    assert load_draft(tmp_path/'step_latest').config.block_size == 4
    assert load_training_state(tmp_path/'step_latest')['step'] >= state['step'] - 1


@pytest.mark.parametrize('broken', ['_flush_files', 'point_latest'])
def test_a_failure_while_saving_keeps_the_old_one(tmp_path, monkeypatch, broken):
    d = draft()
    save_checkpoint(tmp_path, 1, d, d.state_dict(), dict(step=1), {})
    def fail(*a): raise OSError('disk full')
    monkeypatch.setattr(checkpoint, broken, fail)
    with pytest.raises(OSError): save_checkpoint(tmp_path, 2, d, d.state_dict(), dict(step=2), {})
    assert os.readlink(tmp_path/'step_latest') == 'step_1'
    assert load_training_state(tmp_path/'step_latest')['step'] == 1
    monkeypatch.undo()
    save_checkpoint(tmp_path, 2, d, d.state_dict(), dict(step=2), {})
    assert os.readlink(tmp_path/'step_latest') == 'step_2' and not list(tmp_path.glob('.step*'))


def test_keep_last_and_saving_the_same_step_twice(tmp_path):
    d = draft()
    for step in (5, 50, 100, 100): save_checkpoint(tmp_path, step, d, d.state_dict(), dict(step=step), {}, keep_last=2)
    assert [p.name for p in checkpoints(tmp_path)] == ['step_50', 'step_100']


def test_a_damaged_state_is_named(tmp_path):
    d = draft()
    folder = save_checkpoint(tmp_path, 1, d, d.state_dict(), dict(step=1), {})
    (folder/'training_state.pt').write_bytes(b'PK nonsense')
    with pytest.raises(ValueError, match='training_state.pt: cannot be read'): load_training_state(folder)


def test_other_things_are_no_checkpoints(tmp_path):
    for name in ('step_x', '.step_3.tmp', 'step_7b'): (tmp_path/name).mkdir()
    (tmp_path/'step_9').write_text('a file')
    assert checkpoints(tmp_path) == [] and latest_checkpoint(tmp_path) is None
