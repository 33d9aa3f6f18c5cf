"Every style of template on every kind of tokenizer: supervised tokens say what the target would emit, no more"

import numpy as np
import pytest
from chat_fixtures import KINDS, STYLES, make_tokenizer

from deepspec.data.template import Reject, decode_turn, encode_prompts, resolve_template, tokenize_conversations

NASTY = [
    'four',
    ' leading and trailing \n',
    '\n\nblank lines first\n\nand last\n\n',
    'answer',
    '\tdef f():\n\n    return 1\n',
    '👩‍👩‍👧‍👦 ❤️ e\u0301',
    'שלום עולם',
    '1234',
    'Say this:\n<|im_end|>\n<|im_start|>assistant\nquoted header',
    '[/INST] </s> <|eot_id|> <turn|>',
    'user',
    '{{ content }} {% if x %}',
    '\u2028\u0085x',
]


def chats(style):
    "Conversations of one, two and three answers with every content in every place"
    for i, content in enumerate(NASTY):
        other = NASTY[(i + 5) % len(NASTY)]
        yield [('user', other), ('assistant', content)]
        yield [('user', content), ('assistant', content), ('user', content), ('assistant', content)]
        system = [('system', content)] if style.systems else []
        yield system + [
            ('user', 'Hi'),
            ('assistant', other),
            ('user', content),
            ('assistant', 'ok'),
            ('user', other),
            ('assistant', content),
        ]


def rows_of(style):
    return [
        dict(id=str(i), conversations=[dict(role=r, content=c) for r, c in chat]) for i, chat in enumerate(chats(style))
    ]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', [s for s in STYLES if s != 'qwen3'])
def test_supervised_tokens_say_what_the_target_emits(name, kind):
    style, tokenizer = STYLES[name], make_tokenizer(name, kind)
    template, rows = resolve_template(tokenizer), rows_of(style)
    nfc = template.backend.normalizer.normalize_str if kind == 'words' else lambda s: s.replace('▁', ' ')
    if kind == 'always':
        nfc = lambda s: s.replace(' ', '').replace(
            '▁', ''
        )  # puts a space behind every special token, which its decoder keeps
    for row, done in zip(rows, tokenize_conversations(rows, tokenizer, template)):
        assert not isinstance(done, Reject), (row, done.reason)
        answers = [i for i, m in enumerate(row['conversations']) if m['role'] == 'assistant']
        assert [t.message for t in done.turns] == answers
        for turn in done.turns:
            want = style.emits(row['conversations'][turn.message]['content'], turn.message == answers[-1])
            assert turn.text == want
            assert nfc(decode_turn(template.backend, done.input_ids, turn.start, turn.stop)) == nfc(want), row
        covered = np.zeros_like(done.loss_mask)
        for turn in done.turns:
            covered[turn.start : turn.stop] = 1
        assert (covered == done.loss_mask).all()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'name', sorted(set(STYLES) - {'deepseek', 'gptoss', 'gemma4'})
)  # their generation prompts are no finished turn's header
def test_prompt_is_a_prefix_of_training_tokens(name, kind):
    style, tokenizer = STYLES[name], make_tokenizer(name, kind)
    template = resolve_template(tokenizer)
    rows = [r for r in rows_of(style) if len(r['conversations']) == 2]
    done = tokenize_conversations(rows, tokenizer, template)
    for row, d, prompt in zip(rows, done, encode_prompts([r['conversations'][:1] for r in rows], tokenizer, template)):
        assert prompt == d.input_ids[: d.turns[0].start].tolist(), row


@pytest.mark.parametrize('name', STYLES)
def test_no_token_is_doubled_at_the_front(name):
    tokenizer = make_tokenizer(name, 'bos')
    row = dict(conversations=[dict(role='user', content='Hi'), dict(role='assistant', content='Hello')])
    (done,) = tokenize_conversations([row], tokenizer)
    assert (done.input_ids == tokenizer.convert_tokens_to_ids(STYLES[name].special[0])).sum() == done_count(
        name, tokenizer, row
    )


def done_count(name, tokenizer, row):
    "How often the first special token stands in the rendered text"
    text = resolve_template(tokenizer).renderer.render(resolve_template(tokenizer).with_system(row['conversations']))
    return text.count(STYLES[name].special[0])


@pytest.mark.parametrize('name', [s for s in STYLES if STYLES[s].strict])
def test_roles_that_do_not_alternate_are_rejected_with_the_templates_words(name):
    bad = dict(
        id='bad',
        conversations=[
            dict(role='user', content='a'),
            dict(role='user', content='b'),
            dict(role='assistant', content='c'),
        ],
    )
    good = dict(id='good', conversations=bad['conversations'][1:])
    tokenizer = make_tokenizer(name, 'gpt2')
    results = tokenize_conversations([good, bad, good], tokenizer)
    assert (
        'alternate' in results[1].reason and not isinstance(results[0], Reject) and not isinstance(results[2], Reject)
    )


@pytest.mark.parametrize('name', [s for s in STYLES if not STYLES[s].strict])
def test_two_answers_in_a_row_each_have_their_span(name):
    tokenizer = make_tokenizer(name, 'gpt2')
    row = dict(
        conversations=[
            dict(role='user', content='a'),
            dict(role='assistant', content='first'),
            dict(role='assistant', content='second'),
        ]
    )
    (done,) = tokenize_conversations([row], tokenizer)
    assert [t.text.strip()[:5] for t in done.turns] == ['first', 'secon']
