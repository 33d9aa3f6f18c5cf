"Regeneration against a server that fails on request: nothing lost, nothing doubled, exact resume after kills"
import json, logging, random, signal, subprocess, sys, time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_server import FakeServer, Faults, answer

from deepspec.data.chat import base_url, server_label
from deepspec.data.regenerate import Patience, regenerate
from deepspec.data.sampling import PRESETS, Sampling

HASTY = Patience(max_pause_s=.2, sync_s=.3, all_dead_s=3.)

def make_rows(n, turns=1, mark=lambda i: ''):
    "n conversations with `turns` questions each"
    return [dict(id=f'r{i}', conversations=[t for k in range(turns) for t in
                 (dict(role='user', content=f'question {i}.{k} {mark(i)}'), dict(role='assistant', content='old'))])
                 for i in range(n)]

def write(path, rows):
    path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
    return path

def read(path): return [json.loads(l) for l in path.read_bytes().splitlines()] if path.exists() else []

def expected(row):
    "What an undisturbed replay gives"
    history = []
    for t in row['conversations']:
        history.append(dict(role='assistant', content=answer(history)) if t['role'] == 'assistant' else t)
    if history[-1]['role'] != 'assistant': history.append(dict(role='assistant', content=answer(history)))
    return history

def check_complete(rows, out, rejected=()):
    "Every row once, with the right content"
    got = read(out)
    assert len(got) == len({r['id'] for r in got}), 'an id occurs twice'
    want = {r['id']: expected(r) for r in rows if r['id'] not in rejected}
    assert {r['id']: r['conversations'] for r in got} == want

def test_multi_turn_replay_uses_the_new_history(tmp_path):
    rows = make_rows(20, turns=3)
    rows[3]['conversations'].insert(0, dict(role='system', content='Be brief.'))
    rows[4]['conversations'].pop() # ends with a question
    rows[5]['conversations'].insert(2, dict(role='tool', content='42'))
    rows[5]['conversations'].insert(3, dict(role='assistant', content='old'))
    with FakeServer() as server:
        s = regenerate(write(tmp_path/'in.jsonl', rows), tmp_path/'o'/'train.jsonl', [server.url], sampling='qwen3',
                       patience=HASTY)
    check_complete(rows, tmp_path/'o'/'train.jsonl')
    assert s.complete and s.num_rows == 20 and s.finish_reasons == {'stop': 61}
    row = read(tmp_path/'o'/'train.jsonl')[0]
    assert row['model'] == 'fake' and row['sampling']['top_k'] == 20 and len(row['finish_reasons']) == 3
    assert row['usage']['completion_tokens'] == 9 and row['server'] == f'127.0.0.1:{server.port}'
    assert json.loads((tmp_path/'o'/'summary.json').read_text())['num_rows'] == 20
    assert json.loads((tmp_path/'o'/'run.json').read_text())['config']['max_tokens'] == 2048

@pytest.mark.parametrize('owned_by', ['sglang', 'vllm', 'llamacpp'])
def test_every_parameter_on_the_wire(tmp_path, owned_by):
    sampling = Sampling(temperature=1.9, top_p=.81, top_k=21, min_p=.03, repetition_penalty=1.07, presence_penalty=.5)
    with FakeServer(owned_by=owned_by, slots=4) as server:
        regenerate(write(tmp_path/'in.jsonl', make_rows(1)), tmp_path/'o'/'t.jsonl', [server.url], sampling=sampling,
                   max_tokens=77, seed=5)
        sent, = server.requests
    penalty = dict(repeat_penalty=1.07, repeat_last_n=8192) if owned_by == 'llamacpp' else dict(repetition_penalty=1.07)
    want = dict(temperature=1.9, top_p=.81, top_k=21, min_p=.03, presence_penalty=.5, max_tokens=77, model='fake',
                stream=False,
                chat_template_kwargs=dict(enable_thinking=False), **penalty)
    assert {k: sent[k] for k in want} == want
    assert isinstance(sent['seed'], int) and 'extra_body' not in sent
    assert sent['messages'] == [dict(role='user', content='question 0.0 ')]

# temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty
WANT = dict(qwen3=(.7, .8, 20, 0, 1, 0), qwen2=(.7, .8, 20, 0, 1.05, 0), gemma4=(1, .95, 64, 0, 1, 0),
            gemma3=(1, .95, 64, 0, 1, 0),
            llama3=(.6, .9, -1, 0, 1, 0), smollm2=(.2, .9, 50, 0, 1, 0), greedy=(0, 1, -1, 0, 1, 0))

@pytest.mark.parametrize('owned_by', ['sglang', 'vllm', 'llamacpp'])
@pytest.mark.parametrize('name', PRESETS)
def test_presets_are_sent_whole_and_said(tmp_path, capsys, name, owned_by):
    "What a server receives, what the log says and what the row records are the preset's numbers"
    with FakeServer(owned_by=owned_by) as server:
        regenerate(write(tmp_path/'in.jsonl', make_rows(1)), tmp_path/'o'/'t.jsonl', [server.url], sampling=name)
        sent, = server.requests
    penalty = 'repeat_penalty' if owned_by == 'llamacpp' else 'repetition_penalty'
    assert tuple(sent[k] for k in ('temperature', 'top_p', 'top_k', 'min_p', penalty, 'presence_penalty')) == WANT[name]
    assert sent['chat_template_kwargs'] == {'enable_thinking': False} and sent['max_tokens'] == 2048
    assert str(PRESETS[name]) in capsys.readouterr().err
    row, = read(tmp_path/'o'/'t.jsonl')
    names = ('temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'presence_penalty')
    assert tuple(row['sampling'][k] for k in names) == WANT[name] and row['sampling']['thinking'] is False

def tool_row(id):
    "A question, a recorded call with its result, an answer, another question and answer"
    calls = [dict(id='c1', function=dict(name='add', arguments=dict(a=1, b=[2, 'π', None])))]
    function = dict(name='add', description='sum', parameters=dict(type='object'))
    return dict(id=id, tools=[dict(type='function', function=function)],
                messages=[dict(role='user', content='1 + 2?'),
                          dict(role='assistant', content=None, tool_calls=calls, reasoning_content='old thoughts'),
                          dict(role='tool', content='3', tool_call_id='c1'), dict(role='assistant', content='old'),
                          {'from': 'human', 'value': 'Thanks. And?'}, {'from': 'gpt', 'value': 'old'}])

@pytest.mark.parametrize('owned_by', ['sglang', 'vllm', 'llamacpp'])
def test_tool_turns_are_context(tmp_path, owned_by):
    "A recorded call and its result stay; the plain answers behind them are asked anew, knowing both"
    with FakeServer(owned_by=owned_by, token_ids=True) as server:
        s = regenerate(write(tmp_path/'in.jsonl', [tool_row('t')]), tmp_path/'o'/'t.jsonl', [server.url],
                       sampling='qwen3')
        first,second = sorted(server.requests, key=lambda r: len(r['messages']))
    row, = read(tmp_path/'o'/'t.jsonl')
    assert s.finish_reasons == {'kept': 1, 'stop': 2} and row['finish_reasons'] == ['kept', 'stop', 'stop']
    assert [m['role'] for m in row['conversations']] == ['user', 'assistant', 'tool', 'assistant', 'user', 'assistant']
    call = row['conversations'][1]
    assert call['tool_calls'][0]['function']['arguments'] == dict(a=1, b=[2, 'π', None])
    assert 'reasoning_content' not in call
    assert row['token_ids'][0] is None and row['token_ids'][1] and row['tools'] == tool_row('t')['tools']
    assert row['conversations'][3]['content'] == answer(first['messages']) != row['conversations'][5]['content']
    assert len(second['messages']) == 5 and first['messages'] == second['messages'][:3]
    sent = first['messages'][1]['tool_calls'][0]
    assert sent['id'] == first['messages'][2]['tool_call_id'] == 'c1' and sent['type'] == 'function'
    assert json.loads(sent['function']['arguments']) == dict(a=1, b=[2, 'π', None])
    assert first['tools'] == row['tools'] and first.get('tool_choice') == (None if owned_by == 'sglang' else 'none')

def test_a_kept_call_is_not_trained_on(tmp_path):
    "The mask covers the two answers and neither the call nor anything else"
    from deepspec.data.template import tokenize_conversations
    from deepspec.model.target import toy_target
    with FakeServer() as server:
        regenerate(write(tmp_path/'in.jsonl', [tool_row('t')]), tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3')
    row, = read(tmp_path/'o'/'t.jsonl')
    tokenizer = toy_target().tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}CALL "
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    done, = tokenize_conversations([row], tokenizer)
    assert 'CALL add' in tokenizer.decode(done.input_ids)
    trained = tokenizer.decode(done.input_ids[done.loss_mask == 1])
    given = [row['conversations'][i]['content'] for i in (3, 5)]
    assert trained == ''.join(f'{text}<|im_end|>' for text in given)

def test_seeds_depend_on_the_row_alone(tmp_path):
    seeds = []
    for window in (1, 7):
        with FakeServer() as server:
            regenerate(write(tmp_path/'in.jsonl', make_rows(9, 2)), tmp_path/f'o{window}'/'t.jsonl', [server.url],
                       sampling='greedy', seed=1, window=window)
            seeds.append({json.dumps(r['messages']): r['seed'] for r in server.requests})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 18

def test_reject_reasons(tmp_path):
    marks = {1: '#400', 2: '#overflow', 3: '#empty', 4: '#length', 5: '#think', 6: '#call'}
    rows = make_rows(7, mark=lambda i: marks.get(i, ''))
    extra = [b'{"id": "r0", "conversations": []}', b'not json', b'{"conversations": []}',
             b'{"id": "x", "conversations": [{"role": "user", "content": null}]}',
             b'{"id": "y", "conversations": [{"role": "assistant", "content": "a"}]}', b'', b'[1]',
             b'{"id": "z", "conversations": [{"role": "user", "content": "u"}, {"role": "assistant", "content": null, '
             b'"tool_calls": [{"function": {"name": "f"}}]}]}',
             b'{"id": "v", "conversations": [{"role": "user", "content": "u"}, {"role": "assistant", "content": null, '
             b'"tool_calls": [{}]}]}',
             b'{"id": "w", "conversations": [{"role": "user", "content": "u"}], "tools": "{"}']
    path = write(tmp_path/'in.jsonl', rows)
    path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes() + b'\r\n'.join(extra))
    with FakeServer() as server:
        s = regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3', patience=HASTY)
        assert s.num_rows == 2 and s.complete and s.finish_reasons == {'stop': 1, 'length': 1}
        want = dict(refused_by_server=1, context_overflow=1, empty_content=1, thinking=1, duplicate_id=1, bad_row=6,
                    bad_roles=1, tool_calls=1, no_tool_result=1)
        assert s.reject_reasons == want
        rejected = read(tmp_path/'o'/'t.rejected.jsonl')
        assert len({r['id'] for r in rejected}) == 14 and all(r['detail'] for r in rejected)
        assert regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3').num_new_rows == 0
        cut = regenerate(path, tmp_path/'o2'/'t.jsonl', [server.url], sampling='qwen3', reject_length=True)
    assert cut.reject_reasons['length'] == 1 and cut.num_rows == 1

