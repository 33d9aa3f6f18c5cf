"What the machine is asked for: the GPU of each process, the doctor's findings, torchrun's command line"
import subprocess
import sys

import pytest
import torch

from deepspec.cli.doctor import doctor, machine_findings, package_findings, torch_findings
from deepspec.model.target import rank_device
from deepspec.pipeline.launch import launch, torchrun_command


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)


@pytest.mark.parametrize('local', [0, 1])
@pytest.mark.parametrize('device', [None, 'cuda'])
def test_each_process_has_a_gpu_of_its_own(two_gpus, monkeypatch, local, device):
    monkeypatch.setenv('LOCAL_RANK', str(local))
    assert rank_device(device) == torch.device('cuda', local)
    assert rank_device('cpu') == torch.device('cpu')


def test_more_processes_than_gpus_is_a_mistake(two_gpus, monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '2')
    with pytest.raises(ValueError, match='process 2 has no GPU'): rank_device()


def test_a_launch_that_fails_names_the_reason(capsys):
    with pytest.raises(ValueError, match='deepspec train under torchrun .*unknown recipe'): launch(['train', 'no_such_recipe', '--cache', 'x'], 1)
    assert torchrun_command(['doctor'], 3)[1:6] == ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=3', '-m']


def test_the_doctor_says_what_to_do_about_too_little(monkeypatch, tmp_path):
    import shutil
    from types import SimpleNamespace

    import deepspec.cli.doctor as module
    monkeypatch.setattr(module, 'memory_nbytes', lambda: 4e9)
    monkeypatch.setattr(shutil, 'disk_usage', lambda out: SimpleNamespace(free=1e9))
    found = {f.topic: f for f in machine_findings(tmp_path)}
    assert '8 GB' in found['memory'].remedy and 'deepspec plan' in found['free disk'].remedy
    monkeypatch.setattr(module.importlib.util, 'find_spec', lambda name: None)
    assert all(f.remedy.startswith('pip install') and 'not installed' in f.found for f in package_findings())
    monkeypatch.setattr(shutil, 'which', lambda name: '/usr/bin/nvidia-smi')
    assert 'without CUDA' in {f.topic: f for f in torch_findings()}['cuda'].found
    assert [f.topic for f in doctor(tmp_path)][:2] == ['python', 'processor']


def test_the_doctor_lists_gpus(two_gpus, monkeypatch):
    from types import SimpleNamespace
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda i: SimpleNamespace(name=f'GPU {i}', total_memory=80e9))
    assert [f.found for f in torch_findings() if f.topic.startswith('cuda:')] == ['GPU 0, 80.0 GB', 'GPU 1, 80.0 GB']


def test_a_broken_pipe_and_an_interrupt_are_no_tracebacks(tmp_path):
    command = f'{sys.executable} -m deepspec train --list | head -n 1'
    done = subprocess.run(['bash', '-c', command], capture_output=True, text=True)
    assert done.stdout.startswith('dflash') and 'Traceback' not in done.stderr
    interrupt = ('from deepspec.cli.common import run_app\n'
                 'def app(**_): raise KeyboardInterrupt\n'
                 'run_app(app)')
    done = subprocess.run([sys.executable, '-c', interrupt], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, 'deepspec: interrupted; run the same command again to go on\n')
