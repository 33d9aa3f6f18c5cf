"What is supervised, rule by rule: thinking, tools, tags, cut answers, server ids, options, unusable rows"

import json

import numpy as np
import pytest
from chat_fixtures import CHATML, IM, STYLES, byte_level, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.data.template import (
    TEMPLATE_REGISTRY,
    ChatTemplate,
    Reject,
    decode_turn,
    encode_prompts,
    jinja_source,
    register_template,
    resolve_template,
    tokenize_conversations,
)

END = '<|im_end|>'


def chat(*turns):
    return [dict(role='user' if i % 2 == 0 else 'assistant', content=c) for i, c in enumerate(turns)]


def said(tokenizer, row, **options):
    "Decoded supervised turns of one row"
    template = resolve_template(tokenizer)
    (done,) = tokenize_conversations([row], tokenizer, template, **options)
    assert not isinstance(done, Reject), done.reason
    return [decode_turn(template.backend, done.input_ids, t.start, t.stop) for t in done.turns]


def reason(tokenizer, row, **options):
    (done,) = tokenize_conversations([row], tokenizer, **options)
    assert isinstance(done, Reject), done
    return done.reason


@pytest.fixture(scope='module')
def chatml():
    return make_tokenizer('chatml', 'digits')


@pytest.fixture(scope='module')
def qwen3():
    return make_tokenizer('qwen3', 'words')


# Thinking
def test_the_empty_think_block_of_the_last_turn_is_the_templates_not_the_targets(qwen3):
    row = dict(conversations=chat('Hi', 'Hello.', 'Bye', 'Ciao.'))
    template = resolve_template(qwen3)
    assert '<think>\n\n</think>\n\nCiao.' in template.renderer.render(row['conversations'])
    assert said(qwen3, row) == ['Hello.' + END, 'Ciao.' + END]


def test_thinking_of_earlier_turns_is_stripped_and_spans_follow(qwen3):
    thought = '<think>\nHm. <|im_end|>\n</think>\n\n'
    assert said(qwen3, dict(conversations=chat('Hi', thought + 'Hello.', 'Bye', 'Ciao.'))) == [
        'Hello.' + END,
        'Ciao.' + END,
    ]


def test_thinking_of_the_last_turn_came_from_the_target(qwen3):
    answer = '<think>\nHm.\n</think>\n\nHello.'
    assert said(qwen3, dict(conversations=chat('Hi', answer))) == [answer + END]
    row = dict(conversations=[*chat('Hi'), dict(role='assistant', content='Hello.', reasoning_content='Hm.')])
    assert said(qwen3, row) == [answer + END]


def test_prompts_end_with_thinking_switched_off(qwen3):
    (ids,) = encode_prompts([chat('Hi')], qwen3)
    assert qwen3.decode(ids).endswith('<|im_start|>assistant\n<think>\n\n</think>\n\n')


def test_deepseek_strips_thinking_from_every_turn():
    tokenizer = make_tokenizer('deepseek', 'gpt2')
    assert said(tokenizer, dict(conversations=chat('Hi', '<think>Hm.</think>Hello.'))) == [
        'Hello.<｜end▁of▁sentence｜>'
    ]


def test_gemma4_prefix_of_the_prompt_is_not_supervised():
    tokenizer = make_tokenizer('gemma4', 'gemma')
    template = resolve_template(tokenizer)
    assert (template.name, template.chat) == ('gemma4', TEMPLATE_REGISTRY['gemma4'])
    prefix = '<|channel>thought\n<channel|>'
    assert said(tokenizer, dict(conversations=chat('Hi', prefix + 'Hello.'))) == ['Hello.<turn|>']
    assert tokenizer.decode(encode_prompts([chat('Hi')], tokenizer)[0]).endswith('<|turn>model\n' + prefix)
    bare = byte_level(STYLES['gemma4'].special)
    template = resolve_template(bare, 'gemma4')  # written from the registry, prefix in every turn
    (done,) = tokenize_conversations([dict(conversations=chat('Hi', 'Hello.'))], bare, template)
    assert [t.text for t in done.turns] == ['Hello.<turn|>']
    assert bare.decode(done.input_ids[: done.turns[0].start]).endswith('<|turn>model\n' + prefix)


