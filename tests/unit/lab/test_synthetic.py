import numpy as np

from colibri.lab.synthetic import Routing, make_trace


def kept(stickiness: float) -> float:
    trace = make_trace(Routing(num_tokens=600, stickiness=stickiness, zipf=0.5))
    ids = trace.ids.reshape(600, 4, 2)
    same = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(axis=3)
    return float(same.mean())


def test_choices_are_valid_and_repeatable() -> None:
    trace, again = make_trace(Routing(seed=4)), make_trace(Routing(seed=4))
    assert np.array_equal(trace.ids, again.ids)
    assert trace.ids.shape == (1600, 2)
    assert trace.num_keys == 64
    assert (trace.ids[:, 0] != trace.ids[:, 1]).all()
    assert trace.ids.min() >= 0
    assert trace.ids.max() < 16
    assert (np.diff(trace.weights, axis=1) <= 0).all()
    assert not np.array_equal(trace.ids, make_trace(Routing(seed=5)).ids)


def test_popularity_is_skewed_and_changes_with_the_domain() -> None:
    flat, steep = (
        np.bincount(make_trace(Routing(zipf=z, num_domains=1)).ids[::4].ravel(), minlength=16)
        for z in (0.0, 2.0)
    )
    assert flat.max() < 0.2 * flat.sum() < steep.max()
    one, many = (
        make_trace(Routing(num_tokens=2000, zipf=2.0, num_domains=n, domain_tokens=100, seed=1))
        for n in (1, 4)
    )
    halves = [np.bincount(part.ravel(), minlength=16) for part in np.split(one.ids[::4], 2)]
    assert halves[0].argmax() == halves[1].argmax()
    tops = {np.bincount(part.ravel()).argmax() for part in np.split(many.ids[::4], 20)}
    assert len(tops) > 1


def test_a_sticky_token_keeps_experts() -> None:
    assert kept(0.0) < 0.35
    assert kept(0.8) > 0.75