def test_rejected_rows_are_retried_on_request(tmp_path):
    path = write(tmp_path/'in.jsonl', make_rows(4, mark=lambda i: '#400' if i%2 else ''))
    with FakeServer() as server:
        assert regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3').num_rejected == 2
        again = write(tmp_path/'in.jsonl', make_rows(4))
        assert regenerate(again, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3').num_rows == 2
        s = regenerate(again, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3', retry_rejected=True)
    assert (s.num_rows, s.num_rejected, s.complete) == (4, 0, True)

@pytest.mark.parametrize('owned_by,field', [('vllm', 'return_token_ids'), ('sglang', 'return_token_ids'),
                                            ('llamacpp', 'logprobs')])
def test_token_ids_are_kept(tmp_path, owned_by, field):
    "Each engine is asked in its own way, and answers in a place of its own"
    with FakeServer(token_ids=True, owned_by=owned_by) as server:
        regenerate(write(tmp_path/'in.jsonl', make_rows(1, 2)), tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3')
        assert server.requests[0][field] is True
        row, = read(tmp_path/'o'/'t.jsonl')
        assert [bytes(ids[:-1]).decode() for ids in row['token_ids']] == [t['content'] for t in row['conversations']
                                                                          if t['role'] == 'assistant']
        regenerate(write(tmp_path/'in.jsonl', make_rows(1)), tmp_path/'o2'/'t.jsonl', [server.url], sampling='qwen3',
                   keep_token_ids=False)
        assert field not in server.requests[-1] and read(tmp_path/'o2'/'t.jsonl')[0]['token_ids'] == [None]

@pytest.mark.parametrize('fault', ['busy', 'error', 'half', 'drop', 'bad_json', 'slow'])
def test_each_fault_alone(tmp_path, fault):
    rows = make_rows(40, 2)
    with FakeServer(faults=Faults(**{fault: .2}, slow_s=.05, seed=3)) as server:
        s = regenerate(write(tmp_path/'in.jsonl', rows), tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3',
                       patience=HASTY, window=8)
        assert fault == 'slow' or server.num_faults > 3
    check_complete(rows, tmp_path/'o'/'t.jsonl')
    assert s.num_rejected == 0 and (fault == 'slow' or s.num_retries > 0)

def test_retry_after_is_honoured(tmp_path):
    with FakeServer(faults=Faults(busy=1., retry_after_s=.7)) as server:
        import threading
        threading.Timer(.3, lambda: setattr(server.faults, 'busy', 0.)).start()
        regenerate(write(tmp_path/'in.jsonl', make_rows(1)), tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3',
                   patience=HASTY)
        assert len(server.times) == 2 and server.times[1] - server.times[0] >= .7

def test_a_hanging_row_times_out(tmp_path):
    rows = make_rows(3, mark=lambda i: '#hang' if i == 1 else '')
    with FakeServer() as server:
        s = regenerate(write(tmp_path/'in.jsonl', rows), tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3',
                       timeout_s=.2,
                       patience=Patience(max_attempts=2, max_pause_s=.1))
    assert s.reject_reasons == {'server_trouble': 1} and s.num_rows == 2
    assert 'no answer in 0 s' in read(tmp_path/'o'/'t.rejected.jsonl')[0]['detail']

def test_dead_servers_are_left_out_and_come_back(tmp_path, capsys):
    late = FakeServer()
    with late:
        late.die()
        rows = make_rows(300)
        with FakeServer(latency_s=.02) as alive:
            import threading
            threading.Timer(.2, late.revive).start()
            s = regenerate(write(tmp_path/'in.jsonl', rows), tmp_path/'o'/'t.jsonl', [late.url, alive.url],
                           sampling='qwen3', window=4, patience=HASTY)
    check_complete(rows, tmp_path/'o'/'t.jsonl')
    assert f'left out until it answers: 127.0.0.1:{late.port}' in capsys.readouterr().err
    assert s.servers[f'127.0.0.1:{late.port}']['answers'] > 0

def test_no_server_at_all(tmp_path):
    with FakeServer() as server: pass
    with pytest.raises(ValueError, match='no server answers .*ClientConnectorError.*deepspec serve'):
        regenerate(write(tmp_path/'in.jsonl', make_rows(1)), tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3')
    assert not (tmp_path/'o'/'t.jsonl').exists()

def test_all_servers_die_and_stay_dead(tmp_path):
    "The run ends with an error, not with success; what is finished is safe, and the rest is done later"
    rows = make_rows(200)
    path = write(tmp_path/'in.jsonl', rows)
    with FakeServer(latency_s=.02) as server:
        import threading
        threading.Timer(.3, server.die).start()
        with pytest.raises(ValueError, match='rows are safe'):
            regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3', window=4,
                       patience=Patience(all_dead_s=.8, max_pause_s=.1, max_attempts=99))
        done = len(read(tmp_path/'o'/'t.jsonl'))
        assert 0 < done < 200 and json.loads((tmp_path/'o'/'summary.json').read_text())['complete'] is False
        server.revive()
        assert regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3',
                          patience=HASTY).num_new_rows == 200 - done
    check_complete(rows, tmp_path/'o'/'t.jsonl')

def test_a_request_that_no_row_survives_ends_the_run(tmp_path):
    with FakeServer(latency_s=.01) as server:
        with pytest.raises(ValueError, match='were all refused .*roles must alternate'):
            regenerate(write(tmp_path/'in.jsonl', make_rows(5000, mark=lambda i: '#400')), tmp_path/'o'/'t.jsonl',
                       [server.url], sampling='qwen3', window=4)
    assert len(read(tmp_path/'o'/'t.rejected.jsonl')) < 5000

def test_three_of_four_servers_flap(tmp_path):
    rows = make_rows(2000)
    faults = [Faults(busy=.02, error=.02, half=.02, drop=.02, bad_json=.02, seed=s) for s in range(4)]
    servers = [FakeServer(faults=f, latency_s=.02, record=False) for f in faults]
    for s in servers: s.__enter__()
    try:
        for s in servers[1:]: s.flap(.8, .3)
        s = regenerate(write(tmp_path/'in.jsonl', rows), tmp_path/'o'/'t.jsonl', [s.url for s in servers],
                       sampling='qwen3', window=8, patience=HASTY)
    finally:
        for x in servers: x.__exit__()
    check_complete(rows, tmp_path/'o'/'t.jsonl')
    assert s.num_rejected == 0 and s.num_retries > 50
    assert all(c['answers'] > 20 and c['benchings'] > 0 for c in list(s.servers.values())[1:]), s.servers
    assert sum(c['answers'] for c in s.servers.values()) == 2000

def test_window_bounds_requests_and_load_is_even(tmp_path):
    with FakeServer(latency_s=.03) as a, FakeServer(latency_s=.03) as b:
        s = regenerate(write(tmp_path/'in.jsonl', make_rows(200)), tmp_path/'o'/'t.jsonl', [a.url, b.url],
                       sampling='qwen3', window=5)
        assert a.max_in_flight == b.max_in_flight == 5
    assert min(c['answers'] for c in s.servers.values()) > 60

def test_slots_of_llama_server_set_the_window(tmp_path):
    with FakeServer(latency_s=.03, slots=8, owned_by='llamacpp') as a:
        regenerate(write(tmp_path/'in.jsonl', make_rows(60)), tmp_path/'o'/'t.jsonl', [a.url], sampling='qwen3')
        assert a.max_in_flight == 10

def test_turns_of_a_conversation_stay_with_one_server(tmp_path):
    with FakeServer(latency_s=.002) as a, FakeServer(latency_s=.002) as b:
        regenerate(write(tmp_path/'in.jsonl', make_rows(40, 4)), tmp_path/'o'/'t.jsonl', [a.url, b.url],
                   sampling='qwen3', window=50)
        seen = [{r['messages'][0]['content'] for r in x.requests} for x in (a, b)]
    assert not seen[0] & seen[1]

def test_servers_of_two_models_do_not_mix(tmp_path):
    with FakeServer(model='a') as a, FakeServer(model='b') as b:
        with pytest.raises(ValueError, match='different models'):
            regenerate(write(tmp_path/'in.jsonl', make_rows(1)), tmp_path/'o'/'t.jsonl', [a.url, b.url],
                       sampling='qwen3')

def test_key_is_sent_and_never_shown(tmp_path, capfd, caplog):
    secret = 'sk-very-secret'
    with FakeServer(api_key=secret, faults=Faults(error=.3, drop=.2, seed=1)) as server, caplog.at_level(logging.DEBUG):
        regenerate(write(tmp_path/'in.jsonl', make_rows(30)), tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3',
                   api_key=secret, patience=HASTY)
        with pytest.raises(ValueError, match='HTTP 401') as e:
            regenerate(tmp_path/'in.jsonl', tmp_path/'o2'/'t.jsonl', [server.url], sampling='qwen3',
                       api_key='sk-wrong-key')
    written = ''.join(p.read_text() for p in tmp_path.rglob('*.json*'))
    everything = written + ''.join(capfd.readouterr()) + caplog.text + str(e.value)
    assert secret not in everything and 'sk-wrong-key' not in everything
    assert server_label(base_url('https://user:pass-word@gpu.example.com/v1'), 3) == 'server 3'

def test_settings_of_another_run_are_refused(tmp_path):
    path = write(tmp_path/'in.jsonl', make_rows(2))
    with FakeServer() as server:
        regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3')
        write(path, make_rows(3))
        with pytest.raises(ValueError, match='sampling'):
            regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='greedy')
        with pytest.raises(ValueError, match='exists; resume it'):
            regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3', resume=False)
        assert regenerate(path, tmp_path/'o'/'t.jsonl', [server.url], sampling='qwen3').num_new_rows == 1
    (tmp_path/'p').mkdir()
    (tmp_path/'p'/'t.jsonl').write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match='not by a regeneration'):
        regenerate(path, tmp_path/'p'/'t.jsonl', ['127.0.0.1:1'], sampling='qwen3')

