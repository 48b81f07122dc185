"""What a family of models learns: its data, its losses, what it is judged by and what it shows.

All in which the families differ in training: the loop, checkpoints and sweeps know nothing of it. A
new family is a class like these, in `TASKS`, besides its model (`MODELS`) and what its corpora hold
(`config.CONTENTS`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minigpt_jax.data import batches, images, pairs
from minigpt_jax.data.batches import WHOLE
from minigpt_jax.inference.decoding import continue_text, translate_batch
from minigpt_jax.inference.scores import score_translations
from minigpt_jax.training import sharding, steps
from minigpt_jax.training.config import ConfigError

SAMPLE_TEMPERATURE = 0.8
# With a budget of tokens, batches are multiples of this: what a step sees must not depend on the
# number of devices, and as many as these can share any batch.
SHARED_BY = 8
_OF_NO_SEED = 2**31  # where a stream of random numbers is of no run
_SHOWN = 5


class ContinueText:
    """Next tokens of one text: `model.family` decoder.

    With `data.pack_documents` a batch also says which document each token is of (see
    `batches.document_segments`): attention stays within it, and its first token, which nothing
    before it belongs to, is no target.

    Attributes:
      config, corpus: of a run; the corpus is what `load` returns.
      losses: what is trained on batches of this family, and evaluated; see `steps.token_losses`.
      judged: names of further validation metrics, see `judge`.
    """

    losses = staticmethod(steps.token_losses)
    load = staticmethod(batches.load_tokenized)
    judged = ()

    def __init__(self, config, corpus):
        self.config, self.corpus = config, corpus
        # What `training_batch` and `training_batches` make windows of.
        self._windows = dict(
            context_length=config.model.context_length, batch_size=config.data.batch_size
        )

    def check(self, mesh):
        """Raises ConfigError or DataError where configuration and corpus do not fit together."""
        length = self.config.model.context_length
        batches.check_length(self.corpus.train_tokens, length, 'training')
        batches.check_length(self.corpus.validation_tokens, length, 'validation')
        self.check_batches(mesh)
        eos_id = self.corpus.tokenizer.eos_id
        if self.config.data.pack_documents and eos_id not in self.corpus.train_tokens:
            raise ConfigError(
                'data.pack_documents=True: the training text is one document; leave it out, give '
                'several files, or say where documents end with data.document_separator'
            )
        self.check_sample()

    def check_batches(self, mesh):
        """Raises ConfigError where the devices cannot share a batch."""
        _check_batch_sizes(self.config, mesh)

    def check_sample(self):
        sample_prompt(self.config, self.corpus)

    def abstract_batches(self):
        """The shapes that `batches` yields: each has a program of its own."""
        config = self.config
        K, B, T = config.train.steps_per_call, config.data.batch_size, config.model.context_length
        batch = {'tokens_BT1': jax.ShapeDtypeStruct((K, B, T + 1), jnp.int32)}
        if config.data.pack_documents:
            batch['segment_ids_BT'] = jax.ShapeDtypeStruct((K, B, T), jnp.int32)
            batch['mask_BT'] = jax.ShapeDtypeStruct((K, B, T), jnp.bool_)
        return [batch]

    def _windows_as_batch(self, tokens_BT1):
        batch = {'tokens_BT1': tokens_BT1}
        if self.config.data.pack_documents:
            batch |= batches.document_segments(tokens_BT1, eos_id=self.corpus.tokenizer.eos_id)
        return batch

    def batches(self, seed, first_step, share=WHOLE):
        """An endless iterator of what the calls from `first_step` on train on.

        Of each batch only the rows of `share`: see `batches.Share`.
        """
        calls = batches.training_batches(
            self.corpus.train_tokens,
            **self._windows,
            seed=seed,
            steps_per_call=self.config.train.steps_per_call,
            first_step=first_step,
            share=share,
        )
        return map(self._windows_as_batch, calls)

    def batch(self, seed, step):
        """The batch of one step."""
        tokens_BT1 = batches.training_batch(
            self.corpus.train_tokens, **self._windows, seed=seed, step=step
        )
        return self._windows_as_batch(tokens_BT1)

    def validation(self):
        """The whole validation split: batches that `losses` reads, of each shape with an axis N."""
        config = self.config
        tokens_NBT1, mask_NBT = batches.validation_batches(
            self.corpus.validation_tokens,
            context_length=config.model.context_length,
            batch_size=config.eval.batch_size,
        )
        batch = self._windows_as_batch(tokens_NBT1)
        return [batch | {'mask_BT': mask_NBT & batch.get('mask_BT', True)}]

    def judge(self, model, params):
        """Further metrics on the validation split, by name."""
        del model, params
        return {}

    def sample(self, model, params):
        """What `samples.txt` shows: the same prompt and key for every run of a sweep."""
        return continue_text(
            model,
            params,
            self.corpus.tokenizer,
            self.config.model.context_length,
            sample_prompt(self.config, self.corpus),
            num_tokens=self.config.eval.sample_tokens,
            temperature=SAMPLE_TEMPERATURE,
        )[0]

    def first_text(self, batch):
        """The first text of a batch, for a person."""
        return self.corpus.tokenizer.decode(batch['tokens_BT1'][0])

    @property
    def output_size(self):
        """Size of the vocabulary that is predicted."""
        return self.corpus.tokenizer.vocab_size

    def tokens_per_step(self):
        """Tokens that one optimizer step trains on."""
        return self.config.data.batch_size * self.config.model.context_length

    def columns(self, val_loss):
        """Columns of results.csv of this family alone; `val_loss` may be None."""
        corpus = self.corpus
        # Of packed documents the first token is not predicted: those bits are of no byte's text.
        packed = self.config.data.pack_documents
        if val_loss is None or corpus.unknown_share or packed:
            return {'bits_per_byte': None}
        nats = val_loss * (len(corpus.validation_tokens) - 1)
        return {'bits_per_byte': nats / math.log(2) / corpus.validation_bytes}

    def describe(self):
        """What there is to say of the batches before training, or an empty text."""
        return ''


def sample_prompt(config, corpus):
    """`eval.sample_prompt`, or the first words of the validation text, within its first line.

    Raises:
      ConfigError: if it is empty, or the tokenizer does not know one of its symbols.
    """
    prompt = config.eval.sample_prompt
    if prompt is None:
        # A token may be part of a character: of the last one there may be too few.
        text = corpus.tokenizer.decode(corpus.validation_tokens[:200]).rstrip('\ufffd')
        known = [line for line in text.splitlines() if line.strip() and '<' not in line]
        prompt = ' '.join((known or [text])[0].split()[:3])[:24]
    if not prompt:
        raise ConfigError('eval.sample_prompt is empty: give at least one symbol')
    if unknown := corpus.tokenizer.unknown_symbols(prompt):
        raise ConfigError(
            f'eval.sample_prompt={prompt!r}: unknown symbols {" ".join(map(repr, unknown))}'
        )
    return prompt


class GuessTokens(ContinueText):
    """Hidden tokens of a text from all others: `model.family` encoder. See `ContinueText`.

    Every batch hides other tokens, a function of seed and step. Validation hides the same ones
    always, a share of `data.mask_rate`; judged also by the share of them that is guessed right.
    """

    losses = staticmethod(steps.masked_losses)
    judged = ('accuracy',)

    def check_sample(self):
        # Its sample is a text of validation, of which something must be hidden.
        if not self._validation['mask_BT'].any():
            raise ConfigError(
                f'data.mask_rate={self.config.data.mask_rate}: hides none of the '
                f'{len(self.corpus.validation_tokens)} tokens of validation; give more'
            )

    def abstract_batches(self):
        (batch,) = super().abstract_batches()
        K, B, T1 = batch['tokens_BT1'].shape
        return [
            {
                name: jax.ShapeDtypeStruct((K, B, T1 - 1), dtype)
                for name, dtype in (
                    ('tokens_BT', jnp.int32), ('targets_BT', jnp.int32), ('mask_BT', jnp.bool_)
                )
            }
        ]  # fmt: skip

    def batches(self, seed, first_step, share=WHOLE):
        K = self.config.train.steps_per_call
        for call, batch in enumerate(super().batches(seed, first_step, share)):
            step = first_step + call * K
            tokens_KBT = batch['tokens_BT1'][..., 1:]
            calls = [self._hide(x, seed, step + k, share=share) for k, x in enumerate(tokens_KBT)]
            yield jax.tree.map(lambda *x: np.stack(x), *calls)

    def batch(self, seed, step):
        return self._hide(super().batch(seed, step)['tokens_BT1'][:, 1:], seed, step)

    def _hide(self, tokens, *numbers, share=WHOLE):
        return batches.hide_tokens(
            tokens,
            rate=self.config.data.mask_rate,
            tokenizer=self.corpus.tokenizer,
            rng=np.random.default_rng(numbers),
            share=share,
        )

    @functools.cached_property
    def _validation(self):
        # Hidden before it is cut, so that neither batch nor context decides what is.
        hidden = self._hide(np.asarray(self.corpus.validation_tokens), _OF_NO_SEED)
        windows = {
            name: batches.validation_batches(
                x,
                context_length=self.config.model.context_length,
                batch_size=self.config.eval.batch_size,
            )
            for name, x in hidden.items()
        }
        batches_N = {name: x_NBT1[..., 1:] for name, (x_NBT1, _) in windows.items()}
        counted_NBT = windows['tokens_BT'][1]
        return batches_N | {'mask_BT': (batches_N['mask_BT'] != 0) & counted_NBT}

    def validation(self):
        return [self._validation]

    def judge(self, model, params):
        (validation,) = self.validation()
        guesses_NBT = _guesses(model, params, validation['tokens_BT'])
        right_NBT = guesses_NBT == validation['targets_BT']
        return {'accuracy': float(right_NBT[validation['mask_BT']].mean())}

    def sample(self, model, params):
        """The beginning of the validation text with what is hidden in it, as guessed, and as is."""
        (validation,) = self.validation()
        first = {name: x[0, :1] for name, x in validation.items()}
        (guesses_T,) = _guesses(model, params, first['tokens_BT'][None])[0]
        tokens_T, targets_T = first['tokens_BT'][0], first['targets_BT'][0]
        hidden_T = first['mask_BT'][0] & (tokens_T == self.corpus.tokenizer.mask_id)
        decode = self.corpus.tokenizer.decode
        shown = ''.join(
            '▢' if hidden else decode([token])
            for token, hidden in zip(tokens_T, hidden_T, strict=True)
        )
        guessed = decode(np.where(hidden_T, guesses_T, targets_T))
        return f'{shown}\n→ {guessed}\n= {decode(targets_T)}'

    def first_text(self, batch):
        return self.corpus.tokenizer.decode(batch['targets_BT'][0])

    def columns(self, val_loss):
        del val_loss
        return {}


class ClassifyImages:
    """The classes of images: `model.family` image. See `ContinueText`."""

    losses = staticmethod(steps.image_losses)
    load = staticmethod(images.load_images)
    judged = ('accuracy',)

    def __init__(self, config, corpus):
        self.config, self.corpus = config, corpus

    def check(self, mesh):
        tokenizer, length = self.corpus.tokenizer, self.config.model.context_length
        if length != tokenizer.num_patches:
            raise ConfigError(
                f'model.context_length={length}: images of {tokenizer.height} × {tokenizer.width} '
                f'pixels have {tokenizer.num_patches} patches of data.patch_size='
                f'{tokenizer.patch_size}; set it to that'
            )
        self.check_batches(mesh)

    def check_batches(self, mesh):
        _check_batch_sizes(self.config, mesh)

    def abstract_batches(self):
        K, B = self.config.train.steps_per_call, self.config.data.batch_size
        patch = self.corpus.tokenizer.num_patches, self.corpus.tokenizer.vocab_size[0]
        return [
            {
                'patches_BTP': jax.ShapeDtypeStruct((K, B, *patch), jnp.float32),
                'labels_B': jax.ShapeDtypeStruct((K, B), jnp.int32),
            }
        ]

    def batches(self, seed, first_step, share=WHOLE):
        return images.training_images(
            self.corpus.train,
            batch_size=self.config.data.batch_size,
            seed=seed,
            steps_per_call=self.config.train.steps_per_call,
            first_step=first_step,
            share=share,
        )

    def batch(self, seed, step):
        return images.training_image_batch(
            self.corpus.train, batch_size=self.config.data.batch_size, seed=seed, step=step
        )

    def validation(self):
        return [
            images.validation_images(self.corpus.validation, batch_size=self.config.eval.batch_size)
        ]

    def judge(self, model, params):
        (validation,) = self.validation()
        right_NB = _guesses(model, params, validation['patches_BTP']) == validation['labels_B']
        return {'accuracy': float(right_NB[validation['mask_B']].mean())}

    def sample(self, model, params):
        """Some images of validation: those that are taken for another class come first."""
        patches_BTP, labels_B = (self.corpus.validation[x] for x in ('patches_BTP', 'labels_B'))
        (guesses_B,) = _guesses(model, params, patches_BTP[None])
        # Those that it gets wrong first: they are the ones to look at.
        shown = np.argsort(guesses_B == labels_B, stable=True)[:_SHOWN]
        wrong = int((guesses_B != labels_B).sum())
        title = f'{wrong} of {len(labels_B)} images of validation are taken for another class.'
        return '\n\n'.join(
            [title]
            + [f'{self._drawn(patches_BTP[b])}\n→ {guesses_B[b]}, is {labels_B[b]}' for b in shown]
        )

    def _drawn(self, patches_TP):
        (image,) = self.corpus.tokenizer.decode(patches_TP[None])
        shades = ' .:-=+*#%@'
        levels = image.astype(int) * (len(shades) - 1) // self.corpus.tokenizer.white
        return '\n'.join(''.join(2 * shades[x] for x in row) for row in levels)

    def first_text(self, batch):
        return f'an image of the class {int(batch["labels_B"][0])}'

    @property
    def output_size(self):
        """Of P values in and C classes out, what falls to one patch: for `flops_per_token`."""
        patch, classes = self.corpus.tokenizer.vocab_size
        return patch + classes / self.corpus.tokenizer.num_patches

    def tokens_per_step(self):
        """Patches of a step."""
        return self.config.data.batch_size * self.config.model.context_length

    def columns(self, val_loss):
        del val_loss
        return {'val_perplexity': None}  # of classes nobody speaks of it

    def describe(self):
        return ''


@functools.partial(jax.jit, static_argnums=0)
def _guesses(model, params, inputs):
    """The likeliest class at each place, of batches with a leading axis N."""
    return jax.lax.map(lambda x: nnx.merge(model, params)(x).argmax(-1), inputs)


def _check_batch_sizes(config, mesh):
    parts = config.train.accumulation_steps
    sharding.check_batch_size('data.batch_size', config.data.batch_size, mesh, parts)
    sharding.check_batch_size('eval.batch_size', config.eval.batch_size, mesh)


class TranslatePairs:
    """A target from its source: `model.family` encoder_decoder. See `ContinueText`.

    Trained by teacher forcing: each target token given those before it. Judged also by greedy
    translations of at most `eval.decoded_pairs` pairs of validation, each cut a token behind the
    longest target of its batch: the share that is exact, and BLEU, between the decoded tokens.
    """

    losses = staticmethod(steps.pair_losses)
    load = staticmethod(pairs.load_pairs)
    judged = ('exact_match', 'bleu')

    def __init__(self, config, corpus):
        self.config, self.corpus = config, corpus
        shapes = dict(
            context_length=config.model.context_length, num_buckets=config.data.num_buckets
        )
        self.buckets = pairs.make_buckets(
            corpus.train,
            **shapes,
            batch_size=config.data.batch_size,
            tokens_per_batch=config.data.tokens_per_batch,
            multiple=SHARED_BY * config.train.accumulation_steps,
            split='training',
        )
        self.validation_buckets = pairs.make_buckets(
            corpus.validation, **shapes, batch_size=config.eval.batch_size
        )

    def check(self, mesh):
        self.check_batches(mesh)

    def check_batches(self, mesh):
        parts = self.config.train.accumulation_steps
        by_tokens = self.config.data.tokens_per_batch is not None
        key = 'pairs of data.tokens_per_batch' if by_tokens else 'data.batch_size'
        for bucket in self.buckets:
            sharding.check_batch_size(key, bucket.batch_size, mesh, parts)
        sharding.check_batch_size('eval.batch_size', self.config.eval.batch_size, mesh)

    def abstract_batches(self):
        K = self.config.train.steps_per_call

        def integers(*shape):
            return jax.ShapeDtypeStruct((K, *shape), jnp.int32)

        return [
            {
                'source_BS': integers(bucket.batch_size, bucket.S),
                'source_lengths_B': integers(bucket.batch_size),
                'target_BT1': integers(bucket.batch_size, bucket.T + 1),
                'target_lengths_B': integers(bucket.batch_size),
            }
            for bucket in self.buckets
        ]

    def batches(self, seed, first_step, share=WHOLE):
        return pairs.training_pairs(
            self.corpus.train,
            self.buckets,
            seed=seed,
            steps_per_call=self.config.train.steps_per_call,
            first_step=first_step,
            share=share,
        )

    def batch(self, seed, step):
        return pairs.PairBatches(self.corpus.train, self.buckets, seed)[step]

    def validation(self):
        return pairs.validation_pairs(self.corpus.validation, self.validation_buckets)

    def judge(self, model, params):
        if not self.config.eval.decoded_pairs:
            return {}
        _, references, hypotheses = self._translate(model, params, self.config.eval.decoded_pairs)
        scores = score_translations(hypotheses, references, self.config.data.target_language)
        return {name: scores[name] for name in self.judged}

    def sample(self, model, params):
        """Some pairs of validation: the source, its greedy translation, and what is right."""
        shown = zip(*self._translate(model, params, _SHOWN), strict=True)
        return '\n'.join(f'{source}\n→ {found}\n= {right}' for source, right, found in shown)

    def _translate(self, model, params, count):
        """(sources, targets, translations) of at most `count` pairs of validation, of all lengths.

        In the batches of validation, so that training and its end share what is compiled.
        """
        rows = np.concatenate([bucket.rows for bucket in self.validation_buckets])
        chosen = rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]
        length, tokenizer = self.config.model.context_length, self.corpus.tokenizer
        texts = [], [], []
        for bucket in self.validation_buckets:
            own = dataclasses.replace(bucket, rows=bucket.rows[np.isin(bucket.rows, chosen)])
            if not len(own.rows):
                continue
            (batches_N,) = pairs.validation_pairs(self.corpus.validation, [own])
            for n in range(own.num_batches):
                batch = {name: x[n] for name, x in batches_N.items()}
                tokens_BT, lengths_B = translate_batch(model, params, batch, length, tokenizer)
                for b in np.flatnonzero(batch['target_lengths_B']):  # not the rows of padding
                    source_end, target_end = (
                        batch[name][b] for name in ('source_lengths_B', 'target_lengths_B')
                    )
                    texts[0].append(
                        tokenizer.source.decode(batch['source_BS'][b, : source_end - 1])
                    )
                    texts[1].append(tokenizer.target.decode(batch['target_BT1'][b, 1:target_end]))
                    texts[2].append(tokenizer.target.decode(tokens_BT[b, : lengths_B[b] - 1]))
        return texts

    def first_text(self, batch):
        length = int(batch['source_lengths_B'][0]) - 1
        return self.corpus.tokenizer.source.decode(batch['source_BS'][0, :length])

    @property
    def output_size(self):
        return self.corpus.tokenizer.vocab_size[1]

    def tokens_per_step(self):
        """Target tokens of a step, the mean over an epoch."""
        rows = np.concatenate([bucket.rows for bucket in self.buckets])
        steps_an_epoch = sum(bucket.num_batches for bucket in self.buckets)
        return int(self.corpus.train.target_lengths[rows].sum() / steps_an_epoch)

    def columns(self, val_loss):
        del val_loss
        return {
            'encoder_layers': self.config.model.encoder_layers,
            'padding_share': pairs.padding_share(self.corpus.train, self.buckets),
        }

    def describe(self):
        length = self.config.model.context_length
        shapes = ', '.join(f'{b.batch_size} × ({b.S} + {b.T})' for b in self.buckets)
        share = pairs.padding_share(self.corpus.train, self.buckets)
        dropped = [
            pairs.num_too_long(x, length) for x in (self.corpus.train, self.corpus.validation)
        ]
        numbers = (len(x.source_lengths) for x in (self.corpus.train, self.corpus.validation))
        text = '{:,} pairs of training, {:,} of validation; '.format(*numbers)
        text += f'batches of pairs × (source + target): {shapes}; {share:.1%} is padding'
        if any(dropped):
            text += (
                f'; left out, of more than model.context_length={length} tokens: {dropped[0]} of '
                f'training, {dropped[1]} of validation'
            )
        return text


TASKS = {
    'decoder': ContinueText,
    'encoder_decoder': TranslatePairs,
    'encoder': GuessTokens,
    'image': ClassifyImages,
}
