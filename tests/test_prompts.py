"Prompts: shapes, sources, rejects, ids, duplicates, a split that is the same everywhere, whole outputs or none"

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.data import prompts
from deepspec.data.prompts import (
    PromptSummary,
    content_digest,
    read_messages,
    read_prompt,
    read_source,
    split_prompts,
    split_ranks,
)


def chat(*turns):
    return [dict(role='user' if i % 2 == 0 else 'assistant', content=c) for i, c in enumerate(turns)]


def write_rows(path, rows):
    path.write_text(''.join((r if isinstance(r, str) else json.dumps(r)) + '\n' for r in rows))
    return path


def lines(path):
    return [json.loads(l) for l in Path(path).read_text().splitlines()]


# Shapes and roles
@pytest.mark.parametrize(
    'name, role',
    [
        ('human', 'user'),
        ('user', 'user'),
        ('gpt', 'assistant'),
        ('chatgpt', 'assistant'),
        ('bing', 'assistant'),
        ('bard', 'assistant'),
        ('assistant', 'assistant'),
        ('system', 'system'),
        ('tool', 'tool'),
    ],
)
@pytest.mark.parametrize('keys', [('from', 'value'), ('role', 'content')])
def test_roles(name, role, keys):
    assert read_messages(dict(conversations=[{keys[0]: name, keys[1]: 'x'}])) == [dict(role=role, content='x')]


@pytest.mark.parametrize(
    'conversation, why',
    [
        ([], 'no list'),
        ('x', 'no list'),
        (None, 'no list'),
        ([None], 'message 0: is NoneType'),
        ([{}], 'message 0: role None'),
        ([{'from': 'narrator', 'value': 'x'}], "role 'narrator'"),
        ([{'from': ['user'], 'value': 'x'}], 'role'),
        (chat('', 'a'), 'message 0: content is empty'),
        (chat('a', '  \n'), 'message 1: content is empty'),
        (chat('a', None), 'message 1: content is empty'),
        (chat('a', {}), 'content is dict'),
        (chat('a', True), 'content is bool'),
        (chat('a'), 'no assistant turn'),
        (chat('a', 'b')[1:], 'first turn is by assistant'),
        ([dict(role='system', content='s'), *chat('a', 'b')[1:]], 'first turn is by assistant'),
        ([dict(role='system', content='s')], 'first turn is by nobody'),
        (
            [dict(role='system', content='s'), dict(role='system', content='t'), *chat('a', 'b')],
            'first turn is by system',
        ),
    ],
)
def test_rows_that_cannot_be_used_say_why(conversation, why):
    with pytest.raises(ValueError, match=why.replace('(', r'\(')):
        read_prompt(dict(conversations=conversation))


def test_rows_that_can_be_used():
    assert read_prompt(dict(messages=[dict(role='system', content='s'), *chat('a', 'b')]))
    assert read_prompt(dict(conversations=chat('a', 'b', 'c')))  # a last question without an answer
    assert (
        read_prompt(
            dict(
                conversations=[
                    {'from': 'human', 'value': 'a'},
                    {'role': 'assistant', 'content': [dict(type='text', text='b')]},
                ]
            )
        )[1]['content']
        == 'b'
    )
    called = [
        *chat('a'),
        dict(role='assistant', content=None, tool_calls=[dict(function=dict(name='f', arguments='{"x": 1}'))]),
        dict(role='tool', content='', name='f'),
    ]
    assert read_prompt(dict(messages=called))[1]['tool_calls'] == [dict(function=dict(name='f', arguments=dict(x=1)))]


# Sources
def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [dict(id=str(i), conversations=chat(f'q{i}', f'a{i} é\u2028')) for i in range(700)]
    write_rows(tmp_path / 'a.jsonl', rows)
    (tmp_path / 'a.json').write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    (tmp_path / 'lines.json').write_bytes((tmp_path / 'a.jsonl').read_bytes())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / 'a.parquet')
    for name in ('a.jsonl', 'a.json', 'lines.json', 'a.parquet'):
        assert [r for _, r in read_source(tmp_path / name)] == rows, name
    assert len(list(read_source(tmp_path))) == 4 * len(rows)