# Tools
CALL = dict(type='function', function=dict(name='add', arguments=dict(a=1, b='two', c=None, d=[1.5, {'e': True}])))
CALLED = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "two", "c": null, "d": [1.5, {"e": true}]}}\n</tool_call>'
)
TOOLS = [
    dict(type='function', function=dict(name='add', description='Adds', parameters=dict(type='object', properties={})))
]


def tool_row(call, **more):
    return dict(
        conversations=[
            *chat('Add'),
            dict(role='assistant', content=None, tool_calls=call),
            dict(role='tool', content='3'),
            dict(role='assistant', content='It is 3.'),
        ],
        **more,
    )


@pytest.mark.parametrize(
    'call',
    [
        [CALL],
        CALL,
        json.dumps([CALL]),
        [CALL | dict(function=CALL['function'] | dict(arguments=json.dumps(CALL['function']['arguments'])))],
    ],
    ids=['list', 'object', 'string', 'arguments'],
)
@pytest.mark.parametrize('tools', [None, TOOLS, json.dumps(TOOLS)], ids=['none', 'list', 'string'])
def test_tool_calls_are_supervised_as_the_template_writes_them(qwen3, call, tools):
    row = tool_row(call, **(dict(tools=tools) if tools else {}))
    assert said(qwen3, row) == [CALLED + END, 'It is 3.' + END]
    template = resolve_template(qwen3)
    assert ('# Tools' in qwen3.decode(tokenize_conversations([row], qwen3, template)[0].input_ids)) == bool(tools)


def test_text_before_a_tool_call_is_supervised_with_it(qwen3):
    row = dict(
        conversations=[
            *chat('Add'),
            dict(role='assistant', content='Let me see.', tool_calls=[CALL]),
            dict(role='tool', content=''),
        ]
    )
    assert said(qwen3, row) == ['Let me see.\n' + CALLED + END]


def test_a_tool_call_as_the_last_turn(qwen3):
    assert said(qwen3, dict(conversations=tool_row([CALL])['conversations'][:2])) == [CALLED + END]


def test_llama3_tool_call():
    tokenizer = make_tokenizer('llama3', 'words')
    row = dict(
        conversations=[
            *chat('Add'),
            dict(role='assistant', content=None, tool_calls=[dict(function=dict(name='add', arguments='{"a": 1}'))]),
            dict(role='tool', content='3'),
            dict(role='assistant', content='3'),
        ]
    )
    assert said(tokenizer, row) == ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', '3<|eot_id|>']
    row['conversations'][1]['tool_calls'] *= 2
    assert 'one call at a time' in reason(tokenizer, row)


@pytest.mark.parametrize(
    'calls, why',
    [
        ([dict(name='add', arguments='{a')], 'not valid JSON'),
        ([dict(name='add', arguments=[1])], 'expected an object'),
        ([dict(arguments={})], 'no function name'),
        ([7], 'no function name'),
        (7, 'expected a list'),
        ('[', 'not valid JSON'),
    ],
)
def test_broken_tool_calls_are_rejected(qwen3, calls, why):
    assert why in reason(qwen3, tool_row(calls))


@pytest.mark.parametrize('tools, why', [('{', 'not valid JSON'), (dict(a=1), 'expected a list')])
def test_broken_tools_are_rejected(qwen3, tools, why):
    assert why in reason(qwen3, tool_row([CALL], tools=tools))


# Generation tags
def test_generation_tags_are_the_last_word():
    jinja = CHATML.replace(
        "m['content'] + '<|im_end|>' + '\n' }}",
        "'' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}",
    )
    tokenizer = byte_level(IM)
    tokenizer.chat_template = jinja  # tags that leave the end of turn out
    assert said(tokenizer, dict(conversations=chat('Hi', 'Hello.', 'Bye', '\nCiao.'))) == ['Hello.', '\nCiao.']


