import itertools

import numpy as np
import pytest
import torch

from deepspec.eval.calibrate import recorded_cycles
from deepspec.eval.decode import DecodeConfig, speculative_generate
from deepspec.eval.schedule import (DelayedBudget, EarlyStop, FixedLength, SpsTable, StaticThreshold, admit, best_budget, profile_sps,
                                    simulate)
from deepspec.model.target import toy_target
from toy_drafts import TableDraft, tiny_vocabulary_target
from test_decode import SIGNIFICANCE, answer_probs, chi_square_p

JAGGED = SpsTable((1, 2, 3), (1., .5, .45))


def global_best(survival_RK, table=JAGGED): return admit(survival_RK, best_budget(survival_RK, table, stop=False))


def random_curves(rng, R, K): return [sorted(rng.random(K).tolist(), reverse=True) for _ in range(R)]


# --- the paper's counterexample, drawn for real

def first_tokens(policy, num_draws=200_000, seed=0):
    "Share of token 0 where p_t = (0.7, 0.3), p_d = (0.5, 0.5); after token 0 the next slot is sure, after token 1 hopeless"
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 2, num_draws)
    lengths = np.array([policy([[.8, .8*(1 - x)]])[0] for x in (0, 1)])[drawn]
    accepted = rng.random(num_draws) < np.minimum(1, np.array([.7, .3])/.5)[drawn]
    judged = np.where(accepted, drawn, 0) # the residual of (0.7, 0.3) over (0.5, 0.5) is token 0
    return (np.where(lengths > 0, judged, rng.random(num_draws) >= .7) == 0).mean()


def test_counterexample_is_biased_without_the_stop():
    assert first_tokens(global_best) == pytest.approx(.85, abs=.004)


def test_counterexample_is_unbiased_with_it():
    assert first_tokens(lambda s: EarlyStop()(s, JAGGED)) == pytest.approx(.7, abs=.004)


@pytest.mark.parametrize('history', list(itertools.product([0., .8], repeat=2)))
def test_counterexample_is_unbiased_with_a_delayed_budget(history):
    def policy(survival_RK):
        delayed = DelayedBudget()
        for a in history: delayed([[.8, a]], JAGGED)
        return delayed(survival_RK, JAGGED)
    assert first_tokens(policy) == pytest.approx(.7, abs=.004)


# --- inside the decoding loop

def decoded_counts(policy, num_seeds=20, batch=400):
    target, prompt = tiny_vocabulary_target(), [1, 2]
    counts = torch.zeros(6**4, dtype=torch.long)
    for seed in range(num_seeds):
        config = DecodeConfig(max_new_tokens=4, temperature=1., stop_ids=(), seed=seed)
        each = lambda survival_RK: [n for a in survival_RK for n in policy([a])] # every request alone on its engine
        found = speculative_generate(target, TableDraft(6, seed=1), [prompt]*batch, config, each).generations
        counts += (torch.tensor([g.tokens for g in found]) @ torch.tensor([216, 36, 6, 1])).bincount(minlength=6**4)
    return chi_square_p(counts, answer_probs(target, prompt, 4, 1.))


def test_early_stop_keeps_the_targets_distribution():
    table = SpsTable((1, 2, 3, 4), (1., .7, .5, .45))
    assert decoded_counts(lambda s: EarlyStop()(s, table)) > SIGNIFICANCE


def test_thresholds_keep_it_and_a_peeking_policy_does_not():
    assert decoded_counts(lambda s: StaticThreshold(.4)(s, JAGGED)) > SIGNIFICANCE
    peeking = lambda s: [len(a) if len(a) > 1 and a[1] > .5*a[0] else 0 for a in s] # the second slot decides on the first
    assert decoded_counts(peeking) < SIGNIFICANCE


# --- algorithms

@pytest.mark.parametrize('seed', range(20))
def test_budget_against_brute_force(seed):
    rng = np.random.default_rng(seed)
    R, K = rng.integers(1, 4), rng.integers(1, 4)
    curves = random_curves(rng, R, K)
    size = R*(1 + K)
    table = SpsTable(tuple(range(1, size + 1)), tuple(np.sort(rng.random(size) + .05)[::-1]))
    throughput = lambda lengths: (R + sum(sum(a[:n]) for a, n in zip(curves, lengths)))*table(R + sum(lengths))
    every = list(itertools.product(range(K + 1), repeat=R))
    found = admit(curves, best_budget(curves, table, stop=False))
    assert throughput(found) == pytest.approx(max(map(throughput, every)))
    stopped = EarlyStop()(curves, table)
    assert throughput(stopped) <= throughput(found) + 1e-9
    assert throughput(stopped) >= throughput([0]*R) - 1e-9


