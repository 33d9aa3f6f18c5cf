"Several drafts and seeds from one cache: the whole comparison on a toy target, and its report"
import json
import subprocess
import sys

import pytest

from deepspec.pipeline.learning import SMOKE_LEARNING, cycles_by_prompt, learning_budget, run_learning, train_one
from deepspec.report.render import execute_report


@pytest.mark.slow # four trainings, an evaluation and a notebook kernel
def test_the_comparison_from_start_to_report(tmp_path):
    out = tmp_path/'learning'
    done = run_learning(out, SMOKE_LEARNING)
    assert set(done['evaluate']['acceptance_length']) == {*SMOKE_LEARNING.names, 'untrained'}
    assert all(share == 1. for share in done['evaluate']['identical_share'].values())
    assert train_one(out, SMOKE_LEARNING, SMOKE_LEARNING.names[0])['steps'] == 3 # finished, so nothing is trained again
    assert [r['draft'] for r in learning_budget(out)] == sorted(SMOKE_LEARNING.names)
    page = execute_report('does_it_learn', tmp_path/'page', cwd=tmp_path, run=str(out)).read_text()
    assert '>target</th>' in page and '<img' in page


def test_a_draft_without_a_prompt_is_named(tmp_path):
    rows = [dict(draft=d, set='s', id=i, num_accepted=1, bonus_id=5) for d, i in (('a', '1'), ('a', '2'), ('b', '1'))]
    (tmp_path/'cycles.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    with pytest.raises(ValueError, match='b has no cycle'): cycles_by_prompt(tmp_path/'cycles.jsonl')


def test_an_unknown_training_ends_with_one_line(tmp_path):
    done = subprocess.run([sys.executable, '-m', 'deepspec.pipeline.learning', '--out', tmp_path, '--only', 'dspark seed 9'], capture_output=True, text=True)
    assert done.returncode == 2 and 'choose one of dspark seed 1' in done.stderr and 'Traceback' not in done.stderr
