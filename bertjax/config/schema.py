# SPDX-License-Identifier: Apache-2.0
"""Every config key and its default."""

import dataclasses
from typing import Any

from ml_collections.config_dict import ConfigDict, placeholder

from bertjax.config.durations import Section, duration
from bertjax.models.config import EncoderConfig


def base() -> ConfigDict:
    """Return every config key with its default; configs/*.py change what differs.

    The functions below return the larger sections.
    """
    config = Section(
        dict(
            seed=0,
            objective="mlm",  # or mlm+sop, electra:generator=0.5, mlm+mine.module
            batch_size=256,  # sequences per step, over all devices and micro-batches
            accumulate=1,  # micro-batches per step
            steps_per_call=1,  # updates that the devices make per call from the host
            # Type of the computation. auto: float32 on a CPU, otherwise bfloat16; fast:
            # bfloat16 also on a CPU that has instructions for it.
            dtype="auto",
            # Parameters to start from: a run's workdir or a Hugging Face directory.
            init_from="",
            # Layers to take from a deeper init_from or, without one, from the teacher:
            # even (for 6 of 12: 0,2,4,7,9,11), or layer numbers with commas.
            init_layers="",
            # The teacher of mlm+distil, minilm or a task: a workdir or a Hugging Face
            # directory (docs/distillation.md).
            teacher="",
            deterministic=False,  # on GPU: bit-identical repetition, at a cost in speed
            total=duration(steps=100_000),
            budget_minutes=placeholder(float),  # train this long; the schedule follows
            budget_clock="wall",  # or cpu: processor time, summed over all cores
            # Changes of length, batch size or mask rate (bertjax/data/phases.py):
            # "percent=90 length=128; length=512 batch_size=64 mask_rate=0.15"
            phases="",
            model=model_keys(),
            data=data_keys(),
            task=task_keys(),
            optim=optim_keys(),
            # Devices along each mesh axis; -1: all that remain.
            mesh=dict(data=-1, fsdp=1, tensor=1),
            # With --multihost: end this process after so many seconds without a sign of
            # life from another host, or without a finished step. It waits longer if
            # steps take long or none has been timed yet (bertjax/parallel/watch.py).
            hosts=dict(timeout=120.0),
            log=dict(every=duration(steps=50), writers="jsonl,tensorboard"),
            # Trace `steps` updates, beginning after `start` updates; 0: no trace.
            profile=dict(start=10, steps=0),
            eval=dict(
                every=duration(percent=10),
                examples=2048,  # a fixed subset of each validation set; 0: all
                mask_rate=placeholder(float),  # empty: data.mask_rate, or the preset's
                ema=True,  # score, and later load, the moving average if there is one
                # Keep the checkpoint that is best by this score: accuracy, or
                # eval/SET/METRIC; auto: a task's first metric, otherwise the loss.
                best="",
                # evaluations without a better one to stop after
                patience=placeholder(int),
            ),
            # How to treat updates that could ruin a run (docs/training.md).
            guard=dict(
                nonfinite="skip",  # update with a non-finite loss or gradient; or stop
                factor=0.0,  # skip gradients so many times their mean norm; 0: off
                patience=10,  # skips in a row before going back to a checkpoint
                rewinds=3,  # times the run may go back before it ends
            ),
            checkpoint=dict(
                every=duration(percent=5),
                keep_last=2,
                keep_every=placeholder(int),  # also keep steps divisible by this
            ),
        )
    )
    for name in ("optim", "log", "eval", "checkpoint"):  # those with durations
        config[name] = Section(config[name])
    return config


def model_keys() -> dict[str, Any]:
    """Return the encoder's keys; an empty one is set by model.family and model.size."""
    return dict(
        family="bert",
        size="base",
        **{
            f.name: placeholder(f.type)
            for f in dataclasses.fields(EncoderConfig)
            if f.name not in ("dtype", "pooler")
        },
    )


