"What a user or a file can get wrong and no other test does: each is one line that says where, what and the remedy"
import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from train_tools import toy_samples, write_cache
from transformers import LlamaConfig, Qwen3Config

from deepspec.cache.build import UnitRecord, _final_shard, _wait_for, build_cache
from deepspec.cache.check import cache_info, repair_cache, verify_cache
from deepspec.cache.format import MANIFEST_NAME
from deepspec.cache.reader import CacheDataset
from deepspec.cli.main import main
from deepspec.data.chat import HttpServer, ServerTrouble, retry_after_s
from deepspec.data.regenerate import RowRefused, check_order, read_tools, regenerate
from deepspec.data.spans import Renderer, spans_by_asking
from deepspec.data.template import MaskOptions, as_template, plain_backend, resolve_template
from deepspec.eval.decode import _windows
from deepspec.eval.export import export_draft, public_keys
from deepspec.longmem.babilong import BABILongDataset, BABILongRows, Encoding
from deepspec.longmem.model import check_backbone
from deepspec.longmem.tasks import text_sentences, tiny_tokenizer
from deepspec.longmem.train import TrainingConfig
from deepspec.model.blocks import draft_shape
from deepspec.model.dspark import DSparkConfig, dspark_config
from deepspec.model.drafts import draft_from_target, read_draft_config
from deepspec.model.eagle3 import Eagle3Config
from deepspec.model.target import default_layer_ids, load_target, save_toy_target, toy_target, toy_tokenizer
from deepspec.report import render
from deepspec.train.losses import DSparkLoss, _favourite
from deepspec.train.recipes import dspark_toy, eagle3_toy
from deepspec.train.trainer import online_hidden_states

QWEN3 = Qwen3Config(num_hidden_layers=8)
SLIDING = Qwen3Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=64, max_window_layers=0)
LINEAR = SimpleNamespace(model_type='qwen3_next', sliding_window=None, layer_types=['linear_attention'])
TALK = [dict(role='user', content='Say \ue000'), dict(role='assistant', content='No')]



def renderer_of(tokenizer): return Renderer(tokenizer, tokenizer.chat_template)


REFUSED = {
    'layers that do not fit': (lambda: default_layer_ids(4, 5), 'count=5 layers cannot be spread over 4; ask for 1 to 1'),
    'a mask token beyond the vocabulary': (lambda: dspark_config(QWEN3, DSparkConfig(target_layer_ids=(1,), mask_token_id=10**6)),
                                           'mask_token_id 1000000 is outside the vocabulary'),
    'a target of a strange shape': (lambda: draft_shape(SimpleNamespace(model_type='mamba', to_dict=dict), 1), 'no draft shape for it yet'),
    'layers without keys and values': (lambda: _windows(LINEAR), 'qwen3_next: linear_attention layers have no per-row cache'),
    'a draft without a layout': (lambda: public_keys(SimpleNamespace(architectures=['OddModel'])), "'OddModel' has no public layout"),
    'DSpark without its loss': (lambda: replace(dspark_toy(), loss=None), 'DSpark needs a DSparkLoss'),
    'Eagle3 with one': (lambda: replace(eagle3_toy(), loss=DSparkLoss()), 'Eagle3 None'),
    'Eagle3 warmed up': (lambda: draft_from_target(toy_target(), Eagle3Config(target_layer_ids=(0, 1, 2))).warm_start(toy_target()),
                         'have no warm start; set warm_start=false'),
    'a mask of no length': (lambda: MaskOptions(max_length=0), 'max_length=0 must be at least 1'),
    'a slow tokenizer': (lambda: plain_backend(SimpleNamespace()), 'has no fast backend'),
    'a private-use character': (lambda: spans_by_asking(renderer_of(toy_tokenizer()), TALK, ''), 'private-use character U\\+E000'),
    'no servers': (lambda: regenerate('x.jsonl', 'y.jsonl', []), 'no servers; give addresses'),
    'an unknown truncation': (lambda: Encoding(truncation='middle'), "truncation='middle'; expected one of"),
    'a backbone without a memory': (lambda: check_backbone(LlamaConfig(), 64), "model_type 'llama'; expected one of"),
    'a chunk beyond the window': (lambda: check_backbone(SLIDING, 128), 'chunk_size=128 exceeds the sliding window 64'),
    'a memory that is half on': (lambda: TrainingConfig(memory='maybe'), "memory='maybe'; expected on or off"),
    'a backbone trained in bf16': (lambda: TrainingConfig(train_base=True, dtype='bfloat16'), "train_base needs dtype='float32'"),
}


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words): call()