@pytest.mark.parametrize(
    'text, num, bad',
    [
        ('[]', 0, 0),
        (' [ ] ', 0, 0),
        ('[{"a": 1}]', 1, 0),
        ('\ufeff[{"a": "[,]"},\n{"b": 2}]\n', 2, 0),
        ('[{"a": 1}, {"b"', 1, 1),
        ('[{"a": 1}', 1, 0),
        ('[oops]', 0, 1),
    ],
)
@pytest.mark.parametrize('window', [1, 3, 1000])
def test_json_lists_are_read_by_a_window(tmp_path, text, num, bad, window):
    (tmp_path / 'a.json').write_text(text)
    found = [row for _, row in prompts._read_json_list(tmp_path / 'a.json', window)]
    assert (sum(isinstance(r, dict) for r in found), sum(isinstance(r, Exception) for r in found)) == (num, bad)


def test_numbers_are_not_cut_at_the_window(tmp_path):
    (tmp_path / 'a.json').write_text('[123456, 789, {"a": 12345}]')
    assert [r for _, r in prompts._read_json_list(tmp_path / 'a.json', 2)][2] == {'a': 12345}


@pytest.mark.parametrize(
    'make, why',
    [
        (lambda p: p / 'absent.jsonl', 'no such file'),
        (lambda p: p, 'no file ends in'),
        (lambda p: 'nobody/has-this-set', 'not to be had from the Hugging Face hub'),
    ],
)
def test_missing_sources_are_one_line(tmp_path, make, why):
    with pytest.raises(ValueError, match=why) as e:
        split_prompts(make(tmp_path), tmp_path / 'out')
    assert '\n' not in str(e.value)
    assert not (tmp_path / 'out').exists()


def test_a_parquet_file_that_is_none(tmp_path):
    (tmp_path / 'a.parquet').write_bytes(b'nonsense')
    with pytest.raises(ValueError, match='not a Parquet file'):
        split_prompts(tmp_path / 'a.parquet', tmp_path / 'out')


def test_a_hub_data_set_is_streamed(tmp_path, monkeypatch):
    import datasets

    def load_dataset(name, split, streaming):
        assert (name, split, streaming) == ('some/set', 'train', True)
        return iter(
            [
                dict(conversations=[{'from': 'human', 'value': f'q{i}'}, {'from': 'gpt', 'value': 'a'}])
                for i in range(20)
            ]
        )

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    assert split_prompts('some/set', tmp_path / 'out').num_train == 19


# The split
def test_files_hold_what_they_should(tmp_path):
    rows = [
        dict(id=f'r{i}', conversations=[dict(role='system', content='s'), *chat(f'q{i}', 'a', 'more', 'b')])
        for i in range(40)
    ]
    summary = split_prompts(write_rows(tmp_path / 'a.jsonl', rows), tmp_path / 'out', test_size=0.25)
    train, held_out = lines(tmp_path / 'out/train.jsonl'), lines(tmp_path / 'out/eval.jsonl')
    assert (summary.num_train, summary.num_eval) == (len(train), len(held_out)) == (30, 10)
    by_id = {r['id']: r for r in rows}
    assert all(r == by_id[r['id']] for r in train)
    assert all(
        r == dict(id=r['id'], turns=[m['content'] for m in by_id[r['id']]['conversations'] if m['role'] == 'user'])
        for r in held_out
    )
    assert {r['id'] for r in train} | {r['id'] for r in held_out} == set(by_id)
    assert [r['id'] for r in train] == sorted((r['id'] for r in train), key=lambda i: int(i[1:]))  # order of the source
    assert PromptSummary(**json.loads((tmp_path / 'out/summary.json').read_text())) == summary


def test_the_split_is_the_same_everywhere():
    # literal values: another machine, order or version must not change who is held out
    digests = np.frombuffer(
        b''.join(content_digest(chat(f'question {i}', 'answer')) for i in range(10)), '<u8'
    ).reshape(-1, 2)
    assert content_digest(chat('question 0', 'answer')).hex() == GOLDEN_DIGEST
    assert split_ranks(digests, 42).tolist() == GOLDEN_RANKS
    assert split_ranks(digests, 43).tolist() != GOLDEN_RANKS