def test_generation_tags_agree_with_the_masks_of_transformers():
    tokenizer = make_tokenizer('generation', 'digits')
    rows = [dict(conversations=chat('Hi', 'Hello.', 'Bye', f'Ciao {i}.')) for i in range(3)]
    for row, done in zip(rows, tokenize_conversations(rows, tokenizer)):
        theirs = tokenizer.apply_chat_template(
            row['conversations'], return_dict=True, return_assistant_tokens_mask=True
        )
        assert theirs['input_ids'] == done.input_ids.tolist()
        assert theirs['assistant_masks'] == done.loss_mask.tolist()


def test_generation_tags_around_the_wrong_thing_are_an_error():
    tokenizer = byte_level(IM)
    tokenizer.chat_template = CHATML.replace(
        "{{ '<|im_start|>' + m['role']", "{% generation %}{{ '<|im_start|>' }}{% endgeneration %}{{ m['role']"
    )
    with pytest.raises(ValueError, match='generation tags'):
        resolve_template(tokenizer)


# Answers that were cut, and ids from the server
def test_a_cut_answer_has_no_end_of_turn(chatml):
    row = dict(conversations=chat('Hi', 'Hello the', 'Bye', 'Ciao.'), finish_reasons=['length', 'stop'])
    assert said(chatml, row) == ['Hello the', 'Ciao.' + END]
    assert said(chatml, row | dict(finish_reasons=['stop', 'length'])) == ['Hello the' + END, 'Ciao.']
    assert said(chatml, row, mask_newline_after_eot=True) == ['Hello the', 'Ciao.' + END + '\n']


@pytest.mark.parametrize('end', [True, False], ids=['with end', 'without end'])
def test_server_ids_are_used_as_they_are(chatml, end):
    template = resolve_template(chatml)
    ids = [template.backend.token_to_id(c) for c in 'Hello']  # byte by byte, unlike any encoder
    row = dict(conversations=chat('Hi', 'Hello', 'Bye', 'Hello'), token_ids=[ids + [template.end_id] * end, None])
    (done,) = tokenize_conversations([row], chatml, template)
    first, second = done.turns
    assert done.input_ids[first.start : first.stop].tolist() == ids + [template.end_id]
    assert second.stop - second.start < first.stop - first.start
    (plain,) = tokenize_conversations([row | dict(token_ids=None)], chatml, template)
    assert done.input_ids[: first.start].tolist() == plain.input_ids[: first.start].tolist()
    assert done.input_ids[first.stop :].tolist() == plain.input_ids[plain.turns[0].stop :].tolist()


def test_cut_server_ids_are_followed_by_an_unsupervised_end(chatml):
    template = resolve_template(chatml)
    ids = [template.backend.token_to_id(c) for c in 'Hell']
    (done,) = tokenize_conversations(
        [dict(conversations=chat('Hi', 'Hell'), token_ids=[ids], finish_reasons=['length'])], chatml, template
    )
    stop = done.turns[0].stop
    assert done.input_ids[done.turns[0].start : stop].tolist() == ids
    assert done.input_ids[stop] == template.end_id and done.loss_mask[stop] == 0


def test_server_ids_with_half_a_character_survive(chatml):
    template = resolve_template(chatml)
    ids = [template.backend.token_to_id(c) for c in 'Hð']  # the first byte of an emoji
    (done,) = tokenize_conversations(
        [dict(conversations=chat('Hi', 'H\ufffd'), token_ids=[ids], finish_reasons=['length'])], chatml, template
    )
    assert done.input_ids[done.loss_mask == 1].tolist() == ids


def test_server_ids_of_thinking_that_the_template_strips_are_not_used(qwen3):
    template = resolve_template(qwen3)
    answer = '<think>\nHm.\n</think>\n\nHello.'
    ids = template.backend.encode(answer, add_special_tokens=False).ids
    assert said(qwen3, dict(conversations=chat('Hi', answer, 'Bye', 'Ciao.'), token_ids=[ids, None])) == [
        'Hello.' + END,
        'Ciao.' + END,
    ]