@pytest.mark.parametrize('given', [(), ('--jsonl', 'a.jsonl', '--tokens-per-sample', '9')])
def test_plan_wants_rows_or_numbers_and_not_both(capsys, given):
    with pytest.raises(SystemExit) as e: main(['plan', '--target', 'x', *given])
    assert e.value.code == 2 and 'give either --jsonl FILE or --tokens-per-sample' in capsys.readouterr().err


def test_conversations_that_cannot_be_answered():
    with pytest.raises(RowRefused) as e: check_order(None, [dict(role='system', content='Be kind')], 1)
    assert e.value.reason == 'bad_roles' and 'ends with a system turn' in e.value.detail
    with pytest.raises(RowRefused) as e: read_tools(dict(tools='{"name": "add"}'))
    assert e.value.reason == 'bad_row' and 'dict, not a list' in e.value.detail


def test_an_unreadable_wait_is_no_wait():
    assert retry_after_s('soon') is None and retry_after_s('Mon, 32 Foo 2026 00:00:00 GMT') is None


def test_a_server_that_names_no_model(monkeypatch):
    server = HttpServer('http://localhost:1', 0, None, 1)
    async def fetch(*args, **kwargs): return 200, {}, b'{"data": []}'
    monkeypatch.setattr(server, '_fetch', fetch)
    with pytest.raises(ServerTrouble, match='names no model'): asyncio.run(server.probe())


def test_a_template_belongs_to_its_tokenizer():
    mine, other = toy_tokenizer(), toy_tokenizer()
    resolved = resolve_template(mine)
    assert as_template(resolved, other).sha256 == resolved.sha256 # another object, the same words
    other.chat_template = other.chat_template.replace('You are a helpful assistant.', 'Answer.')
    with pytest.raises(ValueError, match='was resolved for another tokenizer'): as_template(resolved, other)


def test_spans_of_generation_tags_are_counted():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    renderer, talk = renderer_of(tokenizer), [dict(role='user', content='Hello'), dict(role='assistant', content='Good day')]
    text = renderer.render(talk)
    span, = spans_by_asking(renderer, talk, text)
    assert (text[span.start:span.content_stop], text[span.start:span.stop]) == ('Good day', 'Good day<|im_end|>')
    with pytest.raises(ValueError, match='1 pairs of generation tags for 1 answers'): spans_by_asking(renderer, talk, text + ' ')


@pytest.fixture
def built(tmp_path):
    "A toy target and a cache of its rows"
    save_toy_target(tmp_path/'target')
    said = dict(role='assistant', content='The answer is four and the sea is wide.')
    rows = [dict(id=str(i), conversations=[dict(role='user', content=f'{i}?'), said]) for i in range(4)]
    (tmp_path/'x.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    build_cache(tmp_path/'x.jsonl', tmp_path/'cache', str(tmp_path/'target'), target_layer_ids=[1], min_loss_tokens=2)
    return tmp_path/'cache'


def test_an_index_of_another_build_is_found(built):
    path = built/MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(index_checksum='0'*64)))
    assert ['not the index that this manifest was written with'] == [p.what for p in verify_cache(built)]


def test_a_cache_of_unknown_origin_cannot_be_mended(tmp_path):
    cache = write_cache(tmp_path/'cache', toy_samples(toy_target()), toy_target().hidden_size)
    with open(f'{cache}/shard-00000.bin', 'r+b') as f: f.truncate(100)
    with pytest.raises(ValueError, match='does not say how each shard was made; rebuild the cache'): repair_cache(cache)


def test_a_cache_at_a_glance(built):
    said = str(cache_info(built))
    assert '4 samples of' in said and 'layers [1], hidden size 32' in said and said.endswith('dropped rows: 0')


def test_a_build_whose_parts_are_lost(tmp_path):
    job = SimpleNamespace(out_dir=tmp_path, all_done=tmp_path/'done', manifest_path=tmp_path/'none', unit_dir=lambda u: tmp_path/'unit')
    with pytest.raises(ValueError, match='absent or cut short, expected 7 bytes; delete .*done and run the same build'):
        _final_shard(job, 0, 0, UnitRecord(1, 1, 1, 1, 7, None, [], 0.))
    with pytest.raises(ValueError, match='rank 0 has not written it within 0 s'): _wait_for(tmp_path/'weights.json', job, 0)


