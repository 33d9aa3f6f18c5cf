"The BABILong data contract, one test a rule, and the files behind it"
import json

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from deepspec.longmem.babilong import (BABILongDataset, BABILongRows, Encoding, GeneratedRows, IGNORE, babilong_source,
                                       collate_babilong, encode_row, index_json_list, is_correct, split_babilong)
from deepspec.longmem.tasks import (FACT_PATTERN, TASKS, TokenCounter, babilong_prompt, babilong_row, generate_babilong,
                                    tiny_tokenizer)

ROW = dict(input='Mary went to the office. ' * 12, question='Where is Mary?', target='office')


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch): monkeypatch.setenv('DEEPSPEC_CACHE_DIR', str(tmp_path/'cache'))


def word_tokenizer(bos: bool, eos: bool) -> PreTrainedTokenizerFast:
    "A word tokenizer that puts <s> before and </s> behind a text, and has no pad token"
    text = babilong_prompt(ROW['input'], ROW['question']) + ' office <s> </s> a'
    words = sorted(set(text.replace('.', ' . ').split()))
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words + ['?', ':', 'UNK'])}, unk_token='UNK'))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    pattern = ('<s> ' if bos else '') + '$A' + (' </s>' if eos else '')
    tok.post_processor = processors.TemplateProcessing(
        single=pattern, special_tokens=[(t, tok.token_to_id(t)) for t in ('<s>', '</s>')])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token='<s>', eos_token='</s>')


def test_prompt_and_answer_as_the_contract_says():
    tok = tiny_tokenizer()
    s = encode_row(ROW, tok, Encoding(max_length=256, answer_reserve_tokens=8))
    text = tok.decode(s['input_ids'][s['attention_mask'] == 1])
    assert text == f"{ROW['input']}\n\nQuestion: {ROW['question']}\nAnswer: office"


def test_defaults_of_the_contract():
    assert Encoding().max_length == 32768 and Encoding().max_prompt_tokens == 32768 - 64
    sample = BABILongDataset([ROW], tiny_tokenizer())[0]
    assert {k: (tuple(v.shape), v.dtype) for k, v in sample.items()} == {
        k: ((32768,), torch.int64) for k in ('input_ids', 'attention_mask', 'labels')}


def test_prompt_leaves_the_reserve_and_answer_takes_what_is_available():
    s = encode_row(ROW, tiny_tokenizer(), Encoding(max_length=40, answer_reserve_tokens=8, truncation='right'))
    at = (s['labels'] != IGNORE).nonzero().flatten()
    assert at[0] == 32 and s['num_cut'] > 0
    long = ROW | dict(target='office ' * 40)
    s = encode_row(long, tiny_tokenizer(), Encoding(max_length=40, answer_reserve_tokens=8, truncation='right'))
    assert (s['labels'] != IGNORE).sum() == 8 and s['attention_mask'].all()


@pytest.mark.parametrize('bos', [False, True])
@pytest.mark.parametrize('eos', [False, True])
@pytest.mark.parametrize('mode', ['keep_question', 'left', 'right'])
def test_special_tokens_once_and_no_eos_before_the_answer(bos, eos, mode):
    tok = word_tokenizer(bos, eos)
    for length in (24, 200):
        s = encode_row(ROW, tok, Encoding(max_length=length, answer_reserve_tokens=4, truncation=mode))
        ids = s['input_ids'][:int(s['attention_mask'].sum())].tolist()
        assert ids.count(tok.bos_token_id) == bos and (ids[0] == tok.bos_token_id) == bos
        assert tok.eos_token_id not in ids
        assert s['input_ids'][len(ids):].eq(tok.eos_token_id).all()  # pads with EOS where there is no pad token


