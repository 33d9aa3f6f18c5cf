"Every mistake a user can make ends with one line and exit code 2"
import json
import socket
import subprocess
import sys

import pytest

from deepspec.model.target import save_toy_target


def deepspec(*arguments, **kwargs):
    "Run the command and wait"
    return subprocess.run([sys.executable, '-m', 'deepspec.cli.main', *map(str, arguments)], capture_output=True, text=True, timeout=120, **kwargs)


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