GOLDEN_DIGEST = 'eb13ae5369a1f4e3edb20fd39539ba5c'
GOLDEN_RANKS = [5, 3, 4, 2, 6, 9, 7, 1, 0, 8]


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(12)), num=st.integers(1, 12))
def test_order_of_rows_changes_nothing_and_samples_nest(tmp_path_factory, order, num):
    rows = [dict(conversations=chat(f'q{i}', 'a')) for i in range(12)]
    folder = tmp_path_factory.mktemp('split')

    def held_out(rows, name, **options):
        split_prompts(write_rows(folder / f'{name}.jsonl', rows), folder / name, test_size=0.25, **options)
        return {r['id'] for r in lines(folder / name / 'eval.jsonl')}, {
            r['id'] for r in lines(folder / name / 'train.jsonl')
        }

    test, train = held_out(rows, 'a')
    assert held_out([rows[i] for i in order], 'b') == (test, train)
    small_test, small_train = held_out(rows, 'c', sample_size=num)
    assert len(small_test | small_train) == num and small_test <= test and not small_test & small_train


def test_bad_rows_are_kept_with_reasons_and_counted(tmp_path):
    rows = [
        dict(id='ok', conversations=chat('q', 'a')),
        '{"id":',
        '[]',
        '"x"',
        'null',
        dict(id='empty', conversations=chat('q', '')),
        dict(id='who', conversations=[dict(role='narrator', content='x')]),
        dict(id='null', conversations=[*chat('q'), dict(role='assistant', content=None, tool_calls='[{')]),
    ]
    summary = split_prompts(write_rows(tmp_path / 'a.jsonl', rows), tmp_path / 'out')
    rejected = lines(tmp_path / 'out/rejected.jsonl')
    assert (summary.num_rows, summary.num_train, summary.num_rejected) == (8, 1, 7) == (len(rows), 1, len(rejected))
    assert sum(summary.reasons.values()) == 7
    assert [r['place'].rsplit(':', 1)[1] for r in rejected] == list('2345678')
    assert rejected[4]['row'] == rows[5] and 'content is empty' in rejected[4]['reason']


def test_strict_stops_at_the_first_bad_row_and_leaves_nothing(tmp_path):
    rows = [dict(conversations=chat('q', 'a')), dict(conversations=chat('q', ''))]
    with pytest.raises(ValueError, match='a.jsonl:2: message 1: content is empty'):
        split_prompts(write_rows(tmp_path / 'a.jsonl', rows), tmp_path / 'out', strict=True)
    assert list((tmp_path / 'out').iterdir()) == []


def test_nothing_usable_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='no usable row among 1; most common reason'):
        split_prompts(write_rows(tmp_path / 'a.jsonl', ['{}']), tmp_path / 'out')
    with pytest.raises(ValueError, match='source is empty'):
        split_prompts(write_rows(tmp_path / 'b.jsonl', []), tmp_path / 'out')
    assert list((tmp_path / 'out').iterdir()) == []


def test_duplicates_and_ids(tmp_path):
    same = chat('q', 'a')
    sharegpt = [{'from': 'human', 'value': 'q'}, {'from': 'gpt', 'value': 'a'}]
    rows = [
        dict(id='x', conversations=same),
        dict(id='y', messages=same),
        dict(conversations=sharegpt),
        dict(id='x', conversations=chat('other', 'a')),
        dict(id=7, conversations=chat('seven', 'a')),
        dict(id='7', conversations=chat('seven again', 'a')),
        dict(id='', conversations=chat('no id', 'a')),
        dict(id=None, conversations=chat('null id', 'a')),
    ]
    summary = split_prompts(write_rows(tmp_path / 'a.jsonl', rows), tmp_path / 'out', test_size=0)
    ids = [r['id'] for r in lines(tmp_path / 'out/train.jsonl')]
    assert (summary.num_duplicates, summary.num_renamed, summary.num_train) == (2, 2, 6)
    assert (
        len(set(ids)) == 6 and ids[0] == 'x' and ids[1].startswith('x-') and ids[2] == '7' and ids[3].startswith('7-')
    )
    assert ids[4] == content_digest(chat('no id', 'a')).hex()


