"JSON lines: every line end there is, damaged and racing files and indexes, an index that never lies"

import errno
import json
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.data import jsonl
from deepspec.data.jsonl import JsonLineDataset, row_offsets


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('DEEPSPEC_CACHE_DIR', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


def write(path, data):
    path.write_bytes(data)
    return path


def rows_of(path):
    return list(JsonLineDataset(path))


@pytest.mark.parametrize(
    'data, want',
    [
        (b'', []),
        (b'\n', []),
        (b'\xef\xbb\xbf', []),
        (b'\xef\xbb\xbf\n', []),
        (b' \t\n\r\n', []),
        (b'{}', [{}]),
        (b'{}\n', [{}]),
        (b'{"a":1}\r\n{"a":2}\r\n', [{'a': 1}, {'a': 2}]),
        (b'{"a":1}\r{"a":2}', [{'a': 1}, {'a': 2}]),
        (b'{"a":1}\n\n\n{"a":2}', [{'a': 1}, {'a': 2}]),
        (b'\xef\xbb\xbf{"a":1}\n', [{'a': 1}]),
        (b'\n\n  {"a":1}\n   \n\t{"a":2}  ', [{'a': 1}, {'a': 2}]),
        (
            '{"a":"\u2028\u2029\u0085"}\n{"a":"\x1c\x0b"}'.encode()
            .replace(b'\x1c', b'\\u001c')
            .replace(b'\x0b', b'\\u000b'),
            [{'a': '\u2028\u2029\u0085'}, {'a': '\x1c\x0b'}],
        ),
    ],
    ids=range(13),
)
def test_line_ends(tmp_path, data, want):
    assert rows_of(write(tmp_path / 'a.jsonl', data)) == want
    assert rows_of(tmp_path / 'a.jsonl') == want  # and by the index that is there now


ROW = st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=2)
END = st.sampled_from(['\n', '\r\n', '\r', '\n\n', '\n \t\n', '\r\n\r\n'])


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(ROW, END), max_size=8), bom=st.booleans(), last=st.booleans(), window=st.integers(1, 9))
def test_random_files(rows, bom, last, window):
    text = ''.join(json.dumps(r, ensure_ascii=False) + e for r, e in rows)
    if not last:
        text = text.rstrip()
    data = b'\xef\xbb\xbf' * bom + text.encode('utf-8', 'surrogatepass')
    at = row_offsets(data)
    assert [json.loads(data[a:b].decode('utf-8', 'surrogatepass')) for a, b in zip(at, at[1:])] == [r for r, _ in rows]
    lengths = np.concatenate([np.zeros(0, int), *jsonl._line_lengths_cr(data, window)])
    assert lengths.sum() == len(data)
    assert len(lengths) - (data[-1:] not in (b'\n', b'\r', b'')) == data.count(b'\n') + data.count(b'\r')


def test_a_row_of_20_mb(tmp_path):
    big = dict(text='x' * 20_000_000)
    path = write(tmp_path / 'a.jsonl', b'{"a":1}\n' + json.dumps(big).encode() + b'\n{"a":2}\n')
    rows = JsonLineDataset(path)
    assert (rows[0], rows[2], len(rows[1]['text'])) == ({'a': 1}, {'a': 2}, 20_000_000)


def test_a_carriage_return_file_whose_first_row_is_long(tmp_path):
    first = json.dumps(dict(text='x' * 2_000_000)).encode()
    assert rows_of(write(tmp_path / 'a.jsonl', first + b'\r{"a":2}\r'))[1] == {'a': 2}


@pytest.mark.parametrize(
    'line, what',
    [
        (b'{"a":', 'not valid JSON'),
        (b'[1]', 'list, expected an object'),
        (b'\xff{}', 'not valid JSON'),
        (b'["' * 100_000, 'not valid JSON'),
    ],
)
@pytest.mark.parametrize('end', [b'\n', b'\r\n', b'\r'])
def test_a_bad_line_names_file_and_line(tmp_path, line, what, end):
    path = write(tmp_path / 'bad.jsonl', end.join([b'{"a":1}', b'', line, b'{"a":2}']))
    rows = JsonLineDataset(path)
    with pytest.raises(ValueError, match=f'bad.jsonl:3: .*{what}'):
        rows[1]
    assert rows[2] == {'a': 2}


