#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve an export of `bertjax.convert --format=onnx` or `--format=stablehlo` over HTTP.

    python launch/serve.py --model=DIR [--port=8000]
    curl -d '{"texts": ["The capital of France is [MASK]."]}' localhost:8000/predict

This file does not need bertjax: copy it. It needs numpy, tokenizers, and onnxruntime or
jax. Texts are a list of strings, or of pairs of strings: premise and hypothesis,
question and context. Answers come in the same order. Waiting requests share a batch.
"""

import argparse
import contextlib
import json
import os
import pathlib
import queue
import re
import signal
import sys
import threading
import traceback
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from tokenizers import Tokenizer

LARGEST = 1 << 20  # bytes of a request
TOP = 5  # guesses per blank
LONGEST = 30  # pieces of an answer, if the card does not say
HALVES = re.compile("[\ud800-\udfff]")  # surrogates, which JSON can contain


# ---------------------------------------------------------------- the two formats
def load_stablehlo(folder):
    """Return (card, run); run(input_ids=..., ...) pads to the next larger program."""
    import jax

    folder = pathlib.Path(folder)
    card = json.loads((folder / "card.json").read_text("utf-8"))
    data = np.memmap(folder / card["weights"], np.uint8, "r")
    begin = 8 + int(data[:8].view("<u8")[0])  # where numbers begin, after their names
    weights, known = {}, {}
    for name, about in json.loads(data[8:begin].tobytes()).items():
        if name != "__metadata__":
            a, b = (begin + offset for offset in about["data_offsets"])
            numbers = data[a:b].view("<f4").reshape(about["shape"])
            weights[name] = jax.device_put(numbers)

    def run(**batch):
        rows, length = batch["input_ids"].shape
        for p in card["programs"]:
            file, b, n = p["file"], p["batch_size"] - rows, p["length"] - length
            if b >= 0 and n >= 0:
                break
        else:
            raise ValueError(f"no program takes {rows} texts of {length} tokens")
        if file not in known:
            stored = bytearray((folder / file).read_bytes())
            known[file] = jax.jit(jax.export.deserialize(stored).call)
        given = {}
        for name in card["inputs"]:
            wide = 0 if name == "mlm_positions" else n
            given[name] = np.pad(np.int32(batch[name]), [(0, b), (0, wide)])
        found = known[file](weights, given)
        return {name: np.asarray(x)[:rows] for name, x in found.items()}

    return card, run


def check_programs(folder, card):
    """Read all programs, which a service otherwise does at the first request."""
    import jax

    for program in card["programs"]:
        with reading(program["file"]):
            stored = bytearray((folder / program["file"]).read_bytes())
            jax.export.deserialize(stored)


def load_onnx(folder, threads=0):
    """Return (card, run); run(input_ids=..., ...) accepts any shape."""
    import onnxruntime

    card = json.loads((folder / "card.json").read_text("utf-8"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        str(folder / card["file"]), options, providers=["CPUExecutionProvider"]
    )
    # Nothing here uses hidden states; programs for vectors have an output for them.
    wanted = [name for name in card["outputs"] if name != "last_hidden_state"]

    def run(**batch):
        given = {name: np.asarray(batch[name], np.int64) for name in card["inputs"]}
        return dict(zip(wanted, session.run(wanted, given), strict=True))

    return card, run


class Unreadable(Exception):
    """A file of the directory cannot be read; the message names it."""


@contextlib.contextmanager
def reading(name):
    """Raise Unreadable for any error."""
    try:
        yield
    except Exception as error:
        raise Unreadable(f"{name}: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------- texts and answers
class Server:
    """Answer texts in batches: one thread takes all that wait, up to `most` at once."""

    def __init__(self, folder, most, threads):
        with reading("card.json"):
            card = json.loads((folder / "card.json").read_text("utf-8"))
            if card["format"] not in ("onnx", "stablehlo"):
                raise ValueError(f"format={card['format']} is unknown here")
        if card["format"] == "onnx":
            with reading(card["file"]):
                self.card, self.run = load_onnx(folder, threads)
        else:
            with reading(card["weights"]):
                self.card, self.run = load_stablehlo(folder)
            check_programs(folder, card)
            most = min(most, max(p["batch_size"] for p in card["programs"]))
        self.most, self.waiting = most, queue.SimpleQueue()
        with reading("tokenizer.json"):
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        longest = card["max_length"]
        if card["format"] == "stablehlo":
            longest = min(longest, max(p["length"] for p in card["programs"]))
        self.tokenizer.enable_truncation(longest)
        threading.Thread(target=self.work, daemon=True).start()

    def answer(self, texts):
        """Return one answer per text. Raises ValueError for texts it cannot answer."""
        rows = [(self.encode(text), text, Future()) for text in texts]
        for row in rows:
            self.waiting.put(row)
        return [future.result() for _, _, future in rows]

    def encode(self, text):
        is_pair = isinstance(text, list) and len(text) == 2
        parts = text if is_pair else [text]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("texts are strings, or pairs of strings")
        if any(map(HALVES.search, parts)):
            raise ValueError("a text has half a character, a surrogate alone")
        task = self.card["task"]
        if is_pair and task in ("token-classification", "sentence-similarity"):
            raise ValueError(f"texts of {task} are strings, not pairs")
        parts = [self.card["prompt"] + parts[0], *parts[1:]]
        row = self.tokenizer.encode(*parts)
        if task == "question-answering" and not is_pair:
            raise ValueError("texts are pairs: a question and its context")
        if task == "question-answering" and 1 not in row.sequence_ids:
            raise ValueError(f"no context is left beside the question {parts[0]!r:.60}")
        if task == "fill-mask":
            if any(self.card["mask_id"] in part.ids for part in row.overflowing):
                raise ValueError(f"{text!r:.60} is too long: a blank of it is cut off")
            blanks, most = row.ids.count(self.card["mask_id"]), self.card.get("blanks")
            if not blanks or (most and blanks > most):
                limit = f", and 1 to {most} are filled" if most else ""
                raise ValueError(f"{blanks} blanks in {text!r:.60}{limit}")
        return row

    def work(self):
        while True:
            rows = [self.waiting.get()]
            while len(rows) < self.most and not self.waiting.empty():
                rows.append(self.waiting.get())
            try:
                found = self.run(**self.batch([row for row, _, _ in rows]))
                make = getattr(self, self.card["task"].replace("-", "_"))
                for i, (row, text, future) in enumerate(rows):
                    future.set_result(
                        make(row, text, {k: v[i] for k, v in found.items()})
                    )
            except Exception:  # report it to those who wait
                traceback.print_exc()
                for _, _, future in rows:
                    if not future.done():
                        future.set_exception(RuntimeError("the model failed"))

    def batch(self, rows):
        length = max(len(row.ids) for row in rows)
        names = {"input_ids": "ids", "token_type_ids": "type_ids"}
        names |= {"attention_mask": "attention_mask"}
        batch = {}
        for name, source in names.items():
            fill = self.card["pad_id"] if name == "input_ids" else 0
            batch[name] = np.full((len(rows), length), fill, np.int32)
            for out, row in zip(batch[name], rows, strict=True):
                out[: len(row.ids)] = getattr(row, source)
        if "mlm_positions" in self.card["inputs"]:
            at = np.zeros((len(rows), self.card["blanks"]), np.int32)
            for out, row in zip(at, rows, strict=True):
                blanks = self.blanks(row)
                out[: len(blanks)] = blanks
            batch["mlm_positions"] = at
        return batch

    def blanks(self, row):
        return [i for i, token in enumerate(row.ids) if token == self.card["mask_id"]]

    def fill_mask(self, row, text, found):
        blanks, logits = self.blanks(row), found["logits"]
        if "mlm_positions" not in self.card["inputs"]:
            logits = logits[blanks]
        masks, known = [], self.tokenizer.get_vocab_size()
        for odds in softmax(logits[: len(blanks)]):
            # ids beyond the vocabulary are padding
            best = np.argsort(-odds[:known])[:TOP]
            names = [self.tokenizer.id_to_token(int(i)) for i in best]
            pairs = zip(names, odds[best].tolist(), strict=True)
            masks.append([{"token": t, "probability": p} for t, p in pairs])
        return {"masks": masks}

    def text_classification(self, row, text, found):
        if not self.card["labels"]:
            return {"value": float(found["logits"][0])}
        odds, each = softmax(found["logits"]), dict.fromkeys(self.card["labels"], 0.0)
        for name, share in zip(self.card["labels"], odds.tolist(), strict=True):
            each[name] += share  # several classes of a model may share a name
        label = max(each, key=each.get)
        return {"label": label, "score": each[label], "probabilities": each}

    def token_classification(self, row, text, found):
        """Return the tag of each word, which is that of its first piece."""
        odds, words = softmax(found["logits"]), {}
        for i, word in enumerate(row.word_ids):
            if word is not None and row.sequence_ids[i] == 0:
                a, b = row.offsets[i]
                words.setdefault(word, [i, a, b])[2] = b
        return {
            "tags": [
                {
                    "word": text[a:b],
                    "start": a,
                    "tag": self.card["labels"][int(odds[i].argmax())],
                    "score": float(odds[i].max()),
                }
                for i, a, b in words.values()
            ]
        }

    def question_answering(self, row, text, found):
        """Return the best span of the context.

        The answer is "" if the null score exceeds its score by more than the model's
        threshold.
        """
        inside = np.array([n == 1 for n in row.sequence_ids])
        size = len(row.ids)
        scores = found["start_logits"][:size, None] + found["end_logits"][None, :size]
        places = np.arange(size)
        width = places[None] - places[:, None]
        longest = self.card.get("answer_length", LONGEST)
        allowed = (width >= 0) & (width < longest)
        allowed &= inside[:, None] & inside[None]
        a, b = np.unravel_index(
            np.where(allowed, scores, -np.inf).argmax(), scores.shape
        )
        begin, end = row.offsets[a][0], row.offsets[b][1]
        answer = {"answer": text[1][begin:end], "start": begin}
        answer["score"] = float(scores[a, b])
        threshold = self.card.get("threshold")
        if threshold is not None:
            answer["null_score"] = float(scores[0, 0])
            if answer["null_score"] - answer["score"] > threshold:
                answer["answer"] = ""
        return answer

    def sentence_similarity(self, row, text, found):
        return {"embedding": found["sentence_embedding"].tolist()}


def softmax(logits):
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------- HTTP
def texts_of(body):
    """Parse the texts of a request. Raises ValueError."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    texts = given.get("texts") if isinstance(given, dict) else None
    if not isinstance(texts, list):
        raise ValueError('the body is not an object with a list, {"texts": ["..."]}')
    return texts


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds for a silent client

    def do_GET(self):
        if self.path != "/health":
            return self.reply(404, {"error": "GET /health, or POST /predict"})
        card = self.server.model.card
        self.reply(200, {"task": card["task"], "labels": card["labels"]})

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True  # the start of the next request is unknown
            return self.reply(411, {"error": "no Content-Length that is a number"})
        size = int(length)
        if size > LARGEST:
            while size > 0 and self.rfile.read(min(size, LARGEST)):
                size -= LARGEST  # a client that is still sending reads no answer
            return self.reply(413, {"error": f"more than {LARGEST} bytes"})
        body = self.rfile.read(size)
        if self.path != "/predict":
            return self.reply(404, {"error": "GET /health, or POST /predict"})
        try:
            answers = self.server.model.answer(texts_of(body))
        except ValueError as error:  # its message is for the client
            return self.reply(400, {"error": str(error)})
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            why = "the model cannot answer; the server's log says why"
            return self.reply(500, {"error": why})
        self.reply(200, {"answers": answers})

    def reply(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        print(f"{self.address_string()} {format % args}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a directory with card.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--batch_size", type=int, default=8, help="texts at once")
    parser.add_argument("--threads", type=int, default=0, help="of onnxruntime")
    flags = parser.parse_args()
    for name, least in (("batch_size", 1), ("threads", 0)):
        if getattr(flags, name) < least:
            parser.error(f"--{name}={getattr(flags, name)}: give {least} or more")
    folder = pathlib.Path(os.path.expanduser(flags.model))
    if not (folder / "card.json").is_file():
        parser.error(f"--model={flags.model}: no card.json; bertjax.convert writes it")
    try:
        server = ThreadingHTTPServer((flags.host, flags.port), Handler)
    except (OSError, OverflowError) as error:
        parser.error(f"--host={flags.host} --port={flags.port}: {error}")
    server.daemon_threads = True
    try:
        server.model = Server(folder, flags.batch_size, flags.threads)
    except Unreadable as error:
        parser.error(f"--model={flags.model}: {error}")
    except Exception as error:  # such as a missing package
        parser.error(f"--model={flags.model}: {type(error).__name__}: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"serving http://{flags.host}:{server.server_port}/predict", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
