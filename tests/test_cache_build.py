"Building: capture, ranks, kills at every step, full disks, resume, repair"
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspec.cache import build
from deepspec.cache.build import build_cache, capture_samples, plan_from_jsonl, token_budget_batches, unit_runs
from deepspec.cache.check import repair_cache, verify_cache
from deepspec.cache.format import CacheShape
from deepspec.cache.reader import CacheDataset
from deepspec.cache.tokens import Sample
from deepspec.model.target import TOY_KINDS, load_target, save_toy_target, toy_target

FORK = multiprocessing.get_context('fork') # the children have torch imported already
SETTINGS = dict(target_layer_ids=[0, 2], max_shard_bytes=50_000, max_batch_tokens=300, min_loss_tokens=10)
os.environ['SOURCE_DATE_EPOCH'] = '1700000000' # so that manifests of two builds can be compared whole


def write_rows(path, numbers):
    "Conversations of mixed lengths"
    with open(path, 'w') as f:
        for i in numbers:
            turns = [m for t in range(1+i % 2) for m in (dict(role='user', content=f'Question {i}.{t}?'),
                     dict(role='assistant', content='The answer is four. '*(1+(i*7+t) % 9)))]
            f.write(json.dumps(dict(id=f'row-{i}', conversations=turns))+'\n')
    return path


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp('rows')/'train.jsonl', range(24))


@pytest.fixture(scope='module')
def target(tmp_path_factory):
    return load_target(save_toy_target(tmp_path_factory.mktemp('target')/'toy'))


@pytest.fixture(scope='module')
def reference(source, target, tmp_path_factory):
    "The files of an uninterrupted build by one rank"
    out = tmp_path_factory.mktemp('reference')/'cache'
    summary = build_cache(source, out, target, **SETTINGS)
    assert summary.num_shards >= 5 and summary.dropped
    return files(out)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


def rank_main(source, out, target, rank, world_size, before=None, **settings):
    "One rank in a process of its own; exits 2 on a user's error"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    sys.stderr = open(os.devnull, 'w')
    if before: before()
    try: build_cache(source, out, target, **SETTINGS|settings)
    except (ValueError, OSError) as e:
        Path(f'{out}.error').write_text(str(e))
        os._exit(2)
    os._exit(0)


def start(source, out, target, world_size=1, before=None, **settings):
    team = [FORK.Process(target=rank_main, args=(source, out, target, r, world_size, before), kwargs=settings)
            for r in range(world_size)]
    for p in team: p.start()
    return team


def finish(team):
    for p in team: p.join(60)
    return [p.exitcode for p in team]


# capture

@pytest.mark.parametrize('kind', TOY_KINDS)
def test_cache_holds_what_the_model_reports(kind, source, tmp_path):
    "Each layer equals output_hidden_states, the last state gives the model's logits, in the order of the source"
    target = toy_target(kind)
    build_cache(source, tmp_path/'c', target, **SETTINGS|dict(target_layer_ids=[-1, 0, 1, 2]))
    ds = CacheDataset(tmp_path/'c')
    for i in range(0, len(ds), 5):
        with torch.no_grad(): out = target.model(ds[i]['input_ids'].long()[None], output_hidden_states=True)
        want = torch.cat(out.hidden_states[:4], -1)[0]
        torch.testing.assert_close(ds[i]['target_hidden_states'].float(), want, rtol=2**-7, atol=2e-3)
        logits = target.lm_head(ds[i]['target_last_hidden_states'].float())
        if cap := getattr(target.config, 'final_logit_softcapping', None): logits = cap*torch.tanh(logits/cap)
        torch.testing.assert_close(logits, out.logits[0], rtol=.05, atol=.1)


def test_samples_stand_in_source_order(source, target, reference, tmp_path):
    from deepspec.data.jsonl import JsonLineDataset
    from deepspec.data.template import resolve_template, tokenize_conversations
    rows = JsonLineDataset([str(source)])
    results = tokenize_conversations([rows[i] for i in range(len(rows))], target.tokenizer,
                                     resolve_template(target.tokenizer), max_length=4096)
    kept = [r for r in results if int(r.loss_mask.sum()) >= SETTINGS['min_loss_tokens']]
    for name, data in reference.items():
        (tmp_path/name).parent.mkdir(exist_ok=True)
        (tmp_path/name).write_bytes(data)
    ds = CacheDataset(tmp_path)
    assert len(ds) == len(kept) < len(results)
    for s, r in zip((ds[i] for i in range(len(ds))), kept):
        assert s['input_ids'].tolist() == list(r.input_ids) and s['loss_mask'].tolist() == list(r.loss_mask)


