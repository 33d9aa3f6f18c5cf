import json, os, shutil, sys
from dataclasses import replace
from importlib.util import find_spec

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from deepspec.data.servers import SGLang, VLLM, check_command, launch_servers
from deepspec.eval.export import check_export, draft_flags, export_draft, public_keys
from deepspec.model.base import read_draft_config
from deepspec.model.drafts import draft_from_target, load_draft
from deepspec.model.dspark import DSparkConfig
from deepspec.model.target import save_toy_target, toy_target

LAYER = ['input_layernorm.weight', 'mlp.down_proj.weight', 'mlp.gate_proj.weight', 'mlp.up_proj.weight', 'post_attention_layernorm.weight',
         'self_attn.k_norm.weight', 'self_attn.k_proj.weight', 'self_attn.o_proj.weight', 'self_attn.q_norm.weight',
         'self_attn.q_proj.weight', 'self_attn.v_proj.weight']
# the public layout, written out by hand from its description
GOLDEN = ['confidence_head.proj.bias', 'confidence_head.proj.weight', 'embed_tokens.weight', 'fc.weight', 'hidden_norm.weight',
          *(f'layers.0.{k}' for k in LAYER), *(f'layers.1.{k}' for k in LAYER), 'lm_head.weight', 'markov_head.markov_w1.weight',
          'markov_head.markov_w2.weight', 'norm.weight']
EXTRA = dict(vanilla=[], gated=['markov_head.gate_proj.bias', 'markov_head.gate_proj.weight'],
             rnn=['markov_head.joint_proj.bias', 'markov_head.joint_proj.weight'])


def checkpoint(folder, kind='qwen3', hidden_size=32, **choices):
    target = toy_target(kind, hidden_size=hidden_size)
    options = dict(target_layer_ids=(0, 1), mask_token_id=3, num_hidden_layers=2, block_size=4, markov_rank=8)
    draft_from_target(target, DSparkConfig(**(options | choices))).save_pretrained(folder)
    return target


@pytest.mark.parametrize('head', EXTRA)
@pytest.mark.parametrize('kind', ['llama', 'qwen2', 'qwen3'])
def test_golden_keys_and_shapes(tmp_path, kind, head):
    target = checkpoint(tmp_path/'step_1', kind, markov_head_type=head)
    export_draft(tmp_path/'step_1', tmp_path/'public')
    state = load_file(tmp_path/'public'/'model.safetensors')
    assert sorted(state) == sorted(GOLDEN + EXTRA[head])
    H, V, r = 32, target.vocab_size, 8
    shapes = {'fc.weight': (H, 2*H), 'embed_tokens.weight': (V, H), 'lm_head.weight': (V, H), 'markov_head.markov_w1.weight': (V, r),
              'markov_head.markov_w2.weight': (V, r), 'confidence_head.proj.weight': (1, H + r), 'confidence_head.proj.bias': (1,),
              'markov_head.gate_proj.weight': (r, H + r), 'markov_head.gate_proj.bias': (r,),
              'markov_head.joint_proj.weight': (3*r, 2*r + H), 'markov_head.joint_proj.bias': (3*r,)}
    for key, shape in shapes.items():
        if key in state: assert tuple(state[key].shape) == shape, key
    assert {v.dtype for v in state.values()} == {torch.bfloat16}
    assert check_export(tmp_path/'public', tmp_path/'step_1', target)['num_tensors'] == len(state)


def test_dflash_keys(tmp_path):
    checkpoint(tmp_path/'step_1', markov_head_type=None, enable_confidence_head=False)
    export_draft(tmp_path/'step_1', tmp_path/'public')
    golden = [k for k in GOLDEN if not k.startswith(('markov', 'confidence'))]
    assert sorted(load_file(tmp_path/'public'/'model.safetensors')) == golden
    assert check_export(tmp_path/'public', tmp_path/'step_1')


def test_gemma4_keys(tmp_path):
    target = checkpoint(tmp_path/'step_1', 'gemma4')
    export_draft(tmp_path/'step_1', tmp_path/'public')
    state = load_file(tmp_path/'public'/'model.safetensors')
    for k in ('pre_feedforward_layernorm.weight', 'post_feedforward_layernorm.weight', 'layer_scalar'): assert f'layers.1.{k}' in state
    assert sorted(state) == public_keys(read_draft_config(tmp_path/'public'))
    check_export(tmp_path/'public', tmp_path/'step_1', target)


def test_config_is_an_ordinary_one(tmp_path):
    checkpoint(tmp_path/'step_1')
    export_draft(tmp_path/'step_1', tmp_path/'public')
    raw = json.loads((tmp_path/'public'/'config.json').read_text())
    wanted = dict(architectures=['Qwen3DSparkModel'], num_target_layers=4, num_hidden_layers=2, layer_types=['full_attention']*2,
                  tie_word_embeddings=False, block_size=4, mask_token_id=3, target_layer_ids=[0, 1], num_anchors=512,
                  enable_confidence_head=True, confidence_head_with_markov=True, markov_rank=8, markov_head_type='vanilla')
    assert {k: raw.get(k) for k in wanted} == wanted
    assert AutoConfig.from_pretrained(tmp_path/'public').model_type == 'qwen3'


