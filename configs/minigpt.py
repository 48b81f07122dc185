"""MiniGPT on English prose: the base that every decoder recipe builds on.

    python -m minigpt_jax.train --config=configs/minigpt.py

Trains one model of 0.8 M parameters on the documentation that comes with Python. Any value can be
changed on the command line, `--config.model.num_heads=8`, or swept (see configs/heads_sweep.py).

What the parts of the model can be, and where each comes from. (*) marks what this recipe uses.

    model.positions       learned *     Gehring et al. 2017; GPT-2 (Radford et al. 2019)
                          sinusoidal    Vaswani et al. 2017, section 3.5
                          rotary        Su et al. 2021 (RoFormer), section 3.2
                          alibi         Press et al. 2022 (ALiBi), section 3
                          relative      Shaw et al. 2018, section 3.2; keys only, clipped at 16
                          none          the causal mask alone: Haviv et al. 2022
    model.norm_placement  pre *         Xiong et al. 2020; GPT-2
                          post          Vaswani et al. 2017, section 3.1
                          sandwich      Ding et al. 2021 (CogView), section 2.4
                          deepnorm      Wang et al. 2022 (DeepNet), figure 2
                          none          no norm but those of qk_norm
    model.norm            layer *       Ba et al. 2016
                          rms           Zhang and Sennrich 2019
    model.qk_norm         False *, True Henry et al. 2020; Dehghani et al. 2023, section 2
    model.residual        True *, False He et al. 2016; False is an experiment
    model.scale_scores    True *, False Vaswani et al. 2017, section 3.2.1; False is an experiment
    model.activation      gelu *        Hendrycks and Gimpel 2016, the tanh form; GPT-2
                          relu          Vaswani et al. 2017, section 3.3
                          swiglu        Shazeer 2020; both hidden widths are d_ff
    model.attention       auto *        what is best and can run: the implementation of dot products
                          plain         all weights at once: Vaswani et al. 2017, section 3.2.1
                          blockwise     Dao et al. 2022 (FlashAttention): memory grows with the
                                        length, not its square; no dropout
                          cudnn         the same by NVIDIA's kernel, in bfloat16
                          pallas        the same by the kernel for TPUs that comes with jax
    model.attention_form  fused *       one projection, one batched product
                          per_head      Vaswani et al. 2017, section 3.2.2, as in a textbook
    model.tie_embeddings  True *, False Press and Wolf 2017
    model.use_bias        False *, True of dense layers and LayerNorm; none as in nanoGPT
    model.init            gpt2 *        N(0, 0.02²), outputs of branches / √(branches): GPT-2
                          xavier        Glorot and Bengio 2010, uniform
                          torch         U(±1/√fan_in), biases too: PyTorch's nn.Linear
                          (embedding tables are N(0, 0.02²) under each)
    model.dtype           float32 *     everything
                          bfloat16      operands of products: Kalamkar et al. 2019
    model.dropout_rate                  Srivastava et al. 2014
    model.remat           False *, True Chen et al. 2016
    model.scan_layers     False *, True the layers as one loop, the same numbers
    data.tokenizer        char *        an id for each character of the training split
                          byte          an id for each byte of UTF-8
                          sentencepiece Sennrich et al. 2016; Kudo and Richardson 2018
    data.corpus           python_docs *, text, tfds:NAME of the TFDS catalogue
    data.pack_documents   False *       a window is one text, whatever documents it runs across
                          True          attention stays within a document, whose positions start at
                                        0 and whose first token is no target: Krell et al. 2021

What a document is: a topic or a docstring (python_docs), a record (tfds:NAME), a file (text); with
data.document_separator a file of the corpus text is cut wherever that string stands, for example
--config.data.document_separator='<|endoftext|>' or, in bash, $'\\n\\n\\n'. An EOS ends each.

    optim.name            adamw *       Loshchilov and Hutter 2019
                          adam          Kingma and Ba 2015; decay as an L2 penalty
                          sgd           Polyak 1964 (momentum b1); decay as an L2 penalty
                          muon          Jordan et al. 2024, for matrices; adamw for the rest
    optim.schedule        cosine *      Loshchilov and Hutter 2017, without restarts
                          linear        to final_learning_rate at the last step
                          constant      after the warm-up
                          inverse_sqrt  Vaswani et al. 2017, section 5.3
    optim.clip_norm                     Pascanu et al. 2013
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(variant=''):
    if variant:
        raise ValueError(f'configs/minigpt.py has no variant {variant!r}; it takes none')
    c = ConfigDict()
    c.seed = 0  # drives initialisation, dropout and the order of batches

    c.data = ConfigDict()
    # python_docs, text, tfds:NAME (of the TFDS catalogue); of pairs: dates, parallel, copy,
    # reverse; of images: digits
    c.data.corpus = 'python_docs'
    c.data.path = placeholder(str)  # text: file(s), UTF-8; parallel: a directory or two files
    c.data.document_separator = placeholder(str)  # text: ends a document; None: a file is one
    c.data.pack_documents = False  # decoder: attention stays within a document
    c.data.tokenizer = 'char'  # char, byte, sentencepiece
    c.data.vocab_size = placeholder(int)  # ids, for sentencepiece alone; None: 4096
    c.data.joint_vocabulary = False  # pairs: one tokenizer for source and target
    c.data.source_language = 'en'  # pairs: CLDR locale (dates), ending of file names (parallel)
    c.data.target_language = 'ko'
    c.data.batch_size = 16  # sequences, pairs or images a step
    c.data.tokens_per_batch = placeholder(int)  # pairs: instead of batch_size, padding included
    c.data.num_buckets = 1  # pairs: shapes of batches, by length
    c.data.mask_rate = 0.15  # encoder: share of the tokens to guess
    c.data.patch_size = 2  # image: pixels on a side of a patch
    # Share of the characters held out; a corpus tfds:NAME may bring a validation split of its own.
    c.data.validation_fraction = 0.1

    c.model = ConfigDict()
    c.model.family = 'decoder'  # decoder, encoder_decoder, encoder, image
    c.model.d_model = 128  # width of the residual stream
    c.model.num_heads = 4  # must divide d_model
    c.model.d_ff = placeholder(int)  # feed-forward hidden width; None: 4 · d_model
    c.model.num_layers = 4  # blocks, of the decoder where there are two stacks
    c.model.encoder_layers = placeholder(int)  # encoder_decoder; None: num_layers
    # tokens; of source and of target, each with its EOS; patches of an image
    c.model.context_length = 64
    c.model.norm_placement = 'pre'  # pre, post, sandwich, deepnorm, none
    c.model.norm = 'layer'  # layer, rms; of all norms that there are
    c.model.qk_norm = False  # also norm each query and key, over its d_head dimensions
    c.model.residual = True  # False: branches stand alone, y in the place of x + y
    c.model.scale_scores = True  # False: scores are not divided by √d_head
    c.model.positions = 'learned'  # learned, sinusoidal, rotary, alibi, relative, none
    c.model.activation = 'gelu'  # gelu, relu, swiglu
    c.model.attention_form = 'fused'  # fused, per_head: the same function, fast or as in a textbook
    c.model.attention = 'auto'  # auto, plain, blockwise, cudnn, pallas: one function
    c.model.dropout_rate = 0.0  # of attention weights, branch outputs and embeddings
    c.model.tie_embeddings = True  # the output layer is the embedding table
    c.model.joint_embeddings = False  # encoder_decoder: one table for source and target
    c.model.use_bias = False  # biases of dense layers and norms
    c.model.init = 'gpt2'  # gpt2, xavier, torch: how dense layers start
    c.model.dtype = 'float32'  # float32, bfloat16: operands of products; all else is float32
    c.model.remat = False  # compute each block again in the backward pass, to save memory
    c.model.scan_layers = False  # layers as a loop: compiles faster, runs slower on a CPU

    c.optim = ConfigDict()
    c.optim.name = 'adamw'  # adamw, adam, sgd, muon
    c.optim.learning_rate = 2e-3  # peak, reached at the end of the warm-up
    c.optim.schedule = 'cosine'  # cosine, linear, constant, inverse_sqrt
    c.optim.warmup_steps = 100  # steps from a rate of 0 to the peak
    c.optim.final_learning_rate = 2e-4  # at the end; cosine and linear
    c.optim.b1 = 0.9  # sgd: momentum; the matrices of muon have 0.95
    c.optim.b2 = 0.99  # adamw, adam, muon (of what is no matrix)
    c.optim.weight_decay = 0.1  # adamw, muon: apart from the gradient; adam, sgd: an L2 penalty
    c.optim.clip_norm = 1.0  # global gradient norm; 0: off
    # (path pattern, setting, factor): here, no decay of biases and of the scales of norms.
    c.optim.rules = (('.*(bias|scale)', 'weight_decay', 0.0),)

    c.train = ConfigDict()
    c.train.steps = 2000  # optimizer updates
    c.train.steps_per_call = 20  # steps in one dispatch; all intervals are multiples of it
    c.train.seeds = 'auto'  # auto, separate, map, vmap: how the seeds of a point train together
    c.train.accumulation_steps = 1  # parts of a batch, one after the other, to save memory
    c.train.label_smoothing = 0.0  # share of the target that goes to all tokens alike
    c.train.log_every = 20  # steps
    c.train.log_layer_norms = False  # also log the gradient norm of every layer
    c.train.checkpoint_every = 500  # steps
    c.train.keep = 2  # checkpoints

    c.eval = ConfigDict()
    c.eval.every = 500  # steps
    c.eval.batch_size = 16  # sequences at once; does not change the result
    c.eval.decoded_pairs = 500  # pairs: decoded to count exact matches, spread over the split
    c.eval.sample_prompt = placeholder(str)  # None: the first words of the validation text
    c.eval.sample_tokens = 300  # generated when training ends

    c.mesh = ConfigDict()
    # Devices along each axis; -1, of one axis alone: what the others leave.
    c.mesh.data = -1  # share the rows of a batch
    c.mesh.fsdp = 1  # share them too, and split parameters and optimizer state
    c.mesh.tensor = 1  # split heads, hidden widths and vocabularies
    c.mesh.seed = 1  # train seeds of their own
    # What a dimension that the devices do not divide is: replicate (whole on each of them, as the
    # printed table says), refuse
    c.mesh.uneven = 'replicate'

    c.sweep = ()  # axes: (('model.num_heads', (1, 2, 4)), ('seed', (0, 1, 2)))
    return c
