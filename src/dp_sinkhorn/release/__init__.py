"""The publishable folder: write it, load it, sample from it.

Loading needs neither the training code nor dp-accounting: an analyst who receives a release uses this package
and `dp_sinkhorn.generators` alone.
"""

from dp_sinkhorn.release.format import PrivacyStatement, ReleasedEvent, ReleaseInfo
from dp_sinkhorn.release.load import Release, load_release
from dp_sinkhorn.release.write import write_release

__all__ = ["PrivacyStatement", "Release", "ReleaseInfo", "ReleasedEvent", "load_release", "write_release"]
