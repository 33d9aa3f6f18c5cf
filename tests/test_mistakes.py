"Paths that a run seldom takes: what is missing is named, and a bar is drawn only where somebody watches"
import json
import os
import socket

import pytest

from deepspec import io
from deepspec.io import Progress, folder_lock
from deepspec.longmem import babilong


def test_a_folder_without_the_asked_length_lists_what_it_holds(tmp_path):
    (tmp_path/'data').mkdir()
    with pytest.raises(ValueError, match=r"32k.json: no such file; the folder holds \['data'\]"):
        babilong.babilong_source(f'{tmp_path}:qa1:32k')
    with pytest.raises(ValueError, match='NAME:qa1:32k'): babilong.babilong_source('nowhere')


def test_a_bar_in_a_terminal_and_lines_elsewhere(capsys, monkeypatch):
    with Progress(3, 'Rows', every_s=0) as quiet: quiet.update(2, lost=1)
    said = capsys.readouterr().err
    assert said.startswith('Rows: 2/3 rows') and 'lost 1' in said and '\r' not in said
    monkeypatch.setattr(os, 'isatty', lambda fd: True)
    with Progress(3, 'Rows') as watched: watched.update(3, lost=1)
    assert watched.bar.n == 3 and 'Rows: 100%' in capsys.readouterr().err


def test_a_lock_of_another_process_another_host_and_a_torn_one(tmp_path, monkeypatch):
    monkeypatch.setattr(io, '_alive', lambda pid: True)
    lock = tmp_path/'.lock'
    lock.write_text(json.dumps(dict(host=socket.gethostname(), pid=12, since='noon')))
    with pytest.raises(ValueError, match='held by process 12 .*wait for it or stop it'):
        with folder_lock(tmp_path): pass
    lock.write_text(json.dumps(dict(host='elsewhere', pid=12, since='noon')))
    with pytest.raises(ValueError, match='if no process 12 runs on elsewhere, delete this file'):
        with folder_lock(tmp_path): pass
    lock.write_text('{"host": ')
    with folder_lock(tmp_path): assert json.loads(lock.read_text())['pid'] == os.getpid()
    assert not lock.exists()


def test_a_lock_that_somebody_else_takes_over_first(tmp_path, monkeypatch):
    (tmp_path/'.lock').write_text('')
    monkeypatch.setattr(io, '_claim', lambda path: False)
    with pytest.raises(ValueError, match='took over the stale lock first'):
        with folder_lock(tmp_path): pass
