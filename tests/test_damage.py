"""Every file that a command reads, damaged in every way: one line that names it and exit code 2, and never a traceback

A check may answer 1, and a command may go on (0) where the file is not needed or a half-written last line is what a kill leaves."""
import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from deepspec.cli.main import main
from deepspec.model.target import save_toy_target

RECIPE = '-o target=target -o target_layer_ids=1 -o max_steps=2 -o global_batch_size=4 -o micro_batch_size=2 -o num_anchors=4'
TRAIN = f'train dspark_smollm2_135m --cache cache {RECIPE} --device cpu'
MEMORY = ('babilong train --model_name_or_path tiny --train_base --max_length 128 --chunk_size 32 --max_samples 8 --save_steps 1 --device cpu')
BUILD = 'cache build talks.jsonl --target target --layers 1 --device cpu'
ANSWER = 'regenerate talks.jsonl --target target --engine transformers --preset greedy --max-tokens 6 --device cpu'
MEASURE = 'evaluate asked.jsonl --out measured --target target --draft dspark=draft --max-new-tokens 6 --device cpu'
SPEEDS = 'schedule measured/cycles.jsonl --draft dspark=draft --num-steps 10 --out new.json'
MADE = [f'{ANSWER} --out answers/rows.jsonl', f'{BUILD} --out cache', f'{TRAIN} --out draft', MEASURE,
        'calibrate measured/cycles.jsonl --draft dspark=draft',
        'schedule measured/cycles.jsonl --draft dspark=draft --target target --max-pass-tokens 64 --num-steps 10 --out speeds.json --device cpu',
        'prompts --source talks.jsonl --out split', 'babilong generate stories.json --num-samples 4 --length-tokens 200',
        f'{MEMORY} --data_path generate:qa1 --output_dir memory --max_steps 1']

READERS = {
    'cache/manifest.json': ['cache info cache', 'cache verify cache --full', 'cache repair cache', f'{TRAIN} --out new', f'{BUILD} --out cache'],
    'cache/samples.idx': ['cache info cache', 'cache verify cache --full', f'{TRAIN} --out new'],
    'cache/shard-00000.bin': ['cache verify cache --full', f'{TRAIN} --out new'],
    'draft/step_2/config.json': [MEASURE, 'export draft --out new --check'],
    'draft/step_2/model.safetensors': [MEASURE, 'export draft --out new --check'],
    'draft/step_2/confidence_calibration.json': [f'{SPEEDS} --speeds speeds.json', f'{MEASURE} --confidence-threshold .1'],
    'draft/config.json': [f'{TRAIN} --out draft'],
    'measured/cycles.jsonl': ['calibrate measured/cycles.jsonl --draft dspark=draft', f'{SPEEDS} --speeds speeds.json'],
    'speeds.json': [f'{SPEEDS} --speeds speeds.json'],
    'asked.jsonl': [MEASURE],
    'talks.jsonl': [f'{BUILD} --out new', f'{BUILD} --out cache', 'mask show talks.jsonl --target target', 'mask check talks.jsonl --target target',
                'plan --jsonl talks.jsonl --target target --layers 1', f'{ANSWER} --out new/rows.jsonl', 'prompts --source ./talks.jsonl --out new'],
    'answers/rows.jsonl': [f'{ANSWER} --out answers/rows.jsonl'],
    'answers/run.json': [f'{ANSWER} --out answers/rows.jsonl'],
    'split/summary.json': ['prompts --source ./talks.jsonl --out split --skip-existing'],
    'stories.json': ['babilong show stories.json', f'{MEMORY} --data_path stories.json --output_dir new --max_steps 1'],
    'memory/config.json': ['babilong evaluate memory --max-samples 2 --device cpu'],
    'memory/full_checkpoint.pt': ['babilong evaluate memory --max-samples 2 --device cpu'],
    'memory/resume.pt': [f'{MEMORY} --data_path generate:qa1 --output_dir memory --max_steps 2 --resume'],
    'target/config.json': [f'{BUILD} --out new', MEASURE, 'plan --target target --layers 1 --tokens-per-sample 9 --num-samples 9'],
    'target/tokenizer.json': [f'{BUILD} --out new', 'mask check talks.jsonl --target target'],
    'target/model.safetensors': [f'{BUILD} --out new', f'{TRAIN} --out new'],
}


def run(line):
    "Exit code and the last line on stderr"
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try: main(line.split())
        except SystemExit as e: return e.code or 0, (said.getvalue().strip().splitlines() or [''])[-1]
    return 0, ''


def other_object(data):
    "A JSON object with the same keys and senseless values; None where the file is no JSON"
    try: first = json.loads(data.splitlines()[0] if data.count(b'\n{') else data)
    except ValueError: return None
    return json.dumps({k: dict(x=1) for k in first}).encode() + b'\n' if isinstance(first, dict) else None