@given(length=st.integers(12, 120), mode=st.sampled_from(['keep_question', 'left', 'right']), eos=st.booleans())
@settings(max_examples=60, deadline=None)
def test_labels_mask_and_padding_agree(length, mode, eos):
    tok = tiny_tokenizer()
    try: s = encode_row(ROW, tok, Encoding(max_length=length, answer_reserve_tokens=3, truncation=mode, append_eos=eos))
    except ValueError as e:
        assert 'question takes' in str(e)
        return
    real = int(s['attention_mask'].sum())
    assert s['attention_mask'].tolist() == [1]*real + [0]*(length - real)
    at = (s['labels'] != IGNORE).nonzero().flatten().tolist()
    assert at == list(range(at[0], real)) and len(at) == 1 + eos
    assert s['labels'][at].equal(s['input_ids'][at])
    if mode == 'keep_question': assert 'Question: Where is Mary?\nAnswer: office' in tok.decode(s['input_ids'][:real])


def test_truncated_samples_are_counted_and_modes_agree_without_truncation():
    rows = [ROW, ROW | dict(input='Mary went to the office.')]
    for mode in ('keep_question', 'left', 'right', 'error'):
        ds = BABILongDataset(rows, tiny_tokenizer(), max_length=60, answer_reserve_tokens=4, truncation=mode)
        if mode == 'error':
            with pytest.raises(ValueError, match='56 fit'): ds[0]
        else: ds[0]
        plain = BABILongDataset(rows, tiny_tokenizer(), max_length=60, answer_reserve_tokens=4)
        assert ds[1]['input_ids'].equal(plain[1]['input_ids'])
        assert ds.truncated == (set() if mode == 'error' else {0})


def test_a_question_that_cannot_fit_is_named():
    with pytest.raises(ValueError, match='question takes'):
        encode_row(ROW, tiny_tokenizer(), Encoding(max_length=12, answer_reserve_tokens=4))


def test_split_keeps_one_on_each_side_and_max_samples_comes_first():
    ds = BABILongDataset([ROW]*50, tiny_tokenizer(), max_length=200, answer_reserve_tokens=4, max_samples=8)
    train, held_out = split_babilong(ds)
    assert (len(train), len(held_out)) == (7, 1) and set(train.indices) | set(held_out.indices) == set(range(8))
    assert split_babilong(ds, seed=1)[0].indices != train.indices
    assert [len(s) for s in split_babilong(BABILongDataset([ROW]*2, tiny_tokenizer()), .9)] == [1, 1]
    with pytest.raises(ValueError, match='cannot be split'): split_babilong(BABILongDataset([ROW], tiny_tokenizer()))


def test_collate_only_stacks():
    ds = BABILongDataset([ROW]*2, tiny_tokenizer(), max_length=200, answer_reserve_tokens=4)
    batch = collate_babilong([ds[0], ds[1]])
    assert all(batch[k].equal(torch.stack([ds[0][k], ds[1][k]])) for k in batch)


# Lists on disk

def objects(inner, size): return st.dictionaries(st.text(max_size=5), inner, max_size=size)


json_value = st.recursive(st.text(max_size=12) | st.integers() | st.none(),
                          lambda inner: st.lists(inner, max_size=3) | objects(inner, 3))


@given(rows=st.lists(objects(json_value, 4), max_size=5), indent=st.sampled_from([None, 1]), ascii=st.booleans(),
       bom=st.booleans())
@settings(max_examples=150, deadline=None)
def test_offsets_find_every_object(tmp_path_factory, rows, indent, ascii, bom):
    path = tmp_path_factory.mktemp('j')/'x.json'
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii)
    blob = (b'\xef\xbb\xbf' if bom else b'') + text.encode('utf-8', 'surrogatepass')
    path.write_bytes(blob)
    assert [json.loads(blob[a:b].decode('utf-8', 'surrogatepass')) for a, b in index_json_list(path)] == rows


@pytest.mark.parametrize('blob,what', [
    (b'', 'empty'), (b'{"a": 1}', 'does not begin'), (b'[{"a": "x', 'unfinished'),
    (b'[{"a": 1}', 'ends inside the list'),
    (b'[{"a": 1', 'ends inside an object'), (b'[[1]]', 'holds a list'), (b'["x"]', 'stray'), (b'[]]', 'too many')])
