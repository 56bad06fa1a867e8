# SPDX-License-Identifier: Apache-2.0
"""Every config key and its default."""

import dataclasses
from typing import Any

from ml_collections.config_dict import ConfigDict, placeholder

from bertjax.config.durations import duration
from bertjax.models.config import EncoderConfig


def base() -> ConfigDict:
    """Return every key a config has, with defaults; configs/*.py change what differs.

    A section that is not written out is a function below.
    """
    return ConfigDict(
        dict(
            seed=0,
            objective="mlm",  # or mlm+sop, electra:generator=0.5, mlm+mine.module
            batch_size=256,  # sequences a step, over all devices and accumulation
            accumulate=1,  # micro-batches a step
            steps_per_call=1,  # updates the devices make at one call of the host
            # Of the computation. auto: float32 on CPU, else bfloat16; fast: bfloat16 on
            # a CPU too, if it has instructions for it.
            dtype="auto",
            init_from="",  # parameters: another run's workdir, or Hugging Face's
            # Of a deeper init_from, or else of the teacher, the layers that are taken:
            # even (of 12, for 6: 0,2,4,7,9,11), or their numbers.
            init_layers="",
            # The model that mlm+distil, minilm or a task learn from: a workdir, or
            # Hugging Face's (docs/distillation.md).
            teacher="",
            deterministic=False,  # on GPU: bit-equal repetition, at a cost in speed
            total=duration(steps=100_000),
            budget_minutes=placeholder(float),  # of training: the schedule follows it
            budget_clock="wall",  # or cpu: minutes of processor time, of all cores
            # Length, batch size, mask rate over time (bertjax/data/phases.py), e.g.
            # "percent=90 length=128; length=512 batch_size=64 mask_rate=0.15"
            phases="",
            model=model_keys(),
            data=data_keys(),
            task=task_keys(),
            optim=optim_keys(),
            mesh=dict(data=-1, fsdp=1, tensor=1),
            # With --multihost: seconds without a sign of life of a host, or without
            # a call of the devices, after which the others end: more where calls are
            # seen to be long, or none was timed yet (bertjax/parallel/watch.py).
            hosts=dict(timeout=120.0),
            log=dict(every=duration(steps=50), writers="jsonl,tensorboard"),
            # A trace of `steps` updates, after `start` of them; 0: none.
            profile=dict(start=10, steps=0),
            eval=dict(
                every=duration(percent=10),
                examples=2048,  # a fixed subset of each validation set; 0: all
                mask_rate=placeholder(float),  # empty: data.mask_rate's or the preset's
                ema=True,  # score, and use later, the moving average where there is one
                # Keep the checkpoint that is best by this score: accuracy, or
                # eval/SET/METRIC; auto: a task's first metric, else the loss
                best="",
                patience=placeholder(int),  # evaluations without a better one: the end
            ),
            # Updates that could ruin a run (docs/training.md).
            guard=dict(
                nonfinite="skip",  # a loss or gradient that is not finite; stop: end
                factor=0.0,  # skip gradients so many times larger than of late; 0: none
                patience=10,  # skipped in a row, before going back to a checkpoint
                rewinds=3,  # then the run ends
            ),
            checkpoint=dict(
                every=duration(percent=5),
                keep_last=2,
                keep_every=placeholder(int),  # every m-th step is kept for ever
            ),
        )
    )


