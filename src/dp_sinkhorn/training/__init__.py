"""Training: post-processing of what the barrier releases. Nothing here sees a record.

`run.train` makes a run folder from records and settings; `loop.train_generator` is Algorithm 1.
"""

from dp_sinkhorn.training.loop import Progress, Trainer
from dp_sinkhorn.training.run import Interrupted, RunFolder, finish, train

__all__ = ["Interrupted", "Progress", "RunFolder", "Trainer", "finish", "train"]
