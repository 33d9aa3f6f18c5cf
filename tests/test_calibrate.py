import json

import numpy as np
import pytest

from deepspec.eval.calibrate import (auroc, brier_score, calibrate_draft, expected_calibration_error, fit_temperatures,
                                     load_calibration, load_recorded, recorded_cycles, reliability, slot_quality, split_answers,
                                     survival_chances)


def rows(num_cycles, factors, seed=0, lengths=None):
    "Cycles whose slot k is `factors[k]` times too sure"
    rng = np.random.default_rng(seed)
    z = rng.normal(1, 1.5, (num_cycles, len(factors)))
    alive = np.cumprod(rng.random(z.shape) < 1/(1 + np.exp(-z)), 1)
    n = np.full(num_cycles, len(factors)) if lengths is None else rng.choice(lengths, num_cycles)
    return [dict(draft='dspark', set='s', id=str(i//10), turn=0, cycle=i % 10, proposed=[1]*n[i], num_accepted=int(alive[i, :n[i]].sum()),
                 confidence_logits=list((z[i]*factors)[:n[i]])) for i in range(num_cycles)]


def test_temperatures_find_each_slots_own_factor():
    found = fit_temperatures(recorded_cycles(rows(40_000, [3., 1., .5])))
    assert found == pytest.approx([3, 1, .5], rel=.3)


def test_held_out_error_falls_to_about_one_percent():
    fitted_on, held_out = split_answers(recorded_cycles(rows(20_000, [2.]*6)))
    before, after = slot_quality(held_out), slot_quality(held_out, fit_temperatures(fitted_on))
    assert np.mean([s['ece'] for s in before]) > .04
    assert np.mean([s['ece'] for s in after]) < .015
    for b, a in zip(before, after): # a temperature keeps the ranking of its slot
        assert b['auroc_confidence'] == a['auroc_confidence'] and a['brier'] <= b['brier'] + 1e-3


def test_short_proposals_are_masked():
    full = recorded_cycles(rows(3000, [1., 1., 1.], lengths=[1, 2, 3]))
    assert full.proposed_NK.sum(0)[0] == 3000 > full.proposed_NK.sum(0)[1] > full.proposed_NK.sum(0)[2]
    quality = slot_quality(full)
    assert [q['num_cycles'] for q in quality] == full.proposed_NK.sum(0).tolist()
    assert quality[2]['ece'] < .08


def test_answers_are_never_split():
    a, b = split_answers(recorded_cycles(rows(500, [1.])), share=.3)
    assert not set(a.answer_N) & set(b.answer_N) and len(set(a.answer_N)) == 15
    assert len(a.answer_N) + len(b.answer_N) == 500
    with pytest.raises(ValueError, match='one answer only'): split_answers(recorded_cycles(rows(10, [1.])))


def test_auroc_against_all_pairs():
    rng = np.random.default_rng(0)
    scores, outcomes = rng.integers(0, 6, 80), rng.integers(0, 2, 80)
    pairs = [(s > t) + .5*(s == t) for s in scores[outcomes == 1] for t in scores[outcomes == 0]]
    assert auroc(scores, outcomes) == pytest.approx(np.mean(pairs))


def test_ece_against_the_diagram():
    rng = np.random.default_rng(1)
    p = rng.random(500)
    y = rng.random(500) < p**2
    bins = reliability(p, y, 10)
    assert sum(b['count'] for b in bins) == 500
    by_hand = sum(b['count']*abs(b['predicted'] - b['observed']) for b in bins)/500
    assert expected_calibration_error(p, y, 10) == pytest.approx(by_hand)
    assert expected_calibration_error([1., 0.], [1, 0]) == 0 # the edges belong to the outer bins
    assert brier_score([.5], [1]) == .25
    with pytest.raises(ValueError, match='no predictions'): expected_calibration_error([], [])


def test_survival_never_rises():
    s = survival_chances(np.random.default_rng(0).normal(size=(50, 7)), (2., .5, 1., 1., 3., 1., 1.))
    assert (np.diff(s, axis=1) <= 0).all() and (s >= 0).all() and (s <= 1).all()


def test_files(tmp_path):
    path = tmp_path/'cycles.jsonl'
    path.write_text(''.join(json.dumps(r) + '\n' for r in rows(400, [2., 2.])))
    found = calibrate_draft(path, 'dspark', tmp_path/'draft')
    assert load_calibration(tmp_path/'draft') == tuple(found['temperatures'])
    assert found['fitted_cycles'] + found['held_out_cycles'] == 400
    (tmp_path/'draft'/'confidence_calibration.json').write_text('{"temperatures": [1, -2]}')
    with pytest.raises(ValueError, match='positive numbers'): load_calibration(tmp_path/'draft')
    with pytest.raises(ValueError, match='no such file'): load_recorded(tmp_path/'absent.jsonl', 'dspark')
    path.write_text(json.dumps(dict(rows(1, [1.])[0], confidence_logits=[])) + '\n')
    with pytest.raises(ValueError, match='no confidence head'): load_recorded(path, 'dspark')
    path.write_text('')
    with pytest.raises(ValueError, match='nobody'): load_recorded(path, 'dspark')
