"Servers: guards that leave no child behind, restarts, command lines; the real llama-server in the slow lane"
import json, os, signal, subprocess, sys, time, urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from deepspec.data.guard import start_guarded, stop_guarded
from deepspec.data.servers import (ENGINES, LlamaCpp, SGLang, VLLM, answers, check_command, launch_servers, log_tail,
                                   port_is_free, visible_gpus)

FAKE = str(Path(__file__).parent/'fake_server.py')

@dataclass(frozen=True)
class FakeEngine:
    "The fake server as an engine"
    script: str = FAKE
    name = 'fake'
    package = 'json'
    python = sys.executable
    parser = None
    def command(self, model, port): return [sys.executable, self.script, str(port)]
    def env(self, rank): return {}

def running(pid):
    "Whether a process runs; a zombie does not count"
    try: return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
    except FileNotFoundError: return False

def wait_for(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, 'waited in vain'
        time.sleep(.02)

FAMILY = """
import os, signal, subprocess, sys, time
stubborn = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)' if '--stubborn' in sys.argv else 'pass'
exec(stubborn)
worker = subprocess.Popen([sys.executable, '-c', stubborn + '; import time; time.sleep(99)'])
print(os.getpid(), worker.pid, flush=True)
time.sleep(99)
"""
PARENT = f"""
import sys, time
from deepspec.data.guard import start_guarded
start_guarded([sys.executable, '-c', {FAMILY!r}, *sys.argv[2:]], sys.argv[1], grace_s=.5)
time.sleep(99)
"""

def pids_in(log):
    wait_for(lambda: log.exists() and log.read_text().count(' ') >= 1 and log.read_text().endswith('\n'))
    return [int(p) for p in log.read_text().split()]

@pytest.mark.parametrize('signum', [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('flags', [[], ['--stubborn']])
def test_no_child_outlives_its_parent(tmp_path, signum, flags):
    log = tmp_path/'log'
    parent = subprocess.Popen([sys.executable, '-c', PARENT, log, *flags], stderr=subprocess.DEVNULL)
    pids = pids_in(log)
    assert all(map(running, pids))
    parent.send_signal(signum)
    parent.wait(10)
    wait_for(lambda: not any(map(running, pids)))

def test_a_killed_guard_takes_its_server_along(tmp_path):
    guard = start_guarded([sys.executable, '-c', 'import os, time; print(os.getpid(), 0, flush=True); time.sleep(99)'],
                          tmp_path/'log')
    pid = pids_in(tmp_path/'log')[0]
    guard.kill()
    guard.wait()
    wait_for(lambda: not running(pid))

def test_exit_status_passes_through(tmp_path):
    assert start_guarded([sys.executable, '-c', 'raise SystemExit(7)'], tmp_path/'log').wait(10) == 7
    assert start_guarded([sys.executable, '-c', 'import os; os.kill(os.getpid(), 9)'], tmp_path/'log').wait(10) == 137
    assert stop_guarded(start_guarded(['sleep', '99'], tmp_path/'log')) == 0

def test_servers_answer_inside_the_block_and_are_gone_after_it(tmp_path):
    with launch_servers('m', FakeEngine(), 3, log_dir=tmp_path) as urls:
        assert len(set(urls)) == 3 and all(map(answers, urls))
        assert len(list(tmp_path.glob('server_*.log'))) == 3
    assert not any(map(answers, urls))
    assert all(port_is_free(int(u.rsplit(':', 1)[1])) for u in urls)

def test_servers_are_gone_after_an_error_in_the_block(tmp_path):
    with pytest.raises(RuntimeError):
        with launch_servers('m', FakeEngine(), log_dir=tmp_path) as urls: raise RuntimeError
    assert not answers(urls[0])

def test_a_dead_server_is_restarted_with_a_limit(tmp_path, capsys):
    fragile = tmp_path/'fragile.py'
    fragile.write_text(f"import runpy, sys, threading, os, time\n"
                       "threading.Thread(target=lambda: (time.sleep(.8), print('CUDA error: device lost', "
                       "flush=True), os._exit(9)), daemon=True).start()\n"
                       f"sys.argv = [{FAKE!r}, sys.argv[1]]\nrunpy.run_path({FAKE!r}, run_name='__main__')\n")
    with launch_servers('m', FakeEngine(str(fragile)), log_dir=tmp_path, max_restarts=2, heartbeat_s=1) as urls:
        said = ''
        def restarted():
            nonlocal said
            said += capsys.readouterr().err
            return 'restart 2 of 2' in said and 'servers: ' in said
        wait_for(restarted, 20)
        assert 'ended with exit code 9: ' in said and 'CUDA error: device lost' in said and 'restart 1 of 2' in said
    assert not answers(urls[0])

def test_a_server_that_ends_at_start_is_one_line(tmp_path):
    bad = tmp_path/'bad.py'
    bad.write_text("print('loading'); raise SystemExit('the model needs 80 GB, this GPU has 24')")
    with pytest.raises(ValueError, match='exit code 1 at start: .*80 GB') as e:
        with launch_servers('m', FakeEngine(str(bad)), 2, log_dir=tmp_path): pass
    assert '\n' not in str(e.value)

def test_a_server_that_never_answers(tmp_path):
    slow = tmp_path/'slow.py'
    slow.write_text("import time; print('loading shard 1 of 9', flush=True); time.sleep(99)")
    with pytest.raises(ValueError, match='does not answer after .*loading shard 1'):
        with launch_servers('m', FakeEngine(str(slow)), log_dir=tmp_path, ready_timeout_s=1.): pass

def test_user_mistakes(tmp_path):
    with pytest.raises(ValueError, match='name a model'):
        with launch_servers(engine=SGLang(python='/opt/sglang/bin/python')): pass
    with launch_servers('m', FakeEngine(), log_dir=tmp_path) as urls:
        port = int(urls[0].rsplit(':', 1)[1])
        with pytest.raises(ValueError, match=f'port {port} of 127.0.0.1 is in use'):
            with launch_servers('m', FakeEngine(), 1, port, log_dir=tmp_path): pass
    if find_spec('sglang') is None:
        with pytest.raises(ValueError, match='pip install sglang'):
            with launch_servers('m', SGLang()): pass

def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,3,6,7')
    assert [SGLang(tp_size=2).env(r)['CUDA_VISIBLE_DEVICES'] for r in (0, 1)] == ['2,3', '6,7']
    assert SGLang(dp_size=4).env(0)['CUDA_VISIBLE_DEVICES'] == '2,3,6,7'
    with pytest.raises(ValueError, match='ask for fewer servers'): SGLang(dp_size=4).env(1)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES')
    assert visible_gpus(7, 1) == '7'

def test_command_lines():
    command = SGLang(mem_fraction_static=.85, tp_size=2, dp_size=2,
                     flags=('--disable-radix-cache',)).command('Qwen/Qwen3-4B', 30_003)
    assert command[1:3] == ['-m', 'sglang.launch_server']
    text = ' '.join(command)
    for part in ('--model-path Qwen/Qwen3-4B', '--port 30003', '--tp-size 2', '--dp-size 2',
                 '--mem-fraction-static 0.85', '--disable-radix-cache'):
        assert part in text
    assert '--mem-fraction-static' not in SGLang().command('m', 1)
    cpu = VLLM(cpu=True)
    assert '--enforce-eager' in cpu.command('m', 1) and cpu.env(0)['VLLM_CPU_KVCACHE_SPACE'] == '2'
    assert '--enforce-eager' not in VLLM().command('m', 1)
    assert set(ENGINES) == {'llamacpp', 'sglang', 'vllm'}
    assert LlamaCpp().env(0)['GOMP_SPINCOUNT'] == '0'

SERVER_ARGS = """
class ServerArgs:
    def add_cli_args(parser):
        for flag in ('--model-path', '--host', '--port', '--tp-size', '--dp-size'): parser.add_argument(flag)
"""

def test_sglangs_parser_is_asked_before_anything_starts(tmp_path, monkeypatch, capsys):
    "With a stand-in for the package; the real parser: test_sglang_contract.py"
    (tmp_path/'sglang'/'srt').mkdir(parents=True)
    (tmp_path/'sglang'/'srt'/'server_args.py').write_text(SERVER_ARGS)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    good,bad = (SGLang(python=sys.executable, flags=f) for f in ((), ('--bad', '1')))
    assert check_command(good, good.command('m', 1))
    with pytest.raises(ValueError, match='sglang refuses .*--bad 1: .*unrecognized arguments: --bad 1; compare') as e:
        with launch_servers('m', bad, log_dir=tmp_path/'logs'): pass
    assert '\n' not in str(e.value) and not (tmp_path/'logs').exists()
    (tmp_path/'sglang'/'srt'/'server_args.py').write_text('ServerArgs = moved_elsewhere')
    assert not check_command(bad, bad.command('m', 1)) # no parser is no reason to refuse
    assert "could not be asked (NameError: name 'moved_elsewhere'" in capsys.readouterr().err
    absent = SGLang(python=str(tmp_path/'no_python'))
    assert not check_command(absent, absent.command('m', 1))

def test_log_tail(tmp_path):
    assert log_tail(tmp_path/'absent') == 'no log'
    (tmp_path/'l').write_bytes(b'a\n\n\xff b\n' + b'x'*5000 + b'\n')
    assert len(log_tail(tmp_path/'l')) == 600

# needs the 98 MB model
@pytest.mark.slow
def test_the_real_server_end_to_end(tmp_path):
    from transformers import AutoTokenizer
    from deepspec.data.embedded import GOLDEN_LOGPROBS, GOLDEN_PROMPT, embedded_target
    from deepspec.data.regenerate import regenerate
    rows = [dict(id=f'r{i}', conversations=[dict(role='user', content=f'Name {i + 2} colours.'),
                                            dict(role='assistant', content='old'),
                                            dict(role='user', content='Thank you. And one animal?')]) for i in range(6)]
    call = dict(role='assistant', content='', tool_calls=[dict(function=dict(name='add', arguments=dict(a=1, b=2)))])
    turns = [dict(role='user', content='What is 1 + 2?'), call, dict(role='tool', content='3'),
             dict(role='assistant', content='old')]
    rows.append(dict(id='tool', conversations=turns,
                     tools=[dict(type='function', function=dict(name='add', parameters=dict(type='object')))]))
    (tmp_path/'in.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    with launch_servers(engine=LlamaCpp(slots=4), log_dir=tmp_path/'logs') as urls:
        summary = regenerate(tmp_path/'in.jsonl', tmp_path/'o'/'train.jsonl', urls, max_tokens=24)
        ask = dict(messages=[dict(role='user', content=GOLDEN_PROMPT)], max_tokens=1, temperature=0, logprobs=True,
                   top_logprobs=3)
        request = urllib.request.Request(f'{urls[0]}/v1/chat/completions', json.dumps(ask).encode(),
                                         {'Content-Type': 'application/json'})
        top = json.load(urllib.request.urlopen(request))['choices'][0]['logprobs']['content'][0]['top_logprobs']
        tokenizer = AutoTokenizer.from_pretrained(embedded_target())
        for text in ("In 2026 , 12345 67,890.12 don't", 'π≈3.14159 → 你好 🙂', '<|im_start|>user\nhi<|im_end|>\n',
                     '  a\t\n\nb'):
            body = json.dumps(dict(content=text, add_special=False, parse_special=True)).encode()
            request = urllib.request.Request(f'{urls[0]}/tokenize', body, {'Content-Type': 'application/json'})
            tokens = json.load(urllib.request.urlopen(request))['tokens']
            assert tokens == tokenizer(text, add_special_tokens=False)['input_ids']
    assert (summary.num_rows, summary.num_rejected, summary.finish_reasons['kept']) == (7, 0, 1)
    assert all(abs(t['logprob'] - GOLDEN_LOGPROBS[t['token']]) < .1 for t in top)
    for row in map(json.loads, open(tmp_path/'o'/'train.jsonl')):
        given = [t['content'] for t in row['conversations'] if t['role'] == 'assistant']
        for content,ids,reason in zip(given, row['token_ids'], row['finish_reasons']):
            if reason == 'kept': continue
            assert (ids[-1] == tokenizer.eos_token_id) == (reason == 'stop')
            assert tokenizer.decode(ids[:-1] if reason == 'stop' else ids) == content

# two minutes, and an environment with vLLM
@pytest.mark.slow
@pytest.mark.skipif('DEEPSPEC_VLLM_PYTHON' not in os.environ,
                    reason='vLLM wants an environment of its own: name its interpreter in DEEPSPEC_VLLM_PYTHON')
def test_a_real_vllm_server_end_to_end(tmp_path):
    "Several turns, tools, token ids, a prompt that is too long"
    from transformers import AutoTokenizer
    from deepspec.data.embedded import embedded_target
    from deepspec.data.regenerate import regenerate
    user,old = (lambda t: dict(role='user', content=t)), dict(role='assistant', content='old')
    call = dict(role='assistant', content='', tool_calls=[dict(function=dict(name='add', arguments=dict(a=1, b=2)))])
    rows = [dict(id=f'r{i}', conversations=[user(f'Name {i + 2} colours.'), old, user('And one animal?'), old])
            for i in range(8)]
    rows.append(dict(id='tool', conversations=[user('What is 1 + 2?'), call, dict(role='tool', content='3'), old],
                     tools=[dict(type='function', function=dict(name='add', parameters=dict(type='object')))]))
    rows.append(dict(id='long', conversations=[user('word '*3000), old]))
    (tmp_path/'in.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    engine = VLLM(cpu=True, python=os.environ['DEEPSPEC_VLLM_PYTHON'], flags=('--max-model-len', '2048'))
    with launch_servers(embedded_target(), engine, log_dir=tmp_path/'logs') as urls:
        summary = regenerate(tmp_path/'in.jsonl', tmp_path/'o'/'train.jsonl', urls, sampling='greedy', max_tokens=24)
    assert (summary.num_rows, dict(summary.reject_reasons)) == (9, dict(context_overflow=1))
    tokenizer,checked = AutoTokenizer.from_pretrained(embedded_target()),0
    for row in map(json.loads, open(tmp_path/'o'/'train.jsonl')):
        given = [t['content'] for t in row['conversations'] if t['role'] == 'assistant']
        for content,ids,reason in zip(given, row['token_ids'], row['finish_reasons']):
            if reason == 'kept': continue
            assert tokenizer.decode(ids[:-1] if reason == 'stop' else ids) == content
            checked += 1
    assert checked == 17

# loads torch and a model
@pytest.mark.slow
def test_the_in_process_engine_end_to_end(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from deepspec.data.embedded import embedded_target
    from deepspec.data.local_engine import TransformersEngine
    from deepspec.data.regenerate import regenerate
    folder = embedded_target()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = ['Hi', 'Write one sentence about the sea, please, and make it short.', 'What is 2+2?']
    rows = [dict(id=p, conversations=[dict(role='user', content=p)]) for p in prompts]
    (tmp_path/'in.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    out = {}
    for batch_size in (1, 3):
        engine = TransformersEngine(model, tokenizer, 'smollm2', batch_size)
        regenerate(tmp_path/'in.jsonl', tmp_path/f'o{batch_size}'/'t.jsonl', [engine], sampling='greedy', max_tokens=8)
        out[batch_size] = {r['id']: r['token_ids'] for r in map(json.loads, open(tmp_path/f'o{batch_size}'/'t.jsonl'))}
    assert out[1] == out[3]
