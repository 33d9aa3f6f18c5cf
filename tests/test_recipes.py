"Recipes: complete, consistent, and options that are checked"
import pytest

from deepspec.cli.main import main
from deepspec.model.dspark import DSparkConfig
from deepspec.model.eagle3 import Eagle3Config
from deepspec.train.config import apply_opts, option_fields, recipe_from_dict, recipe_to_dict
from deepspec.train.optim import OptimConfig, learning_rate
from deepspec.train.recipes import RECIPES, named_recipe


def test_every_draft_and_target_has_a_recipe():
    targets = ('qwen3_4b', 'qwen3_8b', 'qwen3_14b', 'gemma4_12b', 'smollm2_135m', 'toy')
    assert set(RECIPES) == {f'{d}_{t}' for d in ('dspark', 'dflash', 'eagle3') for t in targets}
    for name,make in RECIPES.items():
        r = make()
        assert r.name == name and recipe_from_dict(recipe_to_dict(r)) == r
        assert isinstance(r.draft, Eagle3Config if name.startswith('eagle3') else DSparkConfig)
        if name.startswith('dflash'): assert r.draft.markov_head_type is None and not r.draft.enable_confidence_head


def test_public_values_of_the_qwen3_4b_recipe():
    r = named_recipe('dspark_qwen3_4b')
    d,o,t = r.draft,r.optim,r.training
    assert (d.block_size, d.num_hidden_layers, d.target_layer_ids, d.mask_token_id, d.num_anchors, d.markov_rank) == (7, 5, (1, 9, 17, 25, 33), 151669, 512, 256)
    assert (r.loss.loss_decay_gamma, r.loss.ce_loss_alpha, r.loss.l1_loss_alpha, r.loss.confidence_head_alpha) == (4., .1, .9, 1.)
    assert (o.lr, o.warmup_ratio, o.weight_decay, o.max_grad_norm) == (6e-4, .04, 0., 1.)
    assert (t.global_batch_size, t.epochs, t.max_length, t.dtype) == (512, 10., 4096, 'bf16')
    assert named_recipe('eagle3_qwen3_4b').draft.draft_num_hidden_layers == 1
    assert named_recipe('dspark_gemma4_12b').draft.target_layer_ids == (5, 17, 29, 41, 46)


@pytest.mark.parametrize('option, where, value', [
    ('lr=3e-4', 'optim.lr', 3e-4), ('lr=1', 'optim.lr', 1.), ('optim.lr=2e-3', 'optim.lr', 2e-3), ('global_batch_size=64', 'training.global_batch_size', 64),
    ('gradient_checkpointing=true', 'training.gradient_checkpointing', True), ('markov_head_type=rnn', 'draft.markov_head_type', 'rnn'),
    ('markov_head_type=none', 'draft.markov_head_type', None), ('target_layer_ids=[1,9]', 'draft.target_layer_ids', (1, 9)),
    ('target_layer_ids=1,9', 'draft.target_layer_ids', (1, 9)), ('eval_steps=50', 'training.eval_steps', 50), ('name=mine', 'name', 'mine')])
def test_options_have_the_type_of_their_field(option, where, value):
    changed = apply_opts(named_recipe('dspark_qwen3_4b'), [option])
    part,_,name = where.rpartition('.')
    found = getattr(getattr(changed, part) if part else changed, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize('option, message', [
    ('lr', 'has no value'), ('lr=fast', 'no float'), ('global_batch_size=3e2', 'no int'), ('learning_rate=1', 'near ones'), ('num_anchorz=3', 'num_anchors'),
    ('gradient_checkpointing=yes', 'no bool'), ('lr=-1', 'must be above 0'), ('warmup_ratio=2', 'between 0 and 1'), ('dtype=fp8', 'choose bf16'),
    ('markov_head_type=lstm', 'choose vanilla'), ('block_size=0', 'at least 1'), ('blocks_at_once=0', 'at least 1')])
def test_wrong_options_say_what_is_wrong(option, message):
    with pytest.raises(ValueError, match=message): apply_opts(named_recipe('dspark_qwen3_4b'), [option])


def test_parts_of_a_batch_are_refused_where_they_cannot_be():
    with pytest.raises(ValueError, match='blocks_at_once=none'): named_recipe('dspark_smollm2_135m', ['parallel=fsdp'])
    with pytest.raises(ValueError, match='Eagle3 has no blocks'): named_recipe('eagle3_toy', ['blocks_at_once=4'])
    assert named_recipe('dspark_smollm2_135m', ['parallel=fsdp', 'blocks_at_once=none']).training.parallel == 'fsdp'


def test_papermill_values_map_to_the_same_fields():
    r = apply_opts(named_recipe('dspark_qwen3_4b'), dict(lr=3e-4, target_layer_ids=[1, 9], max_steps=None, gradient_checkpointing=True))
    assert (r.optim.lr, r.draft.target_layer_ids, r.training.max_steps, r.training.gradient_checkpointing) == (3e-4, (1, 9), None, True)
    assert len(option_fields(r)) > 30


def test_the_command_line_ends_with_one_line_and_code_2(capsys):
    with pytest.raises(SystemExit) as e: main(['train', 'dspark_toyy', '--cache', 'x', '--out', 'y'])
    assert e.value.code == 2 and 'unknown recipe' in capsys.readouterr().err


@pytest.mark.parametrize('num_steps', [1, 2, 7, 100, 1001])
@pytest.mark.parametrize('warmup_ratio', [0., .04, .5, 1.])
def test_the_peak_is_exact_and_never_passed(num_steps, warmup_ratio):
    config = OptimConfig(lr=1e-3, warmup_ratio=warmup_ratio)
    rates = [learning_rate(s, num_steps, config) for s in range(num_steps)]
    assert max(rates) == 1e-3 and min(rates) > 0
    peak = rates.index(1e-3)
    assert rates[:peak+1] == sorted(rates[:peak+1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
