# SPDX-License-Identifier: Apache-2.0
"""Compare the CPU time of exact search on the host with faiss's flat index, in turns.

  OPENBLAS_NUM_THREADS=1 taskset -c 0 python tests/peers/faiss_search.py [PASSAGES]

1,000 queries search PASSAGES (default 1,000,000) random unit vectors of 384 numbers.
"""

import sys
import time

import faiss
import numpy as np

from bertjax.tasks.search import Dense, Int8

faiss.omp_set_num_threads(1)
draws = np.random.default_rng(0)


def draw(count):
    vectors = draws.standard_normal((count, 384), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


passages, queries = draw(int((*sys.argv, "1000000")[1])), draw(1000)
flat = faiss.IndexFlatIP(384)
flat.add(passages)
whole, coarse = Dense(passages), Int8.of(passages)
sides = {
    "bertjax": lambda k: whole.search(Dense(queries), k=k)[0],
    "bertjax, 8 bits": lambda k: coarse.search(Dense(queries), k=k)[0],
    "faiss": lambda k: flat.search(queries, k)[1],
}
for k in (10, 100):
    seconds, found = {name: [] for name in sides}, {}
    for _ in range(3):
        for name, search in sides.items():
            begun = time.process_time()
            found[name] = search(k)
            seconds[name].append(time.process_time() - begun)
    same = np.mean(found["bertjax"] == found["faiss"])
    print(f"k={k}: {same:.5f} of the passages are the same")
    for name, each in seconds.items():
        print(f"  {name}: {np.median(each):.1f} s")