def data_keys() -> dict[str, Any]:
    """Return the keys of text, tokenizer, rows and masks (docs/data.md)."""
    return dict(
        # Files, globs, tfds:name:split or builtin:docs, with commas. Components of a
        # mixture have names: wiki=a.txt,novels=b.txt or *=langs/*.txt
        train="",
        valid="",  # in the same form; the names are those of the validation sets
        # Triples: files with names and texts of entities and relations, as id, name and
        # text.
        entities="",
        text_field="text",  # the text's field in JSON lines, tables, Parquet, tfds
        group_field="",  # field (language, domain) that splits text into components
        entity_field="",  # field with a list of names, for mask_unit=entity
        # JSON lines of code: the field with a path or a language (docs/code.md).
        code_field="",
        # Fields of JSON lines with a value per sentence or per range of characters; the
        # given number of most common values get ids: speaker,type:50000 (docs/data.md).
        streams="",
        # Words of the concept that concept heads and mask_unit=concept use, and of a
        # control concept: a file, words:good,bad, pos:a,ad (parts of speech, by
        # data.segmenter), or entities.
        concept="",
        control="",
        segmenter="",  # splits Chinese text into words: jieba, or jieba:DICTIONARY
        weights="",  # sampling weights of the components: wiki=3,novels=1
        alpha=placeholder(float),  # or shares ~ size^alpha; XLM-R: 0.3
        # The same for a trained tokenizer's sample; empty: as weights or alpha.
        vocab_alpha=placeholder(float),
        cache="~/.cache/bertjax",  # directory of the token stores
        vocab="",  # empty: train one; ids:N: the text is integers below N
        vocab_size=32_768,  # of a trained vocabulary
        tokenizer="unigram",  # type of a trained one; or bpe, wordpiece, byte_bpe
        # Sentinels <extra_id_0>, ... to add to a vocabulary that has none (T5: 100).
        extra_ids=0,
        # Empty: as the tokenizer's files say; trained ones lower-case, except byte_bpe.
        lower_case=placeholder(bool),
        length=128,
        engine="tf",  # or python: the same batches without TensorFlow
        # or full_sentences, doc_sentences, sentence_starts, document, turns
        plan="pairs",
        # plan=turns: slots per answer, special tokens included; empty:
        # max(length / 8, min(32, length / 2)).
        target_length=placeholder(int),
        short_seq_prob=0.1,  # plan=pairs: share of chunks with short targets
        packed=False,  # several sequences per row, which do not attend to each other
        max_segments=placeholder(int),  # per row; empty: max(4, length / 16)
        # A preset (bert roberta albert electra distilbert spanbert macbert), which
        # the keys below refine; or your own module with make_masker,
        # my.module:rate=0.2 (docs/add_a_masker.md).
        masking="bert",
        mask_rate=placeholder(object),  # 0.15, or a ramp over a phase: 0.3:0.15
        mask_unit=placeholder(str),  # token, word, ngram, span, entity, concept
        # Shares of 1, 2, ... units masked together: 0.4,0.3,0.2,0.1 or geometric:0.2:10
        mask_lengths=placeholder(str),
        corruption=placeholder(str),  # shares of mask, random, keep: 0.8,0.1,0.1
        replacement=placeholder(str),  # how random tokens are drawn: uniform, unigram
        # File of similar words for macbert (prepare --similar writes it), or none.
        similar="",
        swap="",  # file of pairs of words to exchange in half of the rows
        # File of weights for choosing pieces (evaluate --mask_weights writes it).
        mask_weights="",
        # Slots for masked tokens in a row; empty: ceil(rate * length), or the preset's.
        max_predictions=placeholder(int),
        # objective=denoise: the corruptions of a text, in order (docs/data.md); empty:
        # BART's, permute,infill:poisson:3.5:0.3:0.1.
        noise="",
        paper_compat=False,  # treat special tokens as the official code does
        max_line_bytes=64 * 2**20,
    )