def test_damaged_lists_are_named(tmp_path, blob, what):
    (tmp_path/'x.json').write_bytes(blob)
    with pytest.raises(ValueError, match=what): index_json_list(tmp_path/'x.json')


def test_a_changed_file_is_indexed_anew_and_missing_ones_explain(tmp_path):
    path = generate_babilong(tmp_path/'a.json', num_samples=2, length_tokens=64)
    assert len(BABILongRows(path)) == 2
    generate_babilong(path, num_samples=3, length_tokens=64)
    rows = BABILongRows(path)
    assert len(rows) == 3 and rows[2] == GeneratedRows(3, 64)[2]
    with pytest.raises(IndexError): rows[3]
    with pytest.raises(ValueError, match='no such file'): babilong_source(str(tmp_path/'b.json'))
    (tmp_path/'e.json').write_text('[]')
    with pytest.raises(ValueError, match='list is empty'): BABILongRows(tmp_path/'e.json')


def test_the_index_reads_a_long_list_lazily(tmp_path):
    rows = [ROW | dict(input=f'{i} ' + 'The old mill said "so" \\ and slept.\n' * 2000) for i in range(60)]
    path = tmp_path/'long.json'
    path.write_text(json.dumps(rows))
    lazy = BABILongRows(path)
    assert len(lazy) == 60 and lazy[59] == rows[59]
    lazy.path = tmp_path/'gone.json'  # nothing but offsets is held
    with pytest.raises(FileNotFoundError): lazy[0]


# Generated rows

@pytest.mark.parametrize('task', list(TASKS))
@pytest.mark.parametrize('length', [200, 1000])
def test_rows_fit_hold_their_facts_and_repeat(task, length):
    counter = TokenCounter(tiny_tokenizer())
    for i in range(4):
        row = babilong_row(task, length, index=i, counter=counter)
        assert row == babilong_row(task, length, index=i)
        assert length - 40 <= counter.whole(babilong_prompt(row['input'], row['question'])) <= length
        assert TASKS[task].num_facts[0] <= len(FACT_PATTERN.findall(row['input']))
        assert row['target'] in TASKS[task].labels
        assert is_correct(row['target'], row['target'], row['question'], TASKS[task].labels)
    assert babilong_row(task, length, index=1) != babilong_row(task, length, index=1, seed=7)


def test_qa1_answers_follow_from_the_facts():
    for i in range(100):
        row = babilong_row('qa1', 300, index=i)
        where = {}
        for fact in FACT_PATTERN.finditer(row['input']): where[fact[0].split()[0]] = fact[0].rstrip('.').split()[-1]
        assert where[row['question'].removeprefix('Where is ').rstrip('?')] == row['target']


def facts_of(row):
    "The facts of a row, each as its words"
    return [m[0].rstrip('.').split() for m in FACT_PATTERN.finditer(row['input'])]


def places_of_things(facts):
    "Every place each thing has been at, in order, from the sentences alone"
    where, holder, been = {}, {}, {}
    for name, *rest in facts:
        things = [o for o in ('apple', 'football', 'milk') if o in rest]
        if not things: where[name] = rest[-1]
        elif rest[0] in ('got', 'took', 'grabbed', 'picked'): holder[things[0]] = name
        else:
            assert holder.pop(things[0]) == name  # nobody puts down what another one holds
        for thing, who in holder.items():
            places = been.setdefault(thing, [])
            if places[-1:] != [where[who]]: places.append(where[who])
    return been


def test_qa2_answers_follow_from_the_facts():
    for i in range(60):
        row = babilong_row('qa2', 400, index=i)
        thing = row['question'].removeprefix('Where is the ').rstrip('?')
        assert places_of_things(facts_of(row))[thing][-1] == row['target']


