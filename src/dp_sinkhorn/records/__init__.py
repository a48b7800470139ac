"""Private records: where they come from, and the one object that holds them.

`load_source` reads a source named on the command line; `PrivateRecords` takes the result behind the barrier.
From then on records leave only as a Poisson batch, and only a mechanism asks for one.
"""

from dp_sinkhorn.records.private import PrivateRecords, RecordBatch
from dp_sinkhorn.records.sources import load_source

__all__ = ["PrivateRecords", "RecordBatch", "load_source"]