def model_keys() -> dict[str, Any]:
    """Hugging Face's names; what is empty follows family and size."""
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
    """Text, tokenizer, rows and masks (docs/data.md)."""
    return dict(
        # Files, globs, tfds:name:split, builtin:docs, with commas; components
        # of a mixture have names: wiki=a.txt,novels=b.txt or *=langs/*.txt
        train="",
        valid="",  # the same; names are those of the validation sets
        # Of triples: files of what entities and relations are called (id, name, text).
        entities="",
        text_field="text",  # of JSON lines, tables, Parquet, tfds
        group_field="",  # the field (language, domain) that parts a text
        entity_field="",  # the field with a list of names, for mask_unit=entity
        # Of JSON lines of code: the field with a path or a language (docs/code.md).
        code_field="",
        # Fields of JSON lines with a value a sentence, or values of ranges of the text,
        # the commonest of which have ids: speaker,type:50000 (docs/data.md).
        streams="",
        # Words that concept heads and mask_unit=concept are about, and a control's:
        # a file, words:good,bad, pos:a,ad (of data.segmenter), or entities.
        concept="",
        control="",
        segmenter="",  # of words in Chinese: jieba, or jieba:DICTIONARY
        weights="",  # of the components in the batches: wiki=3,novels=1
        alpha=placeholder(float),  # or shares ~ size^alpha; 0.3: XLM-R
        # Of a trained tokenizer's sample; empty: as weights or alpha.
        vocab_alpha=placeholder(float),
        cache="~/.cache/bertjax",  # where token stores lie
        vocab="",  # empty: one is trained; ids:N for integers
        vocab_size=32_768,  # of a trained one
        tokenizer="unigram",  # of a trained one: or bpe, wordpiece, byte_bpe
        # Sentinels <extra_id_0>, ... behind a vocabulary that has none (T5: 100).
        extra_ids=0,
        # Empty: what the tokenizer's files say; True of a trained one, but byte_bpe.
        lower_case=placeholder(bool),
        length=128,
        engine="tf",  # or python: the same batches without TensorFlow
        plan="pairs",  # or full_sentences, doc_sentences, document, turns
        # Of turns: slots of an answer, special tokens included; empty: length / 8, and
        # 32 at least where half a row has them.
        target_length=placeholder(int),
        short_seq_prob=0.1,  # pairs: share of chunks with short targets
        packed=False,  # several sequences a row, which do not see each other
        max_segments=placeholder(int),  # a row; empty: max(4, length / 16)
        # A preset: bert roberta albert electra distilbert spanbert macbert,
        # refined by the next keys; or a module of one's own with make_masker,
        # my.module:rate=0.2 (docs/add_a_masker.md).
        masking="bert",
        mask_rate=placeholder(object),  # 0.15, or a ramp over a phase: 0.3:0.15
        mask_unit=placeholder(str),  # token, word, ngram, span, entity, concept
        # Law of the units' lengths: 0.4,0.3,0.2,0.1 or geometric:0.2:10
        mask_lengths=placeholder(str),
        corruption=placeholder(str),  # of mask, random, keep: 0.8,0.1,0.1
        replacement=placeholder(str),  # uniform, unigram
        # File of similar words, which macbert puts in (prepare --similar); or none.
        similar="",
        swap="",  # file of pairs of words, which change places in half of the rows
        # File of pieces' weights, by which they are chosen (evaluate --mask_weights).
        mask_weights="",
        max_predictions=placeholder(int),  # empty: the preset's
        # Of objective=denoise: what is done to a text, one after the other, such as
        # permute,infill:poisson:3.5:0.3 (docs/data.md); empty: these.
        noise="",
        paper_compat=False,  # the official code's quirks with special tokens
        max_line_bytes=64 * 2**20,
    )


