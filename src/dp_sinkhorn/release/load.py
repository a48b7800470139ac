"""Open a release and sample from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.features import OrientedEnergy
from dp_sinkhorn.generators import Generator, build_generator
from dp_sinkhorn.images import from_pixels
from dp_sinkhorn.labelling import Labeller
from dp_sinkhorn.release.format import (
    FORMAT_VERSION,
    INFO_FILE,
    LABELLER,
    WEIGHTS_FILE,
    PrivacyStatement,
    ReleaseInfo,
)

_CHUNK = 1000
_MAX_SEED = 2**63 - 1


class Release:
    """A generator with its guarantee. `load_release` makes one from a folder."""

    def __init__(self, info: ReleaseInfo, generator: Generator, labeller: Labeller | None = None) -> None:
        self.info = info
        self.generator = generator.eval()
        self.labeller = labeller

    @property
    def privacy(self) -> PrivacyStatement:
        """The guarantee."""
        return self.info.privacy

    @property
    def classes(self) -> list[str]:
        """Class names; labels are indices into this list."""
        return self.info.classes

    def sample(
        self, count: int | None = None, labels: int | Sequence[int] | NDArray[np.integer] | None = None,
        seed: int | None = None,
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:  # fmt: skip
        """Draw synthetic images.

        Args:
            count: how many images; may be left out when `labels` is a sequence.
            labels: one class for all, a sequence with one class for each image, or None for all classes in
                equal shares.
            seed: makes the draw reproducible. Sampling again costs no privacy.

        Returns:
            images: `uint8`, of shape (N, H, W) for grey and (N, H, W, 3) for RGB.
            labels: `int64`, of shape (N,).
        """
        if seed is not None and not 0 <= seed <= _MAX_SEED:
            raise UserError(f"seed {seed}: must be 0..{_MAX_SEED}")
        index = torch.from_numpy(self._labels(count, labels))
        public = torch.Generator().manual_seed(torch.seed() if seed is None else seed)
        device = next(self.generator.parameters()).device
        images = torch.empty(0, *self.info.image_shape, dtype=torch.uint8)
        with torch.inference_mode():
            if len(index) and self.labeller is not None:
                images = self.labeller.fill(index.to(device), lambda part: self._draw(part, public))
            elif len(index):
                images = torch.cat([self._draw(part.to(device), public).cpu() for part in torch.split(index, _CHUNK)])
        channels_last = images.permute(0, 2, 3, 1).contiguous()
        return channels_last.squeeze(-1).numpy() if self.info.image_shape[0] == 1 else channels_last.numpy(), (
            index.numpy()
        )

    def _draw(self, labels: Tensor, public: torch.Generator) -> Tensor:
        return from_pixels(self.generator.draw(labels, public))

    def _labels(self, count: int | None, labels: int | Sequence[int] | NDArray[np.integer] | None) -> NDArray[np.int64]:
        total = len(self.classes)
        if labels is None or np.ndim(labels) == 0:
            if count is None or count < 0:
                raise UserError(f"count: give the number of images to draw, 0 or more, got {count}")
            chosen = np.arange(count) % total if labels is None else np.full(count, labels)
        else:
            chosen = np.asarray(labels)
            if chosen.ndim != 1 or (count is not None and count != len(chosen)):
                raise UserError(f"labels: expected one class for each of {count} images, got shape {chosen.shape}")
        if chosen.size and not np.issubdtype(chosen.dtype, np.integer):
            raise UserError(f"labels: classes are whole numbers 0..{total - 1}, got dtype {chosen.dtype}")
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < total):
            outside = chosen.min() if chosen.min() < 0 else chosen.max()
            raise UserError(f"labels: class {outside} is out of range; this release has classes 0..{total - 1}")
        return chosen.astype(np.int64)


def load_release(path: str | Path, device: torch.device | str = "cpu") -> Release:
    """Open a release folder.

    Only JSON and safetensors are read, and declared sizes are checked before anything is allocated: a release
    from an untrusted source cannot run code.
    """
    folder = Path(path)
    if not (folder / INFO_FILE).is_file() and (folder / "release" / INFO_FILE).is_file():
        folder = folder / "release"  # the run's folder was named instead of the release in it
    if not (folder / INFO_FILE).is_file():
        raise UserError(f"{folder}: not a release, it has no {INFO_FILE}; name the release/ folder of a finished run")
    info = read_info(folder / INFO_FILE)
    return _read_weights(info, folder / WEIGHTS_FILE, torch.device(device))


def read_info(path: Path) -> ReleaseInfo:
    """What a release.json says, checked."""
    try:
        info = ReleaseInfo.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"{path}: {where}: {first['msg']}; the release is damaged or of another version") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if info.format_version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version {info.format_version} is not {FORMAT_VERSION}; "
            f"it was written by dp-sinkhorn {info.package_version}, use that version"
        )
    return info


class _WithoutInitialValues(TorchFunctionMode):
    """Leaves new parameters as they are: those of a release are about to be read, and drawing some takes a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


def _read_weights(info: ReleaseInfo, path: Path, device: torch.device) -> Release:
    # Shapes without memory: nothing is allocated before the file agrees.
    with torch.device("meta"), _WithoutInitialValues():
        generator = build_generator(info.spec)
        labeller = Labeller(OrientedEnergy(info.image_shape), len(info.classes)) if info.labels == "probe" else None
    expected = {name: tuple(tensor.shape) for name, tensor in generator.state_dict().items()}
    if labeller is not None:
        expected |= {LABELLER + name: tuple(tensor.shape) for name, tensor in labeller.state_dict().items()}
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            if found != expected:
                raise UserError(f"{path}: its tensors are not those of the '{info.architecture}' in {INFO_FILE}")
            tensors = {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise UserError(f"{path}: some weights are NaN or infinite; the release is damaged")
    if labeller is not None:
        own = {name: tensors.pop(name) for name in expected if name.startswith(LABELLER)}
        labeller.load_state_dict({name.removeprefix(LABELLER): tensor for name, tensor in own.items()}, assign=True)
        labeller.to(device)
    generator.load_state_dict(tensors, assign=True)
    return Release(info, generator.to(device), labeller)
