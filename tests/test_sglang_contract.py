"""Contract with SGLang: its real argument parser takes our command lines, its real protocol models our requests.

`pytest --slow tests/test_sglang_contract.py -rs` installs SGLang without its dependencies (its kernels are CUDA builds)
into an environment of its own, once, under the cache folder; torch and transformers come from the running environment.
"""
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from deepspec.data.chat import parse_answer, wire_messages, wire_tools
from deepspec.data.sampling import PRESETS, Sampling, wire_fields
from deepspec.data.servers import SGLang, check_command, launch_servers
from deepspec.io import cache_home

SGLANG = '0.5.23'
# what its parser and protocol modules import, beside what this package needs itself
IMPORTED = ('msgspec', 'openai', 'orjson', 'pybase64', 'sniffio', 'starlette', 'triton')
GUIDE = ROOT/'docs'/'guides'/'regeneration.md'
TOOL_TURNS = [dict(role='user', content='1 + 2?'), dict(role='tool', content='3')]
CALL = dict(function=dict(name='add', arguments=dict(a=1)))
TOOL_TURNS.insert(1, dict(role='assistant', content='', tool_calls=[CALL]))
TOOLS = [dict(type='function', function=dict(name='add', description='sum', parameters=dict(type='object')))]
HI = [dict(role='user', content='hi')]


def sglang_python():
    "Interpreter of an environment with SGLang, made once; skips where the registry cannot be reached"
    parent = sysconfig.get_paths()['purelib']
    key = hashlib.sha256(repr((SGLANG, IMPORTED, sys.version, parent)).encode()).hexdigest()[:12]
    home = cache_home()/'contract'
    folder = home/f'sglang-{SGLANG}-{key}'
    home.mkdir(parents=True, exist_ok=True)
    with open(home/'.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX) # several test processes share it
        if not (folder/'ready').exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
            pip = [folder/'bin'/'python', '-m', 'pip', 'install', '-q', '--no-deps', f'sglang=={SGLANG}', *IMPORTED]
            try: done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
            except subprocess.TimeoutExpired: pytest.skip('sglang cannot be installed here: pip took over 600 s')
            if done.returncode: pytest.skip(f'sglang cannot be installed here: {done.stderr.strip().splitlines()[-1]}')
            own = next((folder/'lib').glob('python*/site-packages'))
            (own/'zz_parent.pth').write_text(parent + '\n') # last on the path, so its own packages win
            (folder/'ready').touch()
    return folder/'bin'/'python'


def table_flags():
    "Flags in the guide's table of SGLang"
    lines = GUIDE.read_text().split('## SGLang')[1].split('\n## ')[0].splitlines()
    return [f for line in lines if line.startswith('| `--') for f in re.findall(r'`(--[a-z-]+)', line.split('|')[1])]


def test_the_guide_lists_every_flag_and_the_version():
    every = SGLang(mem_fraction_static=.85, tp_size=2, dp_size=2)
    assert {a for a in every.command('m', 1) if a.startswith('--')} <= set(table_flags())
    assert f'SGLang {SGLANG}' in GUIDE.read_text()


FULL = Sampling(temperature=1.9, top_p=.81, top_k=21, min_p=.03, repetition_penalty=1.07, presence_penalty=.5)
SAMPLINGS = PRESETS | dict(full=FULL)


@pytest.fixture(scope='module')
def contract():
    "What SGLang says to our command lines and requests"
    engines = [SGLang(), SGLang(mem_fraction_static=.85, dp_size=2),
               SGLang(tp_size=2, flags=('--context-length', '8192')), SGLang(flags=('--no-such-flag',))]
    requests = [dict(messages=HI, model='m', stream=False, **wire_fields(s, 77, 'sglang', True, seed=3))
                for s in SAMPLINGS.values()]
    requests.append(dict(messages=wire_messages(TOOL_TURNS), model='m', **wire_tools(TOOLS, 'sglang'),
                         **wire_fields(FULL, 77, 'sglang')))
    choice = dict(index=0, message=dict(role='assistant', content='Hello'), finish_reason='stop',
                  response_token_ids=[7, 2])
    asked = dict(commands=[e.command('Qwen/Qwen3-4B', 30_003) for e in engines], flags=table_flags(),
                 requests=requests, choice=choice)
    env = os.environ | dict(HF_HUB_OFFLINE='1', PYTHONPATH=str(ROOT))
    command = [sglang_python(), Path(__file__).with_name('sglang_probe.py')]
    done = subprocess.run(command, input=json.dumps(asked), env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# a 100 MB download, once, and ten seconds of imports
@pytest.mark.slow
def test_sglang_takes_our_command_lines(contract):
    plain, shared, long, refused = contract['commands']
    assert contract['version'] == SGLANG
    assert (plain['model_path'], plain['host'], plain['port']) == ('Qwen/Qwen3-4B', '127.0.0.1', 30_003)
    assert (shared['dp_size'], shared['mem_fraction_static'], shared['tp_size']) == (2, .85, 1)
    assert (long['tp_size'], long['context_length']) == (2, 8192)
    assert refused == dict(refused=2)


@pytest.mark.slow # needs the environment
def test_launching_asks_the_real_parser():
    every = SGLang(mem_fraction_static=.85, dp_size=2, python=str(sglang_python()))
    assert check_command(every, every.command('Qwen/Qwen3-4B', 30_003))
    with pytest.raises(ValueError, match='unrecognized arguments: --no-such-flag'):
        with launch_servers('Qwen/Qwen3-4B', replace(every, flags=('--no-such-flag',))): pass


@pytest.mark.slow # needs the environment
def test_sglang_has_every_flag_of_the_guide(contract):
    assert len(table_flags()) > 10 and contract['unknown_flags'] == []


@pytest.mark.slow # needs the environment
@pytest.mark.parametrize('rank,name', list(enumerate(SAMPLINGS)))
def test_sglang_takes_our_requests(contract, rank, name):
    "Every field is one that SGLang reads, and what reaches its sampler is what the preset says"
    sampling, seen = SAMPLINGS[name], contract['requests'][rank]
    assert seen['unknown'] == []
    assert seen['kept']['chat_template_kwargs'] == dict(enable_thinking=False)
    assert seen['kept']['return_token_ids'] is True and seen['kept']['stream'] is False
    for field in ('temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'presence_penalty'):
        assert seen['sampler'][field] == getattr(sampling, field), field
    assert seen['sampler']['max_new_tokens'] == 77 and seen['sampler']['sampling_seed'] == 3


@pytest.mark.slow # needs the environment
def test_sglang_takes_tool_turns(contract):
    seen = contract['requests'][-1]
    assert seen['unknown'] == [] and seen['tools'] == ['add'] and seen['roles'] == ['user', 'assistant', 'tool']


@pytest.mark.slow # needs the environment
def test_we_read_what_sglang_answers(contract):
    answer = parse_answer(json.dumps(dict(choices=[contract['choice']], usage=dict(completion_tokens=2))).encode())
    assert (answer.content, answer.finish_reason, answer.token_ids) == ('Hello', 'stop', [7, 2])
    assert contract['owner'] == 'sglang' # by which the client knows how to ask it