def task_keys() -> dict[str, Any]:
    """Return the keys of finetuning: a task of bertjax/tasks/catalog.py, or columns."""
    return dict(
        name="",
        text="",
        text_pair="",
        choices="",  # multiple choice: a column per choice, or one with a list
        label="",
        target="",  # seq2seq: the column of the texts to write
        labels="",  # class names, in order; empty: those of the training rows
        metrics="",  # accuracy, f1, ... (bertjax/tasks/metrics.py)
        # retrieve, splade, colbert: scores are divided by this before the softmax (0.05
        # suits cosines, 1 the other two).
        temperature=0.05,
        # At most so many of a query's listed negatives are in a row.
        negatives=1,
        # Share of margin MSE against a teacher's scores (column scores) in the loss.
        margin_weight=0.0,
        # Encode a batch in this many parts, one after the other, to save memory.
        chunks=1,
        # retrieve: how a text becomes a vector.
        pooling="mean",  # mean over all tokens, or cls: the first token
        normalize=True,
        widths="",  # 32,64: also train the first 32 and 64 numbers of a vector
        # splade: factors of the FLOPS regularizer, which drives weights to 0, and the
        # number of weights kept per text.
        query_flops=5e-5,
        passage_flops=3e-5,
        active=256,
        embedding_size=128,  # colbert: numbers per token vector
        # Passages per query that an evaluation orders (rerank) or reads (read).
        candidates=10,
        # read, rag: passages per question in a row. index: a directory of bertjax.embed
        # --index, whose vectors score the passages, so that the retriever trains too;
        # empty: passages keep the scores of the file, and the retriever does not train.
        passages=5,
        index="",
        # rag: one passage explains a whole target (sequence) or each token (token).
        marginal="sequence",
        # span: pieces between the starts of successive rows of a context;
        # span, read: pieces of the longest question (longer ones are cut) and
        # of the longest answer returned.
        stride=128,
        question_length=64,
        answer_length=30,  # 64 suits CMRC, whose answers are longer
        # seq2seq: pieces of the longest target (longer ones are cut). Texts are written
        # by beam search; one beam is greedy.
        target_length=64,
        num_beams=1,
        length_penalty=1.0,
        # complete: the most relations in a path; 1: triples alone. answers: with N > 1
        # a question appears once per epoch for every N of its right answers, and weighs
        # as much as their triples; with 1 it appears once per triple.
        paths=1,
        answers=1,
        # mlmlm: whether the text about an entity follows its name; how many pieces of
        # that text complete an answer whose name other entities share; whether padding
        # after a short answer is predicted and scored.
        descriptions=True,
        disambiguate=0,
        pads=False,
        # regions (docs/regions.md): the column with an image's regions, which are lists
        # of objects or an npz file; the most regions per image (more are cut); for npz
        # files the width of a feature and the number of classes (0: none).
        regions="",
        max_regions=36,
        region_size=2048,
        region_classes=0,
        # Shares of rows with masked words, with masked regions, and of text-image
        # pairs, half of which are mismatched.
        region_mixture="words=2,regions=2,pairs=2",
        region_mask_rate=0.15,
        hide_regions=False,  # use the text alone, to measure what regions add
        # Groups of masked words to score separately:
        # number:one|two|three,shape:circle|square
        word_groups="",
    )


POWERS = {"wsd": 0.5}  # Schedule -> default of optim.power; for all others 1


def power_in_effect(schedule: str, power: float | None) -> float:
    """Return optim.power, or the schedule's default if it is None."""
    return POWERS.get(schedule, 1.0) if power is None else power


def optim_keys() -> dict[str, Any]:
    """Return the keys of the optimizer and of its learning-rate schedule."""
    return dict(
        name="adamw",  # or lamb, stableadamw, adafactor, muon, normuon, adamuon
        lr=1e-4,
        # Multipliers of lr by parameter group:
        # embeddings:0.3,heads:0.5,vectors:1,kernels:1
        rates="",
        wd=0.01,
        cautious_decay=False,  # decay only where the update also moves toward 0
        b1=0.9,
        b2=0.999,
        eps=1e-6,
        bias_correction=True,  # adamw and lamb; False: as in Google's BERT
        # Type in which Muon's family orthogonalizes: float32, bfloat16 or fast.
        ns_dtype="float32",
        clip=1.0,  # the largest global gradient norm; 0: no clipping
        # Parameters not to train: patterns of whole paths, with commas; [:N] selects
        # the first N layers or rows: encoder/embeddings/.*,encoder/layers/.*[:6]
        freeze="",
        # Parameters in which zeros stay zeros, such as those of a pruned model:
        # patterns of whole paths, with commas: encoder/layers/.*kernel
        keep_zeros="",
        layer_decay=1.0,  # factor of the rate per layer toward the embeddings
        warmup=duration(percent=1),
        schedule="linear",  # to 0; or polynomial, cosine, wsd, constant
        power=placeholder(float),  # exponent of polynomial (1) and of wsd's decay (0.5)
        decay=duration(percent=10),  # wsd: length of the final decay
        ema=0.0,  # decay of the parameters' moving average; 0: none
        # Or average all updates of the last part of the run with equal weight; 0: none.
        average=duration(percent=0),
    )