def test_qa3_answers_follow_from_the_facts_and_are_the_only_ones():
    for i in range(60):
        row = babilong_row('qa3', 600, index=i)
        thing, place = row['question'].removeprefix('Where was the ').rstrip('?').split(' before the ')
        been = places_of_things(facts_of(row))[thing]
        assert [a for a, b in zip(been, been[1:]) if b == place] == [row['target']]


def test_qa4_answers_follow_from_the_facts_and_are_the_only_ones():
    opposite = dict(north='south', south='north', east='west', west='east')
    for i in range(80):
        row = babilong_row('qa4', 200, index=i)
        facts = facts_of(row)
        known = {(a, side, b) for _, a, _, side, _, _, b in facts}  # The A is north of the B
        known |= {(b, opposite[side], a) for a, side, b in known}
        words = row['question'].rstrip('?').split()
        if words[2] == 'the': answers = [b for a, side, b in known if (a, side) == (words[3], words[4])]
        else: answers = [a for a, side, b in known if (side, b) == (words[2], words[-1])]
        assert len(facts) == 2 and answers == [row['target']]


def test_qa5_answers_follow_from_the_facts_and_are_the_last_gift_that_fits():
    for i in range(80):
        row = babilong_row('qa5', 400, index=i)
        holder, gifts = {}, []
        for name, *rest in facts_of(row):
            if rest[0] not in ('gave', 'handed', 'passed'): holder.setdefault(rest[-2], name)
            else:
                assert holder[rest[2]] == name  # nobody gives away what another one holds
                holder[rest[2]] = rest[-1]
                gifts.append((name, rest[2], rest[-1]))
        words = row['question'].rstrip('?').split()
        if words[0] == 'What': fits = [o for a, o, b in gifts if (a, b) == (words[2], words[-1])]
        elif words[1] == 'gave': fits = [a for a, o, b in gifts if (o, b) == (words[3], words[-1])]
        else: fits = [b for a, o, b in gifts if (a, o) == (words[2], words[5])]
        assert fits[-1] == row['target']


def test_background_from_a_file_keeps_its_order_and_loses_its_facts(tmp_path):
    path = tmp_path/'book.txt'
    lines = ' '.join(f'Line {i} went on.' for i in range(300))
    path.write_text('It was late. Mary went to the office. Nobody spoke!  Why? ' + lines)
    row = babilong_row('qa1', 400, background=str(path), index=3)
    plain = FACT_PATTERN.sub('', row['input'])
    numbers = [int(w) for w in plain.split() if w.isdigit()]
    assert len(numbers) > 20 and all(b - a in (1, -299) for a, b in zip(numbers, numbers[1:]))
    with pytest.raises(ValueError, match='no such file'): babilong_row('qa1', 400, background=str(tmp_path/'absent'))


def test_long_rows_are_quick_and_exact():
    counter = TokenCounter(tiny_tokenizer())
    row = babilong_row('qa1', 100_000, counter=counter)
    assert 99_900 <= counter.whole(babilong_prompt(row['input'], row['question'])) <= 100_000


def test_facts_before_holds_for_every_row():
    counter = TokenCounter(tiny_tokenizer())
    for i in range(30):
        text = babilong_row('qa1', 256, index=i, facts_before=128, counter=counter)['input']
        assert counter.whole(text[:max(m.end() for m in FACT_PATTERN.finditer(text))]) <= 128


@pytest.mark.parametrize('output,target,question,right', [
    (' office', 'office', 'Where is Mary?', True), ('OFFICE. kitchen', 'office', 'Where is Mary?', True),
    ('kitchen and office', 'office', 'Where is Mary?', False), ('', 'office', 'Where is Mary?', False),
    ('the office before the kitchen', 'office', 'Where was the milk before the kitchen?', True),
    ('kitchen', 'kitchen', 'Where was the milk before the kitchen?', False)])
def test_scoring_rule(output, target, question, right):
    assert is_correct(output, target, question, TASKS['qa1'].labels) is right