def test_the_final_layer_is_refused(source, target, tmp_path):
    with pytest.raises(ValueError, match='last decoder layer 3'):
        build_cache(source, tmp_path/'c', target, target_layer_ids=[1, 3])


def test_batches_cover_every_sample_once():
    rng = np.random.default_rng(0)
    for _ in range(200):
        lens, budget = rng.integers(1, 200, rng.integers(1, 40)), int(rng.integers(1, 800))
        batches = token_budget_batches(lens, budget)
        assert sorted(i for b in batches for i in b) == list(range(len(lens)))
        assert all(len(b)*lens[b].max() <= budget or len(b) == 1 for b in batches)


def test_units_do_not_cross_the_shard_size():
    shape, rng = CacheShape(hidden_size=4, num_layers=2), np.random.default_rng(0)
    for _ in range(50):
        lens, limit = rng.integers(1, 100, 30), int(rng.integers(1, 9000))
        runs = unit_runs(lens, shape, limit)
        assert [a for a, _ in runs] == [0, *(b for _, b in runs[:-1])] and runs[-1][1] == 30
        assert all(lens[a:b].sum()*30 <= limit or b-a == 1 for a, b in runs)


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
def test_states_that_are_not_finite(value, source, tmp_path):
    target = toy_target()
    poisoned = target.tokenizer('5')['input_ids'][0]
    target.model.get_input_embeddings().weight.data[poisoned] = value
    with pytest.raises(ValueError, match="sample 'row-5', source row 5"): build_cache(source, tmp_path/'c', target, **SETTINGS)
    # what was captured so far is kept
    summary = build_cache(source, tmp_path/'c', target, non_finite='reject', **SETTINGS)
    manifest = json.loads((tmp_path/'c'/'manifest.json').read_text())
    assert summary.dropped['states not finite'] == 2 and manifest['rejected_rows'] == [5, 15]
    ds = CacheDataset(tmp_path/'c')
    assert all(s.isfinite().all() for i in range(len(ds)) for s in ds[i].values()) and not verify_cache(tmp_path/'c',
                                                                                                        full=True)
    target.model.get_input_embeddings().weight.data[:] = value
    with pytest.raises(ValueError, match='every sample was rejected'):
        build_cache(source, tmp_path/'none', target, non_finite='reject', **SETTINGS)


def test_padding_never_counts_as_not_finite(target):
    "Only a sample's own positions are looked at"
    samples = [Sample(i, np.arange(3, 3+n, dtype=np.int32), np.ones(n, np.uint8)) for i, n in enumerate((40, 2))]
    assert all(capture_samples(target, samples, (0, 2)))


# ranks

@pytest.mark.parametrize('world_size', [2, 3])
def test_any_number_of_ranks_gives_the_same_bytes(world_size, source, target, reference, tmp_path):
    assert finish(start(source, tmp_path/'c', target, world_size)) == [0]*world_size
    assert files(tmp_path/'c') == reference


def test_more_ranks_than_samples(target, tmp_path):
    source = write_rows(tmp_path/'one.jsonl', [8])
    assert finish(start(source, tmp_path/'c', target, 3)) == [0]*3
    assert len(CacheDataset(tmp_path/'c')) == 1


