"""A sharded training run that outlives its nodes; the whole program is replica/demo/train.py.

    torchrun --standalone --nproc-per-node=2 examples/train_fsdp.py --steps 20

Every line it prints is a JSON object: a step and its loss, or an event of the checkpointer.
"""

from __future__ import annotations

from replica.demo.train import main

if __name__ == "__main__":
    main()