# Options
def test_turn_filters(chatml):
    row = dict(conversations=[dict(role='system', content='Be brief.'), *chat('a', 'one', 'b', 'two', 'c', 'three')])
    assert said(chatml, row, last_turn_only=True) == ['three' + END]
    assert said(chatml, row, turns=(0, -1)) == ['one' + END, 'three' + END]
    assert said(chatml, row, roles=('user',)) == ['a' + END, 'b' + END, 'c' + END]
    assert said(chatml, row, roles=('system', 'assistant'), turns=(0, 1)) == ['Be brief.' + END, 'one' + END]
    assert '0 supervised tokens' in reason(chatml, row, turns=(7,))
    with pytest.raises(ValueError, match='exclude each other'):
        tokenize_conversations([row], chatml, last_turn_only=True, turns=(0,))
    with pytest.raises(ValueError, match='no role'):
        tokenize_conversations([row], chatml, roles=('narrator',))


def test_newline_after_the_end_of_turn(chatml):
    row = dict(conversations=chat('a', 'one', 'b', 'two'))
    assert said(chatml, row, mask_newline_after_eot=True) == ['one' + END + '\n', 'two' + END + '\n']
    llama = make_tokenizer('llama3', 'words')  # nothing behind its end of turn
    assert said(llama, row, mask_newline_after_eot=True) == ['one<|eot_id|>', 'two<|eot_id|>']


def test_truncation_keeps_the_mask_of_what_remains(chatml):
    row = dict(conversations=chat('Hi', 'Hello there, hello!', 'Bye', 'Ciao, and two and two are four.'))
    (whole,) = tokenize_conversations([row], chatml)
    for n in range(1, whole.num_tokens + 2):
        (done,) = tokenize_conversations([row], chatml, max_length=n)
        if isinstance(done, Reject):
            assert n <= whole.turns[0].start and 'after truncation' in done.reason
            continue
        assert done.truncated == (n < whole.num_tokens)
        assert len(done.input_ids) == len(done.loss_mask) == min(n, whole.num_tokens)
        assert (
            done.input_ids.tolist() == whole.input_ids[:n].tolist()
            and done.loss_mask.tolist() == whole.loss_mask[:n].tolist()
        )
        assert (done.input_ids.dtype, done.loss_mask.dtype) == (np.int32, np.uint8)


def test_rows_with_too_few_supervised_tokens_are_rejected(chatml):
    row = dict(id='x', conversations=chat('Hi', 'Hello.'))
    num = tokenize_conversations([row], chatml)[0].num_loss_tokens
    assert not isinstance(tokenize_conversations([row], chatml, min_loss_tokens=num)[0], Reject)
    assert reason(chatml, row, min_loss_tokens=num + 1) == f'{num} supervised tokens, at least {num + 1} wanted'


def test_truncation_and_padding_set_on_the_tokenizer_change_nothing():
    tokenizer = byte_level(IM)
    tokenizer.chat_template = CHATML
    row = dict(conversations=chat('Hi', 'Hello there' * 9))
    before = tokenize_conversations([row], tokenizer)[0]
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=999)
    after = tokenize_conversations([row], tokenizer)[0]
    assert before.input_ids.tolist() == after.input_ids.tolist()


# One rendering path
def test_default_system_turn_is_the_same_in_training_and_prompts(chatml):
    for template in (
        resolve_template(chatml, 'qwen'),
        resolve_template(chatml),
        resolve_template(make_tokenizer('smollm', 'digits')),
    ):
        tokenizer = template.renderer.tokenizer
        (done,) = tokenize_conversations([dict(conversations=chat('Hi', 'Hello.'))], tokenizer, template)
        (prompt,) = encode_prompts([chat('Hi')], tokenizer, template)
        assert done.input_ids[: done.turns[0].start].tolist() == prompt
        assert done.turns[0].message == 1
    assert 'You are a helpful assistant.' in chatml.decode(encode_prompts([chat('Hi')], chatml, 'qwen')[0])
    assert 'system' not in chatml.decode(encode_prompts([chat('Hi')], chatml)[0])