def test_torchrun(source, target, reference, tmp_path):
    "The real launcher, two processes with gloo's environment, the module's own command line"
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2', '--master_port=0',
               '--rdzv-backend=c10d',
               '--rdzv-endpoint=localhost:0', '-m', 'deepspec.cache.build', str(source), '--out', str(tmp_path/'c'),
               '--target', target.name,
               '--target-layer-ids', '0', '2', '--max-shard-bytes', '50000', '--max-batch-tokens', '300',
               '--min-loss-tokens', '10']
    done = subprocess.run(command, capture_output=True, text=True, timeout=170,
                          env=os.environ|dict(OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)['num_samples'] == len(CacheDataset(tmp_path/'c'))
    assert files(tmp_path/'c') == reference


# kills

def kill_at(n):
    "Make this process kill itself at its n-th rename, fsync or write of a sample"
    count = 0
    def counting(f):
        def wrapper(*args, **kwargs):
            nonlocal count
            count += 1
            if count == n: os.kill(os.getpid(), signal.SIGKILL)
            return f(*args, **kwargs)
        return wrapper
    os.rename, os.replace, os.fsync = counting(os.rename), counting(os.replace), counting(os.fsync)
    build.AsyncTargetCacheWriter.write = counting(build.AsyncTargetCacheWriter.write)


def test_kill_at_every_kind_of_step(source, target, reference, tmp_path):
    "A build that is killed again and again, each time a little later, ends with the same bytes"
    out, kills = tmp_path/'c', 0
    for n in [*range(1, 100, 7)]:
        code, = finish(start(source, out, target, 1, partial(kill_at, n)))
        if code == 0: break
        assert code == -signal.SIGKILL and not (out/'manifest.json').exists()
        kills += 1
    assert kills >= 5
    build_cache(source, out, target, **SETTINGS)
    assert files(out) == reference


@pytest.mark.parametrize('n', [1, 2, 3, 5, 8, 12])
def test_kill_during_assembly(n, source, target, reference, tmp_path, monkeypatch):
    "Shards half moved, index there or not: the next run finishes the move"
    out = tmp_path/'c'
    def before():
        real = build.assemble
        def assemble(*args):
            kill_at(n)
            return real(*args)
        build.assemble = assemble
    assert finish(start(source, out, target, 1, before)) == [-signal.SIGKILL]
    assert not (out/'manifest.json').exists()
    with pytest.raises(ValueError, match='it resumes'): CacheDataset(out)
    captured = []
    monkeypatch.setattr(build, 'capture_unit', lambda *a: captured.append(a))
    build_cache(source, out, target, **SETTINGS)
    assert files(out) == reference and not captured # nothing was captured twice


def test_kill_after_the_manifest(source, target, reference, tmp_path):
    "The cache is complete, and its workspace still there: the next run takes it away"
    out = tmp_path/'c'
    def before():
        def rmtree(path, *args, real=shutil.rmtree, **kwargs):
            if path == out/'_tmp': os.kill(os.getpid(), signal.SIGKILL)
            real(path, *args, **kwargs)
        shutil.rmtree = rmtree
    assert finish(start(source, out, target, 1, before)) == [-signal.SIGKILL]
    assert (out/'manifest.json').exists() and (out/'_tmp').exists()
    build_cache(source, out, target, **SETTINGS)
    assert files(out) == reference


def test_random_kills_with_changing_ranks(source, target, reference, tmp_path):
    "SIGKILL to one rank at a random moment, as a lost node would; the next launch has another number of ranks"
    out, rng, kills = tmp_path/'c', np.random.default_rng(0), 0
    def slow():
        real, number = build.AsyncTargetCacheWriter.write, itertools.count(1)
        def write(self, sample):
            time.sleep(.03 if next(number) < 9 else 60)  # however long this machine pauses, the kill finds a build under way
            return real(self, sample)
        build.AsyncTargetCacheWriter.write = write
    for world_size in (2, 1, 3, 2):
        team = start(source, out, target, world_size, slow)
        time.sleep(.2+rng.random()*.6)
        for p in rng.permutation(team): # torchrun ends the others when one is lost
            kills += p.is_alive()
            p.kill()
        finish(team)
    assert kills
    assert finish(start(source, out, target, 3)) == [0, 0, 0]
    assert files(out) == reference


def test_a_lost_rank_does_not_stop_the_others(source, target, reference, tmp_path):
    "Rank 1 dies in the middle of a unit; rank 0 takes its claim over"
    team = [FORK.Process(target=rank_main, args=(source, tmp_path/'c', target, r, 2,
                                                 (lambda: kill_at(25)) if r else None)) for r in (0, 1)]
    for p in team: p.start()
    assert finish(team)[0] == 0
    assert files(tmp_path/'c') == reference


def test_ranks_notice_that_rank_0_has_gone(source, target, tmp_path):
    (tmp_path/'c'/'_tmp').mkdir(parents=True)
    (tmp_path/'c'/'_tmp'/'tokens').write_text('in the way') # rank 0 fails on it
    codes = finish(start(source, tmp_path/'c', target, 1))
    assert codes == [2] or codes == [1]


def test_full_disk(source, target, reference, tmp_path):
    "The kernel refuses to let a file grow: one error, no half-made file, and the build resumes"
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    out = tmp_path/'c'
    assert finish(start(source, out, target, 1, limit)) == [2]
    assert 'File too large' in Path(f'{out}.error').read_text() and not (out/'manifest.json').exists()
    build_cache(source, out, target, **SETTINGS)
    assert files(out) == reference


def test_too_little_space_is_found_before_the_first_batch(source, target, reference, tmp_path, monkeypatch):
    real = build.shutil.disk_usage
    monkeypatch.setattr('shutil.disk_usage', lambda p: real(p)._replace(free=int(.8*sum(map(len, reference.values())))))
    monkeypatch.setattr(build, 'capture', lambda *a: pytest.fail('a batch was run'))
    with pytest.raises(ValueError) as e: build_cache(source, tmp_path/'c', target, **SETTINGS)
    assert all(s in str(e.value) for s in (' kB free', 'target layers: 1', 'max_length ', 'samples'))
    monkeypatch.undo()
    build_cache(source, tmp_path/'c', target, **SETTINGS)


# resume and refuse

@pytest.mark.parametrize('change', [dict(target_layer_ids=[0, 1]), dict(max_length=20), dict(min_loss_tokens=11),
                                    dict(max_shard_bytes=49_000)])
@pytest.mark.parametrize('state', ['cut off', 'complete'])
def test_other_settings_are_refused(change, state, source, target, tmp_path):
    out = tmp_path/'c'
    if state == 'complete': build_cache(source, out, target, **SETTINGS)
    else: finish(start(source, out, target, 1, lambda: kill_at(30)))
    before = files(out)
    with pytest.raises(ValueError, match=next(iter(change))): build_cache(source, out, target, **SETTINGS|change)
    assert {k: v for k, v in files(out).items() if k != '.lock'} == {k: v for k, v in before.items() if k != '.lock'}


def test_another_source_target_or_tokenizer_is_refused(source, target, tmp_path):
    out = tmp_path/'c'
    finish(start(source, out, target, 1, lambda: kill_at(30)))
    changed = write_rows(tmp_path/'other.jsonl', [*range(23), 99])
    with pytest.raises(ValueError, match='source_fingerprints'): build_cache(changed, out, target, **SETTINGS)
    with pytest.raises(ValueError, match='target_config_sha256'):
        build_cache(source, out, toy_target('qwen3'), **SETTINGS)
    other = load_target(target.name)
    other.tokenizer.chat_template = other.tokenizer.chat_template.replace('helpful', 'curt')
    with pytest.raises(ValueError, match='chat_template_sha256'): build_cache(source, out, other, **SETTINGS)
    finetuned = load_target(target.name)
    finetuned.model.get_input_embeddings().weight.data += .01
    with pytest.raises(ValueError, match='other weights'): build_cache(source, out, finetuned, **SETTINGS)
    moved = tmp_path/'moved.jsonl'
    moved.write_bytes(Path(source).read_bytes())
    build_cache(moved, out, target, **SETTINGS) # where the file lies makes no difference


def test_a_damaged_unit_is_captured_again(source, target, reference, tmp_path):
    "A unit whose shard lost bytes on the disk is never taken for done"
    out = tmp_path/'c'
    finish(start(source, out, target, 1, lambda: kill_at(60)))
    shard = next(out.glob('_tmp/unit-*/shard-00000.bin'))
    shard.write_bytes(shard.read_bytes()[:-1])
    build_cache(source, out, target, **SETTINGS)
    assert files(out) == reference


def test_a_second_build_is_refused(source, target, tmp_path):
    from deepspec.io import folder_lock
    with folder_lock(tmp_path/'c'), pytest.raises(ValueError, match=f'held by process {os.getpid()}'):
        build_cache(source, tmp_path/'c', target, **SETTINGS)


def test_nothing_left_and_no_file(target, tmp_path):
    source = write_rows(tmp_path/'s.jsonl', range(5))
    with pytest.raises(ValueError, match='fewer than 500 loss tokens'):
        build_cache(source, tmp_path/'c', target, min_loss_tokens=500)
    # the folder is free for another try
    build_cache(source, tmp_path/'c', target, target_layer_ids=[1], min_loss_tokens=5)
    with pytest.raises(ValueError, match='no such file'): build_cache(tmp_path/'absent.jsonl', tmp_path/'d', target)
    with pytest.raises(ValueError, match='non_finite'): build_cache(source, tmp_path/'d', target, non_finite='ignore')


def test_damaged_rows_are_counted(source, target, tmp_path):
    broken = tmp_path/'broken.jsonl'
    broken.write_text('{"id": "cut\n'+Path(source).read_text()+'[1, 2]\n{}\n')
    summary = build_cache(broken, tmp_path/'c', target, **SETTINGS)
    assert summary.dropped['unreadable row'] == 2 and sum(summary.dropped.values())+summary.num_samples == 27


def test_the_command_line_says_one_line(source, tmp_path, capsys):
    with pytest.raises(SystemExit) as e: build.main([str(tmp_path/'absent.jsonl'), '--out', str(tmp_path/'c')])
    assert e.value.code == 2 and capsys.readouterr().err.startswith('error: ')


def test_plan_needs_no_weights(source, target, tmp_path, monkeypatch):
    monkeypatch.setattr(build, 'load_target', lambda *a: pytest.fail('weights were loaded'))
    exact = plan_from_jsonl(source, target.name, target_layer_ids=[0, 2], min_loss_tokens=10, out_dir=tmp_path)
    part = plan_from_jsonl(source, target.name, target_layer_ids=[0, 2], min_loss_tokens=10, sample_rows=16,
                           num_rows=24_000)
    assert exact.exact and not part.exact and part.num_bytes == pytest.approx(1000*exact.num_bytes, rel=.3)


# repair

@pytest.mark.parametrize('damage', ['flip', 'truncate', 'delete', 'swap', 'index', 'all'])
def test_repair(damage, source, target, reference, tmp_path):
    out = tmp_path/'c'
    out.mkdir()
    for name, data in reference.items(): (out/name).write_bytes(data)
    shards = sorted(out.glob('shard-*'))
    if damage in ('flip', 'all'):
        shards[1].write_bytes(bytes([reference[shards[1].name][0] ^ 1])+reference[shards[1].name][1:])
    if damage in ('truncate', 'all'): shards[2].write_bytes(reference[shards[2].name][:-1])
    if damage == 'delete': shards[0].unlink()
    if damage in ('swap', 'all'):
        shards[3].write_bytes(reference[shards[4].name])
        shards[4].write_bytes(reference[shards[3].name])
    if damage in ('index', 'all'): (out/'samples.idx').write_bytes(b'\0'*len(reference['samples.idx']))
    named = {p.file_name for p in verify_cache(out, full=True)}
    assert {'flip': named == {shards[1].name}, 'truncate': named == {shards[2].name},
            'delete': named == {shards[0].name},
            'swap': named == {shards[3].name, shards[4].name}, 'index': named == {'samples.idx'},
            'all': len(named) == 5}[damage]
    summary = repair_cache(out, target, max_batch_tokens=300)
    assert files(out) == reference and repair_cache(out, target) is None
    # bytes that are somewhere are not captured again
    assert (summary.tokens_per_s > 0) == (damage not in ('swap', 'index'))


@pytest.mark.parametrize('n', [1, 2, 4, 9, 14])
def test_a_repair_that_is_killed(n, source, target, reference, tmp_path):
    out = tmp_path/'c'
    out.mkdir()
    for name, data in reference.items(): (out/name).write_bytes(data)
    (out/'shard-00001.bin').unlink()
    def child():
        sys.stderr = open(os.devnull, 'w')
        kill_at(n)
        repair_cache(out, target, max_batch_tokens=300)
    process = FORK.Process(target=child)
    process.start()
    finish([process])
    repair_cache(out, target, max_batch_tokens=300)
    assert files(out) == reference