DAMAGES = dict(garbage=lambda b: b'no good \xff\n', a_list=lambda b: b'[1, 2]\n', empty=lambda b: b'', half=lambda b: b[:len(b)//2],
               other=other_object, absent=None, folder=None)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "A folder in which every command has been"
    home, here = tmp_path_factory.mktemp('made'), Path.cwd()
    os.chdir(home)
    save_toy_target('target')
    asked = [f'What is the sum of {i} and 3?' for i in range(8)]
    said = dict(role='assistant', content='The answer is four and the sea is wide. The answer is four.')
    rows = [dict(id=str(i), conversations=[dict(role='user', content=q), said]) for i, q in enumerate(asked)]
    Path('talks.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    Path('asked.jsonl').write_text(''.join(json.dumps(dict(id=str(i), turns=[q])) + '\n' for i, q in enumerate(asked[:2])))
    for line in MADE: assert run(line)[0] == 0, line
    os.chdir(here)
    return home


@pytest.mark.parametrize('damage', DAMAGES)
@pytest.mark.parametrize('name', READERS)
def test_a_damaged_file_is_one_line(made, tmp_path, monkeypatch, name, damage):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    data, make = (made/name).read_bytes(), DAMAGES[damage]
    new = make(data) if make else None
    if make and new is None: pytest.skip('the file is no JSON object')
    for n, line in enumerate(READERS[name]):
        shutil.copytree(made, tmp_path/str(n), symlinks=True)
        monkeypatch.chdir(tmp_path/str(n))
        path = Path(name)
        path.unlink()
        if damage == 'folder': path.mkdir()
        elif make: path.write_bytes(new)
        code, said = run(line)
        assert code in (0, 1, 2), f'{line}: {said}'
        if code == 2: assert said.startswith('deepspec: ') and name.split('/')[0].split('.')[0] in said, f'{line}: {said}'


def test_what_is_not_needed_is_the_only_thing_that_may_be_damaged(made, tmp_path, monkeypatch):
    "A damaged file that its command needs is never read as if it were sound"
    needed = [n for n in READERS if not n.startswith('answers/') and n != 'talks.jsonl']
    for name in needed:
        shutil.copytree(made, tmp_path/name, symlinks=True)
        monkeypatch.chdir(tmp_path/name)
        Path(name).write_bytes(b'no good \xff\n')
        assert {run(line)[0] for line in READERS[name]} <= {1, 2}, name


SENSELESS = [
    ('evaluate', MEASURE, '--temperature nan', 'temperature=nan must be at least 0'),
    ('evaluate', MEASURE, '--batch-size 0', 'batch_size=0 must be at least 1'),
    ('evaluate', MEASURE, '--seed -1', 'seed=-1 must be at least 0'),
    ('cache build', f'{BUILD} --out new', '--max-batch-tokens 0', 'max_batch_tokens=0 must be at least 1'),
    ('cache build', f'{BUILD} --out new', '--min-loss-tokens -1', 'min_loss_tokens=-1 must be at least 0'),
    ('regenerate', f'{ANSWER} --out new/rows.jsonl', '--window 0', 'window=0 must be at least 1'),
    ('regenerate', f'{ANSWER} --out new/rows.jsonl', '--timeout-s nan', 'timeout_s=nan must be at least'),
    ('regenerate', ANSWER.replace('transformers', 'llamacpp') + ' --out new/rows.jsonl', '--num-servers 0', 'num_servers=0 must be at least 1'),
    ('calibrate', 'calibrate measured/cycles.jsonl --draft dspark=draft', '--share 1', 'share=1.0 must lie between 0 and 1'),
    ('calibrate', 'calibrate measured/cycles.jsonl --draft dspark=draft', '--seed -1', 'seed=-1 must be at least 0'),
    ('schedule', f'{SPEEDS} --speeds speeds.json', '--concurrency 0', 'concurrency=0 must be at least 1'),
    ('plan', 'plan --jsonl talks.jsonl --target target --layers 1', '--num-samples -1', 'num_samples=-1 must be at least 1'),
    ('plan', 'plan --jsonl talks.jsonl --target target --layers 1', '--tokens-per-s nan', 'tokens_per_s=nan must be at least'),
    ('serve', 'serve --target target --engine sglang --dry-run', '--num-servers 0', 'num_servers=0 must be at least 1'),
    ('serve', 'serve --target target --engine sglang --dry-run', '--tp-size 0', 'tp_size=0 must be at least 1'),
    ('serve', 'serve --target target --engine sglang --dry-run', '--mem-fraction-static 8', 'mem_fraction_static=8.0 must lie between'),
    ('schedule', f'{SPEEDS} --speeds speeds.json', '--num-steps 0', 'num_steps=0 must be at least 1'),
]


@pytest.mark.parametrize('command, line, option, words', SENSELESS, ids=[f'{c} {o}' for c, _, o, _ in SENSELESS])
def test_a_senseless_number_is_called_by_its_name(made, tmp_path, monkeypatch, command, line, option, words):
    shutil.copytree(made, tmp_path/'here', symlinks=True)
    monkeypatch.chdir(tmp_path/'here')
    code, said = run(f'{line} {option}')
    assert code == 2 and words in said, said