def test_a_system_turn_of_its_own_replaces_the_default(chatml):
    row = [dict(role='system', content='Rhyme.'), *chat('Hi')]
    text = chatml.decode(encode_prompts([row], chatml, 'qwen')[0])
    assert 'Rhyme.' in text and 'helpful' not in text


def test_sha256_tells_templates_apart(chatml):
    shas = {
        resolve_template(chatml).sha256,
        resolve_template(chatml, 'qwen').sha256,
        resolve_template(make_tokenizer('smollm', 'digits')).sha256,
        resolve_template(make_tokenizer('qwen3', 'words')).sha256,
    }
    assert len(shas) == 4
    assert resolve_template(chatml).sha256 == resolve_template(chatml).sha256


# Templates that cannot be used
@pytest.mark.parametrize(
    'jinja, why',
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", 'no special token'),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}<|im_end|>", '0 times'),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}<|im_end|>{% endfor %}", '2 times'),
        ("{{ raise_exception('no chat') }}", 'no chat'),
        ("{{ messages[0].nothing.at_all }}", 'cannot render'),
    ],
)
def test_unsafe_templates_are_an_error(jinja, why):
    tokenizer = byte_level(IM)
    tokenizer.chat_template = jinja
    with pytest.raises(ValueError, match=why):
        resolve_template(tokenizer)


