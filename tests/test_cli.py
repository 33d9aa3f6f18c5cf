"Every mistake a user can make ends with one line and exit code 2"
import json
import socket
import subprocess
import sys

import pytest
from fake_server import FakeServer

from deepspec.cli.main import main
from deepspec.model.target import save_toy_target


def deepspec(*arguments, **kwargs):
    "Run the command and wait"
    return subprocess.run([sys.executable, '-m', 'deepspec', *map(str, arguments)], capture_output=True, text=True, timeout=120, **kwargs)


def refused(result, *words):
    "Assert a one-line refusal that says these words"
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert 'Traceback' not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith('deepspec: ')]
    assert len(lines) == 1, result.stderr
    for word in words: assert word in lines[0], lines[0]


@pytest.fixture(scope='module')
def toy(tmp_path_factory):
    return save_toy_target(tmp_path_factory.mktemp('toy')/'target')


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp('rows')/'rows.jsonl'
    row = dict(id='a', conversations=[dict(role='user', content='Hello'), dict(role='assistant', content='A long enough answer, in words. ' * 3)])
    path.write_text(''.join(json.dumps(row | dict(id=str(i))) + '\n' for i in range(4)))
    return path


def test_unknown_target(rows, tmp_path):
    refused(deepspec('cache', 'build', rows, '--out', tmp_path/'c', '--target', './nowhere'), './nowhere', 'no such folder')


def test_output_folder_holds_something_else(tmp_path):
    (tmp_path/'thesis.tex').touch()
    refused(deepspec('quickstart', '--smoke', '--out', tmp_path), 'thesis.tex', 'empty folder')


def test_bad_option(toy):
    refused(deepspec('train', 'dspark_toy', '--cache', 'x', '-o', 'learning_rate=3e-4'), 'learning_rate')
    refused(deepspec('train', 'dspark_toy', '--cache', 'x', '-o', 'lr=fast'), 'lr')
    refused(deepspec('train', 'no_such_recipe', '--cache', 'x'), 'dspark_smollm2_135m')


def test_held_out_prompts_need_steps(toy, tmp_path):
    refused(deepspec('train', 'dspark_toy', '--cache', tmp_path, '--eval-prompts', tmp_path/'eval.jsonl'), '--eval-steps')
    refused(deepspec('train', 'dspark_toy', '--cache', tmp_path, '--eval-steps', '5'), '--eval-prompts')


def test_missing_and_broken_cache(toy, tmp_path):
    refused(deepspec('cache', 'info', tmp_path), 'manifest.json')
    (tmp_path/'manifest.json').write_text('{"version": 2')
    refused(deepspec('cache', 'info', tmp_path), 'manifest.json')


def test_damaged_shard_is_named(rows, toy, tmp_path):
    cache = tmp_path/'cache'
    built = deepspec('cache', 'build', rows, '--out', cache, '--target', toy, '--layers', '0,1', '--json')
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)['num_samples'] == 4
    shard = next(cache.glob('shard-*.bin'))
    shard.write_bytes(shard.read_bytes()[:-1])
    checked = deepspec('cache', 'verify', cache)
    assert checked.returncode == 1 and shard.name in checked.stdout
    refused(deepspec('train', 'dspark_toy', '--cache', cache, '--out', tmp_path/'t', '-o', f'target={toy}'), shard.name)


def test_last_layer_is_refused(rows, toy, tmp_path):
    refused(deepspec('cache', 'build', rows, '--out', tmp_path/'c', '--target', toy, '--layers', '1,3'), 'last decoder layer')


def test_port_in_use():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        port = s.getsockname()[1]
        refused(deepspec('serve', '--engine', 'llamacpp', '--port', port), str(port))


def test_missing_package(toy):
    refused(deepspec('serve', '--engine', 'vllm', '--target', toy), 'vllm')