def task_keys() -> dict[str, Any]:
    """Finetuning: a task of bertjax/tasks/catalog.py by name, or columns of tables."""
    return dict(
        name="",
        text="",
        text_pair="",
        choices="",  # of multiple choice: a column each, or one with a list
        label="",
        target="",  # of seq2seq: the texts that are learnt
        labels="",  # of classes, in order; empty: found in the training rows
        metrics="",  # accuracy, f1, ... (bertjax/tasks/metrics.py)
        # Of retrieve, splade and colbert: what divides the scores of the softmax (0.05
        # suits cosines, 1 the other two); given negatives of a query in a row, at most.
        temperature=0.05,
        negatives=1,
        # The share of a teacher's margins in the loss (column scores): margin MSE.
        margin_weight=0.0,
        # Parts of a batch that are encoded one after the other, to save memory.
        chunks=1,
        # Of retrieve: vectors of texts.
        pooling="mean",  # of all tokens, or cls: the first one
        normalize=True,
        widths="",  # learnt too: the first 32 and 64 numbers of a vector, 32,64
        # Of splade: factors of the regulariser that makes weights 0, and how many
        # weights of a text are kept.
        query_flops=5e-5,
        passage_flops=3e-5,
        active=256,
        embedding_size=128,  # of colbert: numbers of a token's vector
        # Of rerank, and read: passages that an evaluation puts in order, or reads.
        candidates=10,
        # Of read: passages of a question in a row; the index (bertjax.embed --index)
        # whose vectors score them, so that the vectors of questions are learnt. Empty:
        # they have the scores of the file, and what finds them stays as it is.
        passages=5,
        index="",
        # Of rag: whether a target is of one passage, or each token of any: sequence or
        # token.
        marginal="sequence",
        # Of span, in pieces: from one row of a context to the next; of span and read:
        # the longest question (the rest is cut), the longest answer that is given.
        stride=128,
        question_length=64,
        answer_length=30,  # CMRC's are longer: 64
        # Of seq2seq, in pieces: the longest target (the rest is cut); how texts are
        # written: the likeliest token each time, or so many beams.
        target_length=64,
        num_beams=1,
        length_penalty=1.0,
        # Of complete: relations of a path at most; 1: triples alone. answers: above 1
        # each question is learnt once an epoch for every so many of its right answers,
        # and weighs as their triples; 1: once a triple.
        paths=1,
        answers=1,
        # Of mlmlm: whether the text about an entity is read behind its name; how many
        # pieces of it belong to an answer whose name others have too; whether padding
        # behind a short answer is predicted, and counts.
        descriptions=True,
        disambiguate=0,
        pads=False,
        # Of regions (docs/regions.md): the column of an image's regions, lists of
        # objects or an npz file; the most of an image, more are cut; of npz files the
        # width of a feature, and classes, if there are any.
        regions="",
        max_regions=36,
        region_size=2048,
        region_classes=0,
        # Shares of rows of which words are masked, or regions, or which are pairs of
        # text and image, half of them of two rows.
        region_mixture="words=2,regions=2,pairs=2",
        region_mask_rate=0.15,
        hide_regions=False,  # text alone: what regions are worth is the difference
        # Masked words that are scored apart: number:one|two|three,shape:circle|square
        word_groups="",
    )


POWERS = {"wsd": 0.5}  # Schedule -> optim.power where it is empty; of others 1


def power_in_effect(schedule: str, power: float | None) -> float:
    """Return what optim.power is for a schedule."""
    return POWERS.get(schedule, 1.0) if power is None else power


def optim_keys() -> dict[str, Any]:
    """The optimizer and the schedule of its learning rate."""
    return dict(
        name="adamw",  # lamb, stableadamw, adafactor, muon, normuon, adamuon
        lr=1e-4,
        # Multipliers of it: embeddings:0.3,heads:0.5,vectors:1,kernels:1
        rates="",
        wd=0.01,
        cautious_decay=False,  # decay only where the update moves towards 0 too
        b1=0.9,
        b2=0.999,
        eps=1e-6,
        bias_correction=True,  # of adamw and lamb; False: Google's BERT
        # In which Muon's family makes updates orthogonal: float32, bfloat16 or fast.
        ns_dtype="float32",
        clip=1.0,  # global norm; 0: none
        # What is not trained: patterns of whole paths, with commas; [:N] of layers or
        # rows the first N: encoder/embeddings/.*,encoder/layers/.*[:6]
        freeze="",
        # Of which weights that are 0 stay 0, such as those of a pruned model: patterns
        # of whole paths, with commas: encoder/layers/.*kernel
        keep_zeros="",
        layer_decay=1.0,  # of the rate, a layer towards the embeddings
        warmup=duration(percent=1),
        schedule="linear",  # to 0; polynomial, cosine, wsd; or constant
        power=placeholder(float),  # of polynomial, 1, and of wsd's decay, 0.5
        decay=duration(percent=10),  # of wsd, before the end
        ema=0.0,  # decay of the parameters' moving average; 0: none
        # Or of the last part of the run, each update's parameters alike; 0: none
        average=duration(percent=0),
    )
