"""Attention by hand: four tokens, one head, small whole numbers, every step as a matrix.

    python -m experiments.worked_example [--quick]      a few seconds; --quick is the same

The question: does the attention of this project give the digits that the article works out on paper
for four tokens with d_model = d_k = 4, without a mask and with a causal one?

Expected: the same digits. The causal mask leaves the weights of the last token as they are, since
it sees all the others anyway, and shares out the weights of every other row among fewer keys;
what is masked is exactly 0, not merely small.

Q = X W_Q, K = X W_K, V = X W_V, weights = softmax(Q Kᵀ / √4), outputs = weights V. Weights and
outputs come from `dot_product_attention`, the function that every model here runs.
"""

import numpy as np
from matplotlib.figure import Figure

from minigpt_jax import experiment
from minigpt_jax.model.attention import dot_product_attention
from minigpt_jax.report.figures import styled

X_TD = np.array([[0, 0, 1, 0], [1, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 1]], np.float32)
QUERY_DK = np.array([[0, -1, -1, -1], [-1, 1, 1, -1], [0, -1, 1, 1], [0, -1, -1, 0]], np.float32)
KEY_DK = np.array([[0, -1, 0, 1], [1, -1, 0, 1], [1, 1, -1, -1], [0, 1, 1, 0]], np.float32)
VALUE_DK = np.array([[1, 0, 2, 0], [0, 2, 0, 1], [2, 1, 0, 0], [0, 0, 1, 2]], np.float32)

# What the article prints, to 4 decimals, its three masked rows with what is left out as 0.
PRINTED = {
    'scores': [[-3, 1, 4, 0], [-2, -3, -1, 0], [1, -2, -5, -2], [0, 2, 0, -2]],
    'weights': [
        [0.0217, 0.1607, 0.7201, 0.0975],
        [0.1674, 0.1015, 0.2760, 0.4551],
        [0.6684, 0.1491, 0.0333, 0.1491],
        [0.1966, 0.5344, 0.1966, 0.0723],
    ],
    'outputs': [
        [1.2456, 1.9440, 2.5792, 2.5159],
        [0.9154, 1.0240, 1.4861, 1.8397],
        [1.8176, 1.1824, 0.5473, 0.5473],
        [2.1932, 2.1932, 1.7311, 1.2689],
    ],
    'causal weights': [[1, 0, 0, 0], [0.6225, 0.3775, 0, 0], [0.7856, 0.1753, 0.0391, 0]],
}
ROUNDING = 0.5e-4 + 1e-6  # of 4 printed decimals, and of float32


def work_out():
    """Every step by its name, each of shape (4, 4)."""
    q_TK, k_SK, v_SK = (X_TD @ w_DK for w_DK in (QUERY_DK, KEY_DK, VALUE_DK))
    scores_TS = q_TK @ k_SK.T
    outputs_TK, weights_TS = attend(q_TK, k_SK, v_SK, causal=False)
    causal_outputs_TK, causal_weights_TS = attend(q_TK, k_SK, v_SK, causal=True)
    return {
        'X': X_TD,
        'Q': q_TK,
        'K': k_SK,
        'V': v_SK,
        'scores': scores_TS,
        'scaled': scores_TS / np.sqrt(q_TK.shape[-1]),
        'weights': weights_TS,
        'outputs': outputs_TK,
        'causal weights': causal_weights_TS,
        'causal outputs': causal_outputs_TK,
    }


def attend(q_TK, k_SK, v_SK, *, causal):
    """(outputs_TK, weights_TS) of one text and one head."""
    q_BTHK, k_BSHK, v_BSHK = (x[None, :, None] for x in (q_TK, k_SK, v_SK))
    outputs_BTHK, weights_BHTS = dot_product_attention(
        q_BTHK, k_BSHK, v_BSHK, causal=causal, return_weights=True
    )
    return np.asarray(outputs_BTHK[0, :, 0]), np.asarray(weights_BHTS[0, 0])


