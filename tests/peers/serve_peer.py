# SPDX-License-Identifier: Apache-2.0
"""The benchmark peers' side of the protocol in bertjax/measuring/alternate.py."""

import json
import resource
import sys
import time


def serve(run, tokens, name="step", more=dict):
    """Answer the requests on stdin.

    run(steps) runs steps of `tokens` tokens each; name: the timed part; more() returns
    further facts after the first step.
    """
    begun = time.perf_counter()
    run(1)
    facts = {"tokens": tokens, "compile_seconds": time.perf_counter() - begun}
    print(json.dumps(facts | more()), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        run(int(line))
        seconds = {name: (time.perf_counter() - begun) / int(line)}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        print(json.dumps({"seconds": seconds, "peak_rss_mb": peak}), flush=True)
