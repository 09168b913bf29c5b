"""One side of the comparison: a process that runs cases, asked in JSON lines on stdin, answering in JSON lines.

Imports nothing of this project, so that another Python environment can run it too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def serve(cases: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Say `about`, then answer {"case": name, **arguments} with what the case returns, or {"error": text}, until EOF.

    What the cases print goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(dict(about)), file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        gc.collect()
        try:
            answer = cases[question.pop("case")](**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