@pytest.mark.parametrize('seed', range(20))
def test_admission_ignores_what_follows_a_token(seed):
    "Strict causality: changing a request's later slots never changes whether an earlier one is verified"
    rng = np.random.default_rng(seed)
    curves = random_curves(rng, 3, 4)
    table = SpsTable(tuple(range(1, 16)), tuple(np.sort(rng.random(15) + .05)[::-1]))
    lengths = EarlyStop()(curves, table)
    for k in range(4):
        for last in (0., 1.):
            other = [list(c) for c in curves]
            other[0][k + 1:] = [other[0][k]*last]*(3 - k)
            assert (EarlyStop()(other, table)[0] > k) == (lengths[0] > k)


def test_smooth_curves_make_both_variants_agree():
    table = SpsTable((1, 64), (1., .2)) # the time of a pass is linear, so the throughput has one top
    rng = np.random.default_rng(0)
    for _ in range(50):
        curves = random_curves(rng, 4, 5)
        assert EarlyStop()(curves, table) == global_best(curves, table)


def test_ties_keep_the_order_of_a_request():
    assert admit([[.5, .5, .5]], 2) == [2]
    assert sum(admit([[.5, .5], [.5, .5]], 3)) == 3


def test_delay_uses_the_budget_of_two_passes_ago():
    table = SpsTable((1, 2, 3, 20), (1., .45, .44, .43)) # a step that the early stop never climbs
    delayed, lengths = DelayedBudget(), []
    for a in (.99, .01, .99, .01): lengths.append(delayed([[a, a, a]], table)[0])
    assert lengths == [0, 0, 3, 0]
    assert DelayedBudget(delay=1)([[.9]], table) == [0]


def test_delayed_budget_never_outgrows_the_table():
    table = SpsTable((1, 4), (1., .9))
    delayed = DelayedBudget()
    for _ in range(3): lengths = delayed([[.9, .9, .9]], table)
    assert lengths == [3]
    assert sum(delayed([[.9, .9, .9]]*3, table)) <= 1 # three requests leave room for one token


@pytest.mark.parametrize('sizes,speeds', [((), ()), ((1, 1), (1., 1.)), ((2, 1), (1., 1.)), ((1,), (0.,)), ((0,), (1.,)), ((1, 2), (1.,))])
def test_bad_tables(sizes, speeds):
    with pytest.raises(ValueError, match='SpsTable'): SpsTable(sizes, speeds)


def test_profile_is_monotone():
    table = profile_sps(toy_target(), (1, 4, 16, 24), context_tokens=8, repeats=2)
    assert list(table.steps_per_s) == sorted(table.steps_per_s, reverse=True)
    assert table(20) > 0


# --- simulator

def constant(accepted, num_slots=4, logit=0.):
    return recorded_cycles([dict(set='s', id=str(i//5), turn=0, proposed=[1]*num_slots, num_accepted=accepted, cycle=i % 5,
                                 confidence_logits=[logit]*num_slots) for i in range(50)])


def test_simulated_numbers_by_hand():
    table = SpsTable((1, 100), (10., 10.))
    found = simulate(constant(accepted=3), FixedLength(4), table, concurrency=5, num_steps=10)
    assert found == pytest.approx(dict(concurrency=5, tokens_per_s=5*4*10, tokens_per_request_s=40, acceptance_length=4,
                                       verified_per_request=4, verify_rate=4/5))
    plain = simulate(constant(accepted=3), FixedLength(0), table, concurrency=5, num_steps=10)
    assert (plain['acceptance_length'], plain['tokens_per_s']) == (1, pytest.approx(50))
    cut = simulate(constant(accepted=3), FixedLength(2), table, concurrency=1, num_steps=10)
    assert cut['acceptance_length'] == 3


def test_scheduler_moves_from_everything_to_nothing():
    engine = SpsTable((1, 16, 32, 640), (20., 20., 10., .5))
    budgets = [simulate(constant(3, logit=.5), EarlyStop(), engine, R, num_steps=20)['verified_per_request'] for R in (1, 4, 16, 64)]
    assert budgets == sorted(budgets, reverse=True) and budgets[0] == 4 and budgets[-1] < .5