def test_a_template_that_rewrites_contents_is_followed_or_rejected(chatml):
    tokenizer = byte_level(IM)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}"
    assert said(tokenizer, dict(conversations=chat('Hi', 'Hello', 'Hi', 'Hello'))) == ['HELLO' + END] * 2
    tokenizer.chat_template = (
        "{{ messages[-1].content | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert 'cannot be followed' in reason(tokenizer, dict(conversations=chat('Hi', 'Hello')))


def test_unknown_and_unfit_names_are_errors(chatml):
    with pytest.raises(ValueError, match='not registered; choose qwen'):
        resolve_template(chatml, 'qwenn')
    with pytest.raises(ValueError, match='does not fit'):
        resolve_template(make_tokenizer('llama3', 'words'), 'qwen')
    with pytest.raises(ValueError, match='no chat template'):
        resolve_template(byte_level(IM))
    with pytest.raises(ValueError, match='another tokenizer'):
        tokenize_conversations([], make_tokenizer('smollm', 'digits'), resolve_template(chatml))


def test_registered_templates_of_ones_own(monkeypatch):
    monkeypatch.setattr('deepspec.data.template.TEMPLATE_REGISTRY', dict(TEMPLATE_REGISTRY))
    mine = register_template('mine', ChatTemplate('<A>', '<U>', 'Be kind.', '</s>'))
    tokenizer = byte_level(('<A>', '<U>', '</s>'))
    (done,) = tokenize_conversations([dict(conversations=chat('Hi', 'Hello.'))], tokenizer, 'mine')
    assert [t.text for t in done.turns] == ['Hello.</s>']
    assert tokenizer.decode(done.input_ids).count('Be kind.') == 1
    assert jinja_source(mine, '<s>').startswith('{{ "<s>" }}') and not jinja_source(mine, '<U>').startswith(
        '{{ "<U>" }}{%'
    )


# Rows that cannot be used
@pytest.mark.parametrize(
    'row, why',
    [
        (None, 'expected an object'),
        ([], 'expected an object'),
        ({}, 'no list'),
        (dict(conversations=None), 'no list'),
        (dict(conversations=[]), 'no list'),
        (dict(conversations=['Hi']), 'message 0: is str'),
        (dict(conversations=[dict(role='user')]), 'message 0: content is empty'),
        (dict(conversations=chat('Hi', None)), 'message 1: content is empty'),
        (dict(conversations=chat('Hi', ' \n')), 'message 1: content is empty'),
        (dict(conversations=chat('Hi', 3)), 'message 1: content is int'),
        (dict(conversations=[dict(role=None, content='x')]), 'role None'),
        (dict(conversations=[dict(role='narrator', content='x')]), "role 'narrator'"),
        (dict(conversations=chat('Hi')), '0 supervised'),
        (dict(conversations=chat('Hi', [dict(type='image_url', image_url='x')])), 'image_url'),
    ],
)
def test_one_bad_row_stops_nothing_and_is_not_lost(chatml, row, why):
    good = dict(conversations=chat('Hi', 'Hello.'))
    results = tokenize_conversations([good, row, good], chatml)
    assert why in results[1].reason
    assert [isinstance(r, Reject) for r in results] == [False, True, False]


def test_marks_inside_contents_are_harmless(chatml):
    odd = '\ue0001\ue001 and \ue000'
    assert said(chatml, dict(conversations=chat(odd, odd))) == [odd + END]


def test_many_rows_keep_their_order_over_batches(chatml):
    rows = [dict(id=str(i), conversations=chat('Hi', f'answer {i}') if i % 7 else []) for i in range(600)]
    results = tokenize_conversations(rows, chatml)
    assert [r.id for r in results if not isinstance(r, Reject)] == [str(i) for i in range(600) if i % 7]
    assert len(results) == 600


# Random conversations
TEXT = st.text(
    st.one_of(st.characters(blacklist_categories=['Cs']), st.sampled_from([' ', '\n', '\t', '▁'])),
    min_size=1,
    max_size=12,
)
PIECE = st.one_of(
    TEXT,
    st.sampled_from(
        ['<|im_end|>', '<|im_start|>assistant\n', '</think>', '\n\n', '  ', '[/INST]']
        + ['<|eot_id|>', '👩‍👩‍👧']
    ),
)
CONTENT = st.lists(PIECE, min_size=1, max_size=4).map(''.join).filter(lambda s: s.strip() and '</think>' not in s)


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(CONTENT, min_size=2, max_size=6).filter(lambda c: len(c) % 2 == 0),
    name=st.sampled_from([s for s in STYLES if s != 'qwen3']),
    kind=st.sampled_from(['gpt2', 'digits', 'bos']),
    cut=st.booleans(),
)
def test_random_conversations(contents, name, kind, cut):
    style, tokenizer = STYLES[name], make_tokenizer(name, kind)
    template = resolve_template(tokenizer)
    answers = contents[1::2]
    row = dict(conversations=chat(*contents), finish_reasons=['length' if cut else 'stop'] * len(answers))
    (done,) = tokenize_conversations([row], tokenizer, template)
    assert not isinstance(done, Reject), done.reason
    for i, turn in enumerate(done.turns):
        want = style.emits(answers[i], i == len(answers) - 1)
        if cut:
            want = style.lead + style.shown(answers[i])
        assert decode_turn(template.backend, done.input_ids, turn.start, turn.stop) == want
    whole = template.renderer.render(row['conversations'])
    if not style.rstrip:
        assert template.backend.decode(done.input_ids.tolist(), skip_special_tokens=False) == whole
    masked = ''.join(t.text for t in done.turns)
    assert template.backend.decode(done.input_ids[done.loss_mask == 1].tolist(), skip_special_tokens=False) == masked


@settings(max_examples=40, deadline=None)
@given(contents=st.lists(CONTENT, min_size=2, max_size=6).filter(lambda c: len(c) % 2 == 0))
def test_random_conversations_with_thinking_template(contents):
    tokenizer = make_tokenizer('qwen3', 'gpt2')
    answers = contents[1::2]
    want = [a + END for a in answers[:-1]] + [answers[-1].lstrip('\n') + END]
    assert said(tokenizer, dict(conversations=chat(*contents))) == want
