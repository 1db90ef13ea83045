"""The demo: a real training run loses a node and goes on, bit for bit.

    model.py, data.py, train.py   one worker's training run (``examples/train_fsdp.py`` runs it too)
    journal.py, guard.py          what a worker writes down; what it may open
    state_digest.py               one digest of everything a rank carries from step to step
    options.py                    the options of ``planaria demo``
    nodes.py, store.py            processes: agents, workers, the store that outlives every node
    run.py, watch.py              the run: start, watch, kill, replace, train again uninterrupted
    compare.py, report.py         what came out: equal or not, the figures
    story.py, plot.py             the same in words and as a picture
    cluster.py                    the command itself

Only ``train.py`` and what it imports run inside a worker. The pure parts (options, compare, report,
the sentences of story) start nothing and read no clock.
"""

from __future__ import annotations