def test_odd_text_survives(tmp_path):
    odd = 'a\u2028b\u0085c\x00d\ud800e 👩‍👩‍👧'
    (tmp_path / 'a.jsonl').write_text(json.dumps(dict(id='\ud800', conversations=chat(odd, odd))) + '\n')
    split_prompts(tmp_path / 'a.jsonl', tmp_path / 'out')
    row = json.loads((tmp_path / 'out/train.jsonl').read_bytes().split(b'\n')[0])
    assert row['conversations'] == chat(odd, odd)


# Outputs
def test_existing_outputs(tmp_path):
    source = write_rows(tmp_path / 'a.jsonl', [dict(conversations=chat(f'q{i}', 'a')) for i in range(5)])
    summary = split_prompts(source, tmp_path / 'out')
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / 'out').iterdir()}
    with pytest.raises(ValueError, match='there already'):
        split_prompts(source, tmp_path / 'out')
    assert split_prompts(source, tmp_path / 'out', skip_existing=True) == summary
    with pytest.raises(ValueError, match='made with test_size=0.05, asked for 0.5'):
        split_prompts(source, tmp_path / 'out', test_size=0.5, skip_existing=True)
    assert before == {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / 'out').iterdir()}
    with open(tmp_path / 'out/train.jsonl', 'a') as f:
        f.write('x')
    with pytest.raises(ValueError, match='train.jsonl: .* bytes, expected'):
        split_prompts(source, tmp_path / 'out', skip_existing=True)
    (tmp_path / 'out/summary.json').unlink()
    with pytest.raises(ValueError, match='cut short'):
        split_prompts(source, tmp_path / 'out', skip_existing=True)


@pytest.mark.parametrize(
    'options, why',
    [(dict(test_size=1), 'test_size=1'), (dict(test_size=-0.1), 'test_size'), (dict(sample_size=0), 'sample_size=0')],
)
def test_bad_settings(tmp_path, options, why):
    with pytest.raises(ValueError, match=why):
        split_prompts('sample', tmp_path / 'out', **options)


def test_a_killed_split_leaves_no_outputs(tmp_path):
    fifo = tmp_path / 'a.jsonl'
    write_rows(fifo, [dict(conversations=chat(f'q{i}', 'a')) for i in range(2000)])
    code = f"""
from deepspec.data import prompts
read = prompts.read_prompt
def slow(row, n=[0]):
    n[0] += 1
    if n[0] == 1000: print('half', flush=True); import time; time.sleep(60)
    return read(row)
prompts.read_prompt = slow
prompts.split_prompts({str(fifo)!r}, {str(tmp_path / 'out')!r})"""
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE) as p:
        assert p.stdout.readline() == b'half\n'
        os.kill(p.pid, signal.SIGKILL)
    assert not [f for f in (tmp_path / 'out').iterdir() if not f.name.startswith('.')]
    assert split_prompts(fifo, tmp_path / 'out').num_rows == 2000
    left = sorted(f.name for f in (tmp_path / 'out').iterdir())
    assert left == ['eval.jsonl', 'rejected.jsonl', 'summary.json', 'train.jsonl']


def test_memory_stays_flat(tmp_path):
    def peak(num):
        path = tmp_path / f'{num}.jsonl'
        with open(path, 'w') as f:
            for i in range(num):
                f.write(json.dumps(dict(conversations=chat(f'question {i} ' + 'x' * 300, 'a' * 300))) + '\n')
        tracemalloc.start()
        split_prompts(path, tmp_path / f'out{num}')
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(500), peak(3000)
    assert large - small < 2500 * 150  # some dozen bytes a row where a row takes 700


# The bundled sample
def test_the_sample_set_keeps_its_proportions():
    rows = [row for _, row in read_source('sample')]
    count = Counter(r['category'] for r in rows)
    assert len(rows) >= 640
    for category, share in dict(chat=0.18, math=0.39, code=0.39, instruction=0.04).items():
        assert abs(count[category] / len(rows) - share) < 0.005, count
    users = [[m['content'] for m in r['conversations'] if m['role'] == 'user'] for r in rows]
    assert 0.13 < sum(len(u) > 1 for u in users) / len(rows) < 0.17 and max(map(len, users)) == 3
    assert len({tuple(u) for u in users}) == len(rows) == len({r['id'] for r in rows})
    assert max(len(m['content']) for r in rows for m in r['conversations']) < 300