def test_flags_for_the_engine_reach_it(tmp_path):
    "The stand-in interpreter says what it was called with, and ends as a server with a bad flag does"
    stand_in = tmp_path/'python'
    stand_in.write_text('#!/bin/sh\necho "$@"; exit 3\n')
    stand_in.chmod(0o755)
    flags = ['--tp-size', 2, '--mem-fraction-static', .8, '--engine-flags', "--context-length 8192 --x 'a b'"]
    refused(deepspec('serve', '--engine', 'sglang', '--target', 'Qwen/Qwen3-4B', '--engine-python', stand_in, *flags, cwd=tmp_path),
            'exit code 3', 'sglang.launch_server --model-path Qwen/Qwen3-4B', '--tp-size 2', '--mem-fraction-static 0.8',
            '--context-length 8192 --x a b')
    assert [p.name for p in (tmp_path/'logs'/'sglang_qwen3_4b').iterdir()] == ['server_30000.log']


def test_sampling_options_replace_the_presets(rows, tmp_path):
    with FakeServer(model='Qwen3-4B') as server:
        done = deepspec('regenerate', rows, '--out', tmp_path/'o'/'t.jsonl', '--server-address', server.url, '--temperature', 1.3,
                        '--min-p', .02, '--disable-thinking', '--seed', 4, '--window', 2, '--json')
        assert done.returncode == 0, done.stderr
        assert server.max_in_flight <= 2 and len({r['seed'] for r in server.requests}) == 4
    want = dict(temperature=1.3, top_p=.8, top_k=20, min_p=.02, repetition_penalty=1., chat_template_kwargs=dict(enable_thinking=False))
    assert all({k: r[k] for k in want} == want for r in server.requests)
    assert 'temperature=1.3, top_p=0.8, top_k=20, min_p=0.02' in done.stderr # the log says what is asked


def test_no_server_answers(rows, tmp_path):
    refused(deepspec('regenerate', rows, '--out', tmp_path/'o.jsonl', '--server-address', 'http://127.0.0.1:9'), '127.0.0.1:9')


def test_report_parameters(tmp_path):
    refused(deepspec('report', 'no_such_report'), 'pipeline')
    refused(deepspec('report', 'pipeline', '-p', 'rnu=x', '--out', tmp_path), 'rnu')


def test_usage_errors_are_short():
    result = deepspec('plan', '--no-such-option')
    assert result.returncode == 2 and 'Traceback' not in result.stderr


def test_plan_counts_bytes(toy):
    result = deepspec('plan', '--target', toy, '--layers', '0,1', '--num-samples', 10, '--tokens-per-sample', 100, '--json')
    assert json.loads(result.stdout)['num_bytes'] == 10*(100*(6 + 2*32*3) + 56)  # and the index


def test_plan_of_the_public_recipe(tmp_path):
    "Qwen3-4B over Open-PerfectBlend comes out at tens of terabytes, from its configuration alone"
    config = dict(model_type='qwen3', hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                  vocab_size=151936, architectures=['Qwen3ForCausalLM'])
    (tmp_path/'config.json').write_text(json.dumps(config))
    result = deepspec('plan', '--target', tmp_path, '--layers', '1,9,17,25,33', '--num-samples', 1_300_000, '--tokens-per-sample', 1200, '--json')
    assert json.loads(result.stdout)['num_bytes'] == 1_300_000*(1200*30_726 + 56)


@pytest.fixture(scope='module')
def measured(toy, tmp_path_factory):
    "A draft with heads and one without, and an evaluation of the first"
    import torch
    from deepspec.model.drafts import draft_from_target
    from deepspec.model.dspark import DSparkConfig
    from deepspec.model.target import load_target
    out, target = tmp_path_factory.mktemp('measured'), load_target(toy)
    choices = dict(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=1, block_size=4)
    torch.manual_seed(0)
    draft_from_target(target, DSparkConfig(**choices, markov_rank=8)).save_pretrained(out/'dspark'/'step_1')
    draft_from_target(target, DSparkConfig(**choices, markov_head_type=None, enable_confidence_head=False)).save_pretrained(
        out/'dflash'/'step_1')
    done = deepspec('evaluate', 'sample', '--out', out/'eval', '--draft', f'dspark={out}/dspark/step_1', '--target', toy,
                    '--max-new-tokens', 12, '--num-prompts', 2, '--json')
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)['drafts']['dspark']['identical_share'] == 1
    return out