def test_a_remote_cache_that_is_cut_or_changes_while_it_is_copied(built, tmp_path, monkeypatch):
    import fsspec
    monkeypatch.setenv('DEEPSPEC_CACHE', str(tmp_path/'local'))
    fs = fsspec.filesystem('memory')
    for p in built.glob('*.*'): fs.pipe(f'/cut/{p.name}', p.read_bytes())
    fs.pipe('/cut/samples.idx', (built/'samples.idx').read_bytes()[:-8])
    with pytest.raises(ValueError, match='samples.idx.*216 bytes.*224'): CacheDataset('memory://cut')
    fs.pipe('/cut/samples.idx', (built/'samples.idx').read_bytes())
    listed = type(fs).ls
    monkeypatch.setattr(type(fs), 'ls', lambda self, path, detail=True, **kw: [e | dict(size=e['size'] + (e['name'].endswith('json')))
                                                                               for e in listed(self, path, detail=True, **kw)])
    with pytest.raises(ValueError, match='it changed or broke off while it was read; try again'): CacheDataset('memory://cut')


def test_targets_that_cannot_be_read(tmp_path):
    folder = save_toy_target(tmp_path/'target')
    for p in tmp_path.glob('target/*.safetensors'): p.write_bytes(b'no weights')
    with pytest.raises(ValueError, match='cannot load its weights .*HF_HUB_OFFLINE'): load_target(str(folder))


def test_drafts_that_are_none(tmp_path):
    (tmp_path/'config.json').write_text(json.dumps(dict(architectures=['Qwen3DSparkModel'], model_type='qwen3')))
    with pytest.raises(ValueError, match='has no target_layer_ids, so it is no draft'): read_draft_config(tmp_path)
    small, large = toy_target(), toy_target(hidden_size=64)
    draft = draft_from_target(small, DSparkConfig(target_layer_ids=(1,), mask_token_id=3))
    with pytest.raises(ValueError, match='do not fit the draft'): draft.copy_frozen(large)


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    draft = draft_from_target(toy_target(), DSparkConfig(target_layer_ids=(1,), mask_token_id=3))
    draft.save_pretrained(tmp_path/'draft')
    monkeypatch.setattr('deepspec.eval.export.write_json', lambda *args: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
    with pytest.raises(OSError, match='No space left'): export_draft(tmp_path/'draft', tmp_path/'out')
    assert [p.name for p in tmp_path.iterdir()] == ['draft']


def test_states_that_are_not_finite_stop_online_training():
    target = toy_target()
    target.backbone.layers[1].mlp.down_proj.weight.data.fill_(float('nan'))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match='hidden states hold NaN or Inf'):
        online_hidden_states(dict(input_ids=ids, attention_mask=ids), target, (1,))


def test_reports_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(render, 'deepspec', SimpleNamespace(__file__=str(tmp_path/'deepspec'/'__init__.py')))
    with pytest.raises(ValueError, match='report notebooks are missing; reinstall'): render.reports_folder()


def test_backgrounds_and_rows_that_are_no_text(tmp_path):
    (tmp_path/'latin.txt').write_bytes('Größe.'.encode('latin-1'))
    with pytest.raises(ValueError, match='not UTF-8 .*convert it first'): text_sentences(str(tmp_path/'latin.txt'))
    (tmp_path/'rows.json').write_bytes(b'[{"input": "\xff", "question": "q", "target": "t"}]')
    with pytest.raises(ValueError, match='not valid JSON .*fetch the file again'):
        BABILongRows(tmp_path/'rows.json')[0]
    with pytest.raises(ValueError, match='max_samples=0: use at least one row'):
        BABILongDataset([dict(input='a', question='b', target='c')], tiny_tokenizer(), max_samples=0)


def test_the_favourite_is_that_of_argmax():
    for v in (128, 384, 1024, 300):
        x = torch.randint(0, 40, (50, v), generator=torch.Generator().manual_seed(v)).float() # with many ties
        assert torch.equal(_favourite(x), x.argmax(-1))
