"""Images for `examine`: pictures to batches of pixels, tokens named after the patches they are."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cumulant.core.errors import InputError
from cumulant.core.files import printable
from cumulant.core.typed import functions
from cumulant.integrations.transformers import package
from cumulant.lens.observing import watching
from cumulant.lens.reading import SHOWN, Part, Reading
from cumulant.lens.recorder import Layer, Recorder, Wanted
from cumulant.lens.tables import token_table
from cumulant.lens.texts import Text

__all__ = ["Grid", "ImageReading", "Picture", "Vision", "load_vision", "pictures"]

Pixels = NDArray[np.uint8]


class Picture(NamedTuple):
    """An image: its name, a digest of its pixels, and the pixels ``(height, width, 3)``."""

    name: str
    content: str
    pixels: Pixels


class Grid(NamedTuple):
    """Tokens of an image: named special ones, then patches row by row."""

    special: tuple[str, ...]
    rows: int
    columns: int

    def names(self) -> list[str]:
        """Names of all tokens: ``patch 3,0`` is the first patch of the fourth row."""
        places = ((r, c) for r in range(self.rows) for c in range(self.columns))
        return [*self.special, *(f"patch {r},{c}" for r, c in places)]


def pictures(given: Any) -> Iterator[Picture]:
    """The images as `Picture`, one at a time.

    Args:
        given: a path, an array ``(height, width[, 3])`` of bytes, an image of Pillow, several of
            these, or a dictionary of names and these.

    Raises:
        InputError: a file that is missing or no image, or an array of another kind.
    """
    if isinstance(given, Mapping):
        named = cast(Mapping[str, Any], given)
        yield from (_picture(str(name), image) for name, image in named.items())
        return
    one = _is_path(given) or hasattr(given, "shape") or hasattr(given, "getpixel")
    images = (given,) if one else cast(Iterable[Any], given)
    for number, image in enumerate(images):
        name = Path(image).name if _is_path(image) else f"image {number}"
        yield _picture(name, image)


def _is_path(image: Any) -> bool:
    return isinstance(image, str | os.PathLike)


def _picture(name: str, image: Any) -> Picture:
    try:
        pillow = import_module("PIL.Image")
    except ImportError as error:
        raise InputError("images need Pillow: pip install '.[plot]'.") from error
    if _is_path(image):
        path = str(Path(image))
        try:
            with pillow.open(path) as opened:
                image = opened.convert("RGB")
        except FileNotFoundError:
            raise InputError(f"there is no image {printable(path)}.") from None
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise InputError(f"{printable(path)} is not an image: {error}.") from None
    elif hasattr(image, "getpixel"):
        image = image.convert("RGB")
    array: NDArray[Any] = np.asarray(image)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, -1)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3 or 0 in array.shape:
        raise InputError(
            f"image {name!r} must be bytes of shape (height, width, 3), not {array.dtype} of shape "
            f"{array.shape}."
        )
    digest = hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest()
    return Picture(name, digest, array)


class ImageReading(Reading):
    """Images through a vision model; `tokenizer` is its image processor, or None.

    Without a processor, images are resized to the model's size and scaled to [-1, 1].
    """

    def __init__(self, model: nn.Module, tokenizer: Any, **options: Any) -> None:
        super().__init__(model, tokenizer, **options)
        takes = getattr(model, "main_input_name", "pixel_values")
        if takes != "pixel_values":
            raise InputError(
                f"{type(model).__name__} takes {takes}, not images: "
                "pass a vision model, or the vision tower of a model of both (model.vision_model)."
            )

    def take(self, recorder: Recorder, chunk: list[Text]) -> Iterator[Part]:
        """Run some images; `state` counts them when they are yielded."""
        state, digest = self.state, self._digest(chunk)
        images = cast(list[Picture], chunk)
        grids: list[Grid] = []
        for start in range(0, len(images), self.batch_size):
            some = images[start : start + self.batch_size]
            pixels = self._pixels([x.pixels for x in some])
            seen = len(recorder.records)
            self._forward({"pixel_values": pixels})
            grid = self._grid(recorder, seen, pixels)
            grids += [grid] * len(some)
            for one in pixels[: max(0, SHOWN - len(self.kept))]:
                self.kept.append({"pixel_values": one[None].clone()})
                state.first = state.first or self.kept[0]
            for image in pixels[: max(0, SHOWN - len(state.pictures))]:
                state.pictures.append({"png": self._png(image), **_facts(grid)})
        table = token_table(recorder)
        for record in recorder.records:
            self.sums.add(record)
        recorder.records.clear()
        tokens = [grid.names() for grid in grids]
        inputs = self._name_inputs([[0] * len(x) for x in tokens], tokens, [x.name for x in chunk])
        if not self.shards.alone:
            inputs["number"] = [self.shards.number(state.texts + k) for k in range(len(chunk))]
        state.tokens += sum(map(len, tokens))
        state.parts += 1
        state.texts += len(chunk)
        state.digest, state.ahead = digest, ""
        yield Part(table, inputs)

    def _pixels(self, images: list[Pixels]) -> Tensor:
        if self.tokenizer is not None:
            found = self.tokenizer(images=images, return_tensors="pt")["pixel_values"]
            return cast(Tensor, found)
        pillow = import_module("PIL.Image")
        height, width = _pair(_config(self.model, "image_size", 224))
        sized = [pillow.fromarray(x).resize((width, height), 2) for x in images]  # 2: bilinear
        stacked = functions.from_numpy(np.stack([np.array(x) for x in sized]))
        return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1.0

    def _png(self, pixels: Tensor) -> str:
        """What the model saw of an image, in base64."""
        mean = torch.tensor(getattr(self.tokenizer, "image_mean", None) or [0.5] * 3)
        sd = torch.tensor(getattr(self.tokenizer, "image_std", None) or [0.5] * 3)
        shown = (pixels.float().cpu() * sd[:, None, None] + mean[:, None, None]).clamp(0, 1)
        array = (255 * shown).round().to(torch.uint8).permute(1, 2, 0).numpy()
        written = io.BytesIO()
        import_module("PIL.Image").fromarray(array).save(written, "PNG")
        return base64.b64encode(written.getvalue()).decode()

    def _grid(self, recorder: Recorder, seen: int, pixels: Tensor) -> Grid:
        """Which patch each token is, checked against the number of tokens of every layer."""
        height, width = _pair(_config(self.model, "patch_size", 0))
        sizes = {record.real.shape[1] for record in recorder.records[seen:]}
        batches = {record.real.shape[0] for record in recorder.records[seen:]}
        registers = int(_config(self.model, "num_register_tokens", 0) or 0)
        rows, columns = (0, 0)
        if height and width:
            rows, columns = pixels.shape[2] // height, pixels.shape[3] // width
        known = {
            0: (),
            1: ("[CLS]",),
            1 + registers: ("[CLS]", *(f"[REG {k}]" for k in range(registers))),
        }
        if "deit" in str(_config(self.model, "model_type", "")):
            known[2] = ("[CLS]", "[DIST]")
        special = None
        if len(sizes) == 1 and batches == {len(pixels)} and rows * columns:
            special = known.get(sizes.pop() - rows * columns)
        if special is None:
            raise InputError(
                f"the tokens of {type(self.model).__name__} are not one grid of {rows} x {columns} "
                "patches after a class token: attention in windows, at several resolutions or with "
                "further tokens cannot be drawn on the picture. Use observe."
            )
        return Grid(special, rows, columns)

    def layers(self, recorder: Recorder) -> list[Layer]:
        """The layers that ran; if a resumed run had no image left, a black one shows them."""
        if not recorder.layers:
            height, width = _pair(_config(self.model, "image_size", 224))
            with watching(self.model, Wanted(order=False, spectrum=False)) as again:
                self._forward({"pixel_values": torch.zeros(1, 3, height, width)})
            recorder.layers = again.layers
        return list(recorder.layers.values())


def _facts(grid: Grid) -> dict[str, int]:
    return {"rows": grid.rows, "columns": grid.columns, "special": len(grid.special)}


def _config(model: nn.Module, name: str, default: Any) -> Any:
    return getattr(getattr(model, "config", None), name, default)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, list | tuple):
        height, width = cast(list[int], size)
        return int(height), int(width)
    return int(size), int(size)


class Vision(NamedTuple):
    """A vision model in evaluation mode, its image processor or None, its name, notes."""

    model: Any
    processor: Any
    name: str
    notes: tuple[str, ...]


def load_vision(name: str | os.PathLike[str] | None) -> Vision:
    """A vision model, or the vision tower of one that also reads text, with its image processor.

    Args:
        name: a folder as written by ``save_pretrained``.

    Raises:
        InputError: no folder, or one that holds no vision model.
    """
    library = package()
    if name is None:
        raise InputError("images need a vision model, and none is installed: give its folder.")
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise InputError(f"{printable(folder)} holds no model: there is no config.json.")
    try:
        model = library.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot load {printable(folder)}: {first}") from None
    if getattr(model, "main_input_name", "") != "pixel_values":
        model = getattr(model, "vision_model", model)
    notes: tuple[str, ...] = ()
    processor = None
    try:
        processor = library.AutoImageProcessor.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError):
        notes = (
            "the model's own image processor could not be loaded: images were resized to its size "
            "and scaled to [-1, 1]",
        )
    return Vision(model, processor, folder.name, notes)