def test_calibrate_sweep_and_schedule_follow_an_evaluation(measured, toy):
    named = f'dspark={measured}/dspark/step_1'
    done = deepspec('calibrate', measured/'eval'/'cycles.jsonl', '--draft', named)
    assert done.returncode == 0 and 'ECE before' in done.stdout, done.stderr
    temperatures = json.loads((measured/'dspark'/'step_1'/'confidence_calibration.json').read_text())['temperatures']
    done = deepspec('sweep', 'sample', '--draft', named, '--out', measured/'eval'/'threshold_sweep.json', '--target', toy,
                    '--confidence-threshold', 0, '--confidence-threshold', 1, '--max-new-tokens', 12, '--num-prompts', 1, '--json')
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((measured/'eval'/'threshold_sweep.json').read_text())
    assert found['run']['config']['confidence_temperatures'] == temperatures and found['num_prompts'] == 4
    assert [p['verified_per_cycle'] > 0 for p in found['points']] == [True, False]
    done = deepspec('schedule', measured/'eval'/'cycles.jsonl', '--draft', named, '--target', toy, '--max-pass-tokens', 20,
                    '--concurrency', 1, '--concurrency', 4, '--out', measured/'eval'/'schedule.json', '--num-steps', 10)
    assert done.returncode == 0 and done.stdout.splitlines()[0].split()[-2:] == ['1', '4'], done.stderr
    again = deepspec('schedule', measured/'eval'/'cycles.jsonl', '--draft', 'dspark', '--concurrency', 2, '--out',
                     measured/'again.json', '--speeds', measured/'eval'/'schedule.json', '--num-steps', 10, '--json')
    first = json.loads((measured/'eval'/'schedule.json').read_text())
    assert json.loads(again.stdout)['table'] == first['table'] and first['run']['config']['temperatures'] == temperatures
    assert json.loads(again.stdout)['run']['config']['temperatures'] is None


def test_threshold_uses_the_draft_s_own_calibration(measured, toy, tmp_path):
    folder = measured/'dspark'/'step_1'
    if not (folder/'confidence_calibration.json').exists(): deepspec('calibrate', measured/'eval'/'cycles.jsonl', '--draft', f'dspark={folder}')
    options = ['--target', toy, '--max-new-tokens', 8, '--num-prompts', 1, '--confidence-threshold', .2]
    done = deepspec('evaluate', 'sample', '--out', tmp_path/'eval', '--draft', f'dspark={folder}', *options)
    assert done.returncode == 0, done.stderr
    used = json.loads((tmp_path/'eval'/'run.json').read_text())['config']['decode']['confidence_temperatures']
    assert len(used) == 4
    refused(deepspec('evaluate', 'sample', '--out', tmp_path/'two', '--draft', f'dspark={folder}', '--draft',
                     f'b={measured}/dflash/step_1', *options), 'one draft at a time')
    refused(deepspec('calibrate', tmp_path/'eval'/'cycles.jsonl', '--draft', f'dspark={folder}'), 'threshold', 'evaluate again')