TITLES = {
    'X': 'X: four tokens',
    'Q': 'Q = X W_Q',
    'K': 'K = X W_K',
    'V': 'V = X W_V',
    'scores': 'Q Kᵀ: how well query t (row) and key s (column) fit',
    'scaled': 'Q Kᵀ / √4',
    'weights': 'Weights: softmax of each row',
    'outputs': 'Outputs: weights · V',
    'causal weights': 'Weights with a causal mask: token t sees tokens 1 … t',
    'causal outputs': 'Outputs with a causal mask',
}


def measure(setting):
    del setting  # there is nothing to make smaller
    steps = work_out()
    tables = [
        (title, ['token', *'1234'], [[t + 1, *map(show, row)] for t, row in enumerate(steps[name])])
        for name, title in TITLES.items()
    ]
    return experiment.Outcome(
        tables=tables, numbers=steps, claims=judge(steps), figure=draw(steps), whole=True
    )


def show(x):
    return f'{x:g}' if x == round(float(x), 1) else f'{x:.4f}'


def judge(steps):
    exact = np.array_equal(steps['scores'], PRINTED['scores'])
    claims = [
        experiment.Claim(
            source='B1',
            text='The products of queries and keys',
            theirs=f'Q Kᵀ = {PRINTED["scores"]}',
            ours='the same sixteen whole numbers' if exact else f'{steps["scores"].tolist()}',
            verdict='holds' if exact else 'does not hold',
        )
    ]
    for name, text in (
        ('weights', 'The weights without a mask'),
        ('outputs', 'The outputs without a mask'),
        ('causal weights', 'The first three rows of weights with a causal mask'),
    ):
        difference = largest_difference(steps, name)
        claims.append(
            experiment.Claim(
                source='B1',
                text=text,
                theirs='; '.join(' '.join(map(show, row)) for row in PRINTED[name]),
                ours=f'the largest difference is {difference:.1e}: 4 decimals round by up to 5e-05',
                verdict='holds' if difference < ROUNDING else 'does not hold',
            )
        )
    return claims + [judge_mask(steps)]


def judge_mask(steps):
    masked = steps['causal weights'][np.triu_indices(4, 1)]
    last = np.abs(steps['causal weights'][-1] - steps['weights'][-1]).max()
    return experiment.Claim(
        source='B1',
        text='Masked weights are exactly 0, and the last row is as it was',
        theirs='',
        ours=f'{np.sum(masked == 0)} of {masked.size} masked weights are exactly 0; '
        f'the last row differs by {last:g}',
        verdict='holds' if not masked.any() and last < 1e-6 else 'does not hold',
    )


def largest_difference(steps, name):
    """Between the digits of the article and ours, over the rows that the article prints."""
    printed = np.array(PRINTED[name])
    return float(np.abs(steps[name][: len(printed)] - printed).max())


@styled
def draw(steps):
    figure = Figure(figsize=(8.4, 4.4))
    for plot, name, title in zip(
        figure.subplots(1, 2, sharey=True),
        ('weights', 'causal weights'),
        ('Without a mask: every token sees all four', 'Causal mask: no token sees a later one'),
        strict=True,
    ):
        weights_TS = steps[name]
        image = plot.imshow(weights_TS, cmap='Blues', vmin=0, vmax=1)
        for (t, s), weight in np.ndenumerate(weights_TS):
            plot.text(
                s, t, f'{weight:.4f}' if weight else '0', ha='center', va='center', fontsize=11,
                color='white' if weight > 0.6 else 'black',
            )  # fmt: skip
        plot.set_xticks(range(4), [f'token {s + 1}' for s in range(4)])
        plot.set_yticks(range(4), [f'token {t + 1}' for t in range(4)])
        plot.set_xlabel('key: who is looked at')
        plot.grid(False)
        plot.set_title(title)
    figure.axes[0].set_ylabel('query: who looks')
    figure.colorbar(image, ax=figure.axes, label='attention weight (a row sums to 1)', shrink=0.8)
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