def test_many_files_and_negative_rows(tmp_path):
    paths = [
        write(tmp_path / f'{i}.jsonl', b''.join(b'{"i": %d}\n' % (10 * i + j) for j in range(n)))
        for i, n in enumerate([2, 0, 3, 0, 1])
    ]
    rows = JsonLineDataset(paths)
    assert [r['i'] for r in rows] == [0, 1, 20, 21, 22, 40]
    assert [rows[i]['i'] for i in range(-6, 0)] == [0, 1, 20, 21, 22, 40]
    assert rows.locate(2) == (2, 0) and rows.place(3).endswith('2.jsonl:2')
    for i in (6, -7):
        with pytest.raises(IndexError):
            rows[i]
    assert pickle.loads(pickle.dumps(rows))[5] == {'i': 40}
    with pytest.raises(ValueError, match='no files'):
        JsonLineDataset([])
    with pytest.raises(ValueError, match='no such file'):
        JsonLineDataset(tmp_path / 'absent.jsonl')
    with pytest.raises(ValueError, match='is a folder'):
        JsonLineDataset(tmp_path)


def test_a_file_replaced_within_the_clocks_resolution(tmp_path):
    path = write(tmp_path / 'a.jsonl', b'{"a":1}\n{"a":2}\n')
    stat = path.stat()
    assert len(rows_of(path)) == 2
    write(path, b'{"a":1234567890}')  # as many bytes
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size and path.stat().st_mtime_ns == stat.st_mtime_ns
    assert rows_of(path) == [{'a': 1234567890}]


def test_a_file_that_grows_while_it_is_read(tmp_path):
    path = write(tmp_path / 'a.jsonl', b'{"a":1}\n{"a":2}\n')
    rows = JsonLineDataset(path)
    with open(path, 'ab') as f:
        f.write(b'{"a":3}\n{"a":')
    assert list(rows) == [{'a': 1}, {'a': 2}]
    again = JsonLineDataset(path)
    assert again[2] == {'a': 3}
    with pytest.raises(ValueError, match='a.jsonl:4'):
        again[3]
    with open(path, 'ab') as f:
        f.write(b'4}\n')
    assert rows_of(path)[3] == {'a': 4}


def test_a_file_rewritten_in_place_while_it_is_open(tmp_path):
    path = write(tmp_path / 'a.jsonl', b'{"a":1}\n{"a":2}\n')
    rows = JsonLineDataset(path)
    with open(path, 'r+b') as f:
        f.write(b'{"abcdefgh": 12}')
    with pytest.raises(ValueError, match='changed while it was open'):
        rows[1]


def test_an_index_is_kept_and_used(tmp_path, cache, monkeypatch):
    path = write(tmp_path / 'a.jsonl', b'{"a":1}\n{"a":2}\n')
    rows_of(path)
    assert len(list(cache.glob('jsonlindex-*.u64'))) == 1
    monkeypatch.setattr(jsonl, 'row_offsets', lambda data: pytest.fail('built again'))
    assert len(rows_of(path)) == 2


@pytest.mark.parametrize('damage', [b'', b'xyz', b'\0' * 8, b'\0' * 24], ids=['empty', 'odd', 'short', 'zeros'])
def test_a_damaged_index_is_built_again(tmp_path, cache, damage):
    path = write(tmp_path / 'a.jsonl', b'{"a":1}\n{"a":2}\n')
    rows_of(path)
    next(cache.glob('jsonlindex-*')).write_bytes(damage)
    assert rows_of(path) == [{'a': 1}, {'a': 2}]


@pytest.mark.parametrize('code', [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, code):
    path = write(tmp_path / 'a.jsonl', b'{"a":1}\n')

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(jsonl, 'atomic_open', refuse)
    with pytest.warns(UserWarning, match=os.strerror(code)):
        assert rows_of(path) == [{'a': 1}]


def test_a_cache_folder_that_is_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv('DEEPSPEC_CACHE_DIR', str(write(tmp_path / 'not-a-folder', b'')))
    with pytest.warns(UserWarning, match='cannot be kept'):
        assert rows_of(write(tmp_path / 'a.jsonl', b'{"a":1}\n')) == [{'a': 1}]


def build(path, barrier, results):
    "One of the processes that build an index at once"
    barrier.wait()
    results.put([r['i'] for r in JsonLineDataset(path)] == list(range(3000)))


def test_ten_processes_build_one_index_at_once(tmp_path, cache):
    path = write(tmp_path / 'a.jsonl', b''.join(b'{"i": %d}\n' % i for i in range(3000)))
    context = multiprocessing.get_context('fork')
    barrier, results = context.Barrier(10), context.Queue()
    processes = [context.Process(target=build, args=(path, barrier, results)) for _ in range(10)]
    for p in processes:
        p.start()
    assert all(results.get(timeout=60) for _ in processes)
    for p in processes:
        p.join()
    assert [p.name[:11] for p in cache.iterdir()] == ['jsonlindex-']  # one file, no litter


def test_data_loader_workers(tmp_path):
    from torch.utils.data import DataLoader

    path = write(tmp_path / 'a.jsonl', b''.join(b'{"i": %d}\n' % i for i in range(40)))
    loader = DataLoader(JsonLineDataset(path), batch_size=8, num_workers=2, multiprocessing_context='fork')
    assert sorted(int(i) for batch in loader for i in batch['i']) == list(range(40))