def test_measuring_mistakes(measured, toy, tmp_path):
    cycles, dflash = measured/'eval'/'cycles.jsonl', f'dflash={measured}/dflash/step_1'
    refused(deepspec('sweep', 'sample', '--draft', dflash, '--target', toy, '--out', tmp_path/'s.json'), 'no confidence head')
    assert not (tmp_path/'s.json').exists()
    refused(deepspec('calibrate', cycles, '--draft', dflash), "'dflash'", 'dspark')
    refused(deepspec('schedule', cycles, '--draft', dflash, '--target', toy), 'confidence_calibration.json', 'calibrate')
    refused(deepspec('schedule', cycles, '--draft', 'dspark', '--target', toy, '--max-pass-tokens', 4), 'profile larger passes')
    refused(deepspec('evaluate', 'a.jsonl', 'b/a.jsonl', '--out', tmp_path/'e', '--target', toy), 'given twice')


def test_the_public_protocol_names_what_is_missing(toy, tmp_path):
    refused(deepspec('evaluate', tmp_path, '--protocol', 'public', '--out', tmp_path/'e', '--target', toy), 'gsm8k.jsonl')
    refused(deepspec('evaluate', tmp_path, '--protocol', 'mine', '--out', tmp_path/'e', '--target', toy), 'choose public')


def said(capsys, *arguments):
    "Exit code and the JSON object that a command prints, in this process"
    with pytest.raises(SystemExit) as end: main([*arguments, '--json'])
    return end.value.code or 0, json.loads(capsys.readouterr().out)


def test_dry_runs_write_nothing(rows, toy, measured, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, left = said(capsys, 'regenerate', rows, '--out', 'o/t.jsonl', '--target', 'Qwen/Qwen3-4B', '--top-k', 7, '--dry-run')
    assert code == 0 and left['pending'] == left['input_rows'] == 4 and left['sampling']['top_k'] == 7
    assert said(capsys, 'cache', 'build', rows, '--out', 'c', '--target', toy, '--layers', '0,1', '--dry-run')[1]['num_samples'] == 4
    assert said(capsys, 'train', 'dspark_toy', '--dry-run')[1]['name'] == 'dspark_toy'
    assert said(capsys, 'quickstart', '--smoke', '--out', 'q', '--dry-run')[1]['train_rows']
    planned = said(capsys, 'evaluate', 'sample', '--out', 'e', '--draft', f'dspark={measured}/dspark/step_1', '--num-prompts', 2, '--dry-run')[1]
    assert set(planned['prompts'].values()) == {2} and list(planned['drafts']) == ['dspark']
    with pytest.raises(SystemExit): main(['serve', '--dry-run', '--engine', 'vllm', '--num-servers', 2, '--port', 81])
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(f'CUDA_VISIBLE_DEVICES={i} ') and f'--port {81 + i} ' in line for i, line in enumerate(lines)] == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_a_script_reads_every_fault(measured, rows, toy, tmp_path, capsys):
    done = deepspec('cache', 'build', rows, '--out', tmp_path/'c', '--target', toy, '--layers', '0,1')
    assert done.returncode == 0, done.stderr
    assert said(capsys, 'cache', 'verify', tmp_path/'c', '--full') == (0, dict(sound=True, full=True, problems=[]))
    assert said(capsys, 'cache', 'repair', tmp_path/'c')[1] == {}
    shard = next((tmp_path/'c').glob('shard-*.bin'))
    shard.write_bytes(shard.read_bytes()[:-1])
    code, found = said(capsys, 'cache', 'verify', tmp_path/'c')
    assert code == 1 and [p['file_name'] for p in found['problems']] == [shard.name]
    assert said(capsys, 'export', measured/'dspark', '--out', tmp_path/'e') == (0, dict(folder=str(tmp_path/'e')))
    assert 'pipeline' in said(capsys, 'report', '--list')[1] and 'dspark_toy' in said(capsys, 'train', '--list')[1]['recipes']


def test_output_away_from_a_terminal_has_no_bar_and_no_colour(rows, toy, tmp_path):
    done = deepspec('cache', 'build', rows, '--out', tmp_path/'c', '--target', toy, '--layers', '0,1')
    assert done.returncode == 0 and not any(c in done.stdout + done.stderr for c in '\r\x1b█'), done.stderr