def test_calibration_travels_with_the_weights(tmp_path):
    checkpoint(tmp_path/'step_1')
    (tmp_path/'step_1'/'confidence_calibration.json').write_text('{"temperatures": [1.5, 2, 1, 1]}')
    (tmp_path/'step_1'/'training_state.pt').write_bytes(b'large')
    export_draft(tmp_path/'step_1', tmp_path/'public')
    assert sorted(p.name for p in (tmp_path/'public').iterdir()) == ['confidence_calibration.json', 'config.json', 'export.json',
                                                                   'model.safetensors']


def rewritten(folder, out, **changes):
    state = {**load_file(folder/'model.safetensors'), **changes}
    out.mkdir()
    shutil.copyfile(folder/'config.json', out/'config.json')
    save_file({k: v for k, v in state.items() if v is not None}, out/'model.safetensors')
    return out


def test_every_changed_tensor_is_found(tmp_path):
    target = checkpoint(tmp_path/'step_1')
    state = load_file(tmp_path/'step_1'/'model.safetensors')
    for i, (key, value) in enumerate(state.items()):
        changed = value.flatten().clone()
        changed[0] += 1
        folder = rewritten(tmp_path/'step_1', tmp_path/f'd{i}', **{key: changed.view_as(value)})
        with pytest.raises(ValueError, match=key): check_export(folder, tmp_path/'step_1', target)
        folder = rewritten(tmp_path/'step_1', tmp_path/f'm{i}', **{key: None})
        with pytest.raises(ValueError, match=f'lacks {key}'): check_export(folder)
        with pytest.raises(ValueError): load_draft(folder)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match='config.json'): export_draft(tmp_path/'absent', tmp_path/'public')
    assert not (tmp_path/'public').exists() and not list(tmp_path.glob('.public*'))
    checkpoint(tmp_path/'step_1')
    with pytest.raises(ValueError, match='exists already'): export_draft(tmp_path/'step_1', tmp_path)
    with pytest.raises(ValueError, match='model.safetensors'): check_export(tmp_path)
    other = toy_target('qwen3', seed=5)
    export_draft(tmp_path/'step_1', tmp_path/'public')
    with pytest.raises(ValueError, match='copied from another target'): check_export(tmp_path/'public', target=other)


ENGINES_BY_NAME = dict(vllm=VLLM, sglang=SGLang)


def test_served_command_lines(tmp_path):
    checkpoint(tmp_path/'step_1')
    folder = str(export_draft(tmp_path/'step_1', tmp_path/'public'))
    command = SGLang(flags=draft_flags('sglang', folder)).command('Qwen/Qwen3-4B', 30_000)
    assert command[1:5] == ['-m', 'sglang.launch_server', '--model-path', 'Qwen/Qwen3-4B']
    assert command[-6:] == ['--speculative-algorithm', 'DSPARK', '--speculative-draft-model-path', folder,
                            '--speculative-dspark-block-size', '4']
    command = VLLM(cpu=True, flags=draft_flags('vllm', folder)).command('Qwen/Qwen3-4B', 30_000)
    assert command[1:3] == ['-m', 'vllm.entrypoints.openai.api_server'] and '--enforce-eager' in command
    assert json.loads(command[command.index('--speculative-config') + 1]) == dict(model=folder, method='dspark', num_speculative_tokens=4)


def interpreter(name):
    "The interpreter that has an engine: `DEEPSPEC_VLLM_PYTHON`, `DEEPSPEC_SGLANG_PYTHON`, or this one; skips without"
    variable = f'DEEPSPEC_{name.upper()}_PYTHON'
    if variable not in os.environ and find_spec(name) is None:
        pytest.skip(f'{name} is not installed here; install it and name its interpreter in {variable}')
    return os.environ.get(variable, sys.executable)


@pytest.mark.parametrize('name', ENGINES_BY_NAME)
def test_the_engine_parses_the_served_command_line(tmp_path, name):
    engine = ENGINES_BY_NAME[name](python=interpreter(name))
    checkpoint(tmp_path/'step_1')
    folder = export_draft(tmp_path/'step_1', tmp_path/'public')
    assert check_command(engine, replace(engine, flags=draft_flags(name, folder)).command('Qwen/Qwen3-4B', 30_000))


@pytest.mark.parametrize('name', ENGINES_BY_NAME)
def test_served_answers_equal_the_targets_own(tmp_path, name):
    "The same greedy answers from a server with the draft and from one without"
    if not torch.cuda.is_available(): pytest.skip(f'{name} drafts with DSpark on CUDA devices only')
    checkpoint(tmp_path/'step_1', hidden_size=512) # heads of 128: the engines' kernels have no smaller ones
    folder = export_draft(tmp_path/'step_1', tmp_path/'public')
    model = save_toy_target(tmp_path/'target', kind='qwen3', hidden_size=512)
    answers = []
    for flags in ((), draft_flags(name, folder)):
        engine = ENGINES_BY_NAME[name](python=interpreter(name), flags=flags)
        with launch_servers(model, engine, log_dir=tmp_path/'logs') as urls:
            ask = dict(model=str(model), prompt=['The sea is wide', 'def add(a, b):'], temperature=0, max_tokens=32)
            reply = httpx.post(f'{urls[0]}/v1/completions', json=ask, timeout=300).raise_for_status().json()
        answers.append([c['text'] for c in reply['choices']])
    assert answers[0] == answers[1]