@pytest.mark.parametrize('cut', range(1, 400, 23))
def test_resume_after_a_cut_at_any_byte(tmp_path, cut):
    rows = make_rows(6)
    path,out = write(tmp_path/'in.jsonl', rows),tmp_path/'o'/'t.jsonl'
    with FakeServer() as server:
        regenerate(path, out, [server.url], sampling='qwen3')
        with open(out, 'r+b') as f: f.truncate(max(0, f.seek(0, 2) - cut*7))
        regenerate(path, out, [server.url], sampling='qwen3')
    check_complete(rows, out)

CHILD = """
import sys
from deepspec.data.regenerate import Patience, regenerate
patience = Patience(max_pause_s=.2, sync_s=.1)
s = regenerate(sys.argv[1], sys.argv[2], sys.argv[3:], sampling='qwen3', window=6, patience=patience)
print('finished', s.complete, s.num_rows)
"""

def child(*args): return subprocess.Popen([sys.executable, '-c', CHILD, *map(str, args)], stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True)

def wait_for_rows(out, n, process):
    while process.poll() is None and (not out.exists() or out.read_bytes().count(b'\n') < n): time.sleep(.002)

@pytest.mark.parametrize('num_rows,num_kills', [(400, 9), pytest.param(1600, 60, marks=pytest.mark.slow)]) # minutes
def test_kills_at_random_moments(tmp_path, num_rows, num_kills):
    "SIGKILL over and over, also while rows are written; the final set equals that of an uninterrupted run"
    rng = random.Random(0)
    rows = make_rows(num_rows, 2, mark=lambda i: '#overflow' if i%40 == 7 else '')
    path,out = write(tmp_path/'in.jsonl', rows),tmp_path/'o'/'t.jsonl'
    faults = Faults(slow=.3, slow_s=.02, error=.02)
    with FakeServer(latency_s=.004, faults=faults) as a, FakeServer(latency_s=.004) as b:
        kills = 0
        for attempt in range(num_kills + 21):
            process = child(path, out, a.url, b.url)
            have = out.read_bytes().count(b'\n') if out.exists() else 0
            if attempt < num_kills:
                wait_for_rows(out, have + rng.randint(1, 30), process)
                time.sleep(rng.random()*.02)
                process.kill()
            said,_ = process.communicate(timeout=60)
            kills += process.returncode == -signal.SIGKILL
            if process.returncode == 0: break
        assert kills >= num_kills*2//3 and 'finished True' in said
    check_complete(rows, out, rejected={r['id'] for r in rows if '#overflow' in r['conversations'][0]['content']})
    assert len(read(out.with_name('t.rejected.jsonl'))) == num_rows//40

