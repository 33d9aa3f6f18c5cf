"The three analysis reports, executed from result files of a toy run"
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspec.eval.calibrate import calibrate_draft, load_calibration
from deepspec.eval.decode import DecodeConfig
from deepspec.eval.evaluate import evaluate_drafts
from deepspec.eval.prompt_sets import sample_prompt_sets
from deepspec.eval.schedule import SpsTable, schedule_report
from deepspec.eval.sweep import sweep_thresholds
from deepspec.io import read_json, write_json
from deepspec.model.drafts import draft_from_target
from deepspec.model.dspark import DSparkConfig
from deepspec.model.target import toy_target

REPORTS = Path(__file__).parent.parent/'reports'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp('run')
    target, prompts = toy_target('qwen3'), {k: v[:2] for k, v in sample_prompt_sets().items()}
    choices = DSparkConfig(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=1, block_size=4, markov_rank=8)
    torch.manual_seed(0)
    draft, other = draft_from_target(target, choices), draft_from_target(target, choices, seed=1)
    config = DecodeConfig(max_new_tokens=16, stop_ids=())
    evaluate_drafts(target, dict(dspark=draft, untrained=other), prompts, out/'eval', config)
    calibrate_draft(out/'eval'/'cycles.jsonl', 'dspark', out)
    schedule_report(out/'eval'/'cycles.jsonl', 'dspark', SpsTable((1, 8, 64), (20., 18., 4.)), out/'eval'/'schedule.json',
                    load_calibration(out), num_steps=20)
    # one answer parts from plain decoding, as rounding to bf16 can make it
    rounded = read_json(out/'eval'/'results.json')
    one = dict(set='chat', id='chat-0', turn=0, position=3, logit_gap=.01, rounding=.02, near_tie=True)
    rounded['total']['drafts']['dspark'] |= dict(identical_share=.875, divergences=[one], unexplained=0)
    write_json(out/'bf16'/'results.json', rounded)
    subprocess.run([sys.executable, REPORTS.parent/'benchmarks'/'bench_decode.py', '--toy', '--max-new-tokens', '8', '--num-prompts',
                    '1', '--out', out/'bench.json'], check=True, capture_output=True)
    sweep_thresholds(target, draft, prompts['chat'], out/'sweep.json', config, thresholds=(0., .3, .6))
    return out


@pytest.mark.slow # a kernel for each report; the reports of a real run are executed with the docs
@pytest.mark.parametrize('name,parameters', [
    ('acceptance', dict(evaluation='eval')), ('acceptance', dict(evaluation='eval', bf16='bf16', bench='bench.json')),
    ('calibration', dict(calibration='confidence_calibration.json', sweep='sweep.json')),
    ('calibration', dict(calibration='confidence_calibration.json')), ('scheduling', dict(schedule='eval/schedule.json'))])
def test_report_executes(run, name, parameters):
    import papermill
    given = {k: str(run/v) for k, v in parameters.items()}
    executed = papermill.execute_notebook(REPORTS/f'{name}.ipynb', run/f'{name}.ipynb', given, progress_bar=False)
    outputs = [o for c in executed.cells for o in c.get('outputs', ())]
    assert sum('image/png' in o.get('data', {}) for o in outputs) >= 2
    said = str(outputs)
    assert ('87.5%' in said and '1 of 1 first differences' in said) == ('bf16' in parameters)
    assert ('perfect draft' in said) == ('bench' in parameters)
    for value in given.values(): assert any(value in c.source for c in executed.cells) # the parameters arrived
