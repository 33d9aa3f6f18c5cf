"Shared fixtures: an isolated cache folder, the repository's root, and the slow lane"
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault('OMP_NUM_THREADS', '1')  # toys gain nothing from threads, and a forked child hangs in its parent's
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # the same goes for these threads; a command run here asks for them
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # spinning threads slow the child processes of a small machine
os.environ.setdefault('PYDEVD_DISABLE_FILE_VALIDATION', '1')


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='also run tests that need minutes or the real default target')


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: needs minutes, or a download; runs with --slow')
    config.addinivalue_line('markers', 'gpu: needs a CUDA device')


def pytest_collection_modifyitems(config, items):
    import torch
    for item in items:
        if 'slow' in item.keywords and not config.getoption('--slow'):
            item.add_marker(pytest.mark.skip(reason='slow lane: run pytest --slow'))
        if 'gpu' in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason='no CUDA device on this machine'))


@pytest.fixture(scope='session')
def root():
    "Root of the repository"
    return ROOT


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    "A cache folder of the test's own, so that nothing of the user's is read or written"
    monkeypatch.setenv('DEEPSPEC_CACHE_DIR', str(tmp_path/'cache-home'))
    return tmp_path/'cache-home'