@pytest.mark.parametrize('signum,status', [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_ends_cleanly(tmp_path, signum, status):
    rows = make_rows(300)
    path,out = write(tmp_path/'in.jsonl', rows),tmp_path/'o'/'t.jsonl'
    with FakeServer(latency_s=.03) as server:
        process = child(path, out, server.url)
        wait_for_rows(out, 10, process)
        process.send_signal(signum)
        process.communicate(timeout=20)
        assert process.returncode == status
        summary = json.loads((tmp_path/'o'/'summary.json').read_text())
        assert summary['complete'] is False and summary['num_rows'] == len(read(out)) >= 10
        assert out.read_bytes().endswith(b'\n') and not list((tmp_path/'o').glob('.*.lock'))
        assert regenerate(path, out, [server.url], sampling='qwen3').complete
    check_complete(rows, out)

def test_two_runs_in_one_folder(tmp_path):
    path,out = write(tmp_path/'in.jsonl', make_rows(200)),tmp_path/'o'/'t.jsonl'
    with FakeServer(latency_s=.05) as server:
        process = child(path, out, server.url)
        wait_for_rows(out, 1, process)
        with pytest.raises(ValueError, match='held by process'): regenerate(path, out, [server.url], sampling='qwen3')
        process.kill()
        process.communicate()

def test_memory_does_not_grow_with_rows(tmp_path):
    "Rows under way are bounded by the windows, whatever the file's size"
    import tracemalloc
    peaks = []
    for n in (100, 500):
        path = write(tmp_path/'in.jsonl', make_rows(n, mark=lambda i: 'word '*3000))
        with FakeServer(record=False) as server:
            tracemalloc.start()
            regenerate(path, tmp_path/f'o{n}'/'t.jsonl', [server.url], sampling='qwen3', window=8)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.5*peaks[0]

def test_what_is_done_takes_few_bytes_a_row(tmp_path):
    "The index of input and output is numbers and hashes; 1.3 million rows: benchmarks/bench_regenerate.py --memory"
    import tracemalloc
    from deepspec.data.regenerate import OutputFolder
    from deepspec.data.row_log import scan_input
    def peak_nbytes(n):
        path = write(tmp_path/'in.jsonl', make_rows(n))
        folder = OutputFolder(tmp_path/f'o{n}'/'t.jsonl')
        folder.out.parent.mkdir()
        done = dict(finish_reasons=['stop'], usage=dict(prompt_tokens=1, completion_tokens=1), conversations=[])
        write(folder.out, [dict(id=r['id'], **done) for r in make_rows(n - 5)])
        tracemalloc.start()
        rows = scan_input(path)
        assert rows.pending(folder.load(False)[1]).tolist() == list(range(n - 5, n))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
    assert (peak_nbytes(9_000) - peak_nbytes(3_000))/6_000 < 120

def test_ids_with_one_hash_are_told_apart(tmp_path, monkeypatch):
    "Rows that repeat an id are rejected; different ids that hash alike stop the run, for one of them would be lost"
    from deepspec.data import row_log
    path = write(tmp_path/'in.jsonl', make_rows(50) + make_rows(3))
    assert row_log.scan_input(path).problems == {n: 'duplicate_id' for n in (50, 51, 52)}
    real = row_log.id_key
    monkeypatch.setattr(row_log, 'id_key', lambda i: real('r7' if i == 'r31' else i))
    with pytest.raises(ValueError, match="line 32: the ids 'r31' and 'r7' have the same hash"): row_log.scan_input(path)

def test_a_thousand_copies_of_one_id(tmp_path):
    path,out = write(tmp_path/'in.jsonl', make_rows(1)*1000),tmp_path/'o'/'t.jsonl'
    with FakeServer() as server:
        s = regenerate(path, out, [server.url], sampling='qwen3')
        assert (s.num_rows, s.reject_reasons, s.complete) == (1, {'duplicate_id': 999}, True)
        assert regenerate(path, out, [server.url], sampling='qwen3').num_new_rows == 0
