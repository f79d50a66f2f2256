"""Detect shapes in noise with SSDlite over MobileNetV3, through a flow that moves the boxes with the image.

    python -m examples.detect_shapes --loader dpflow        (or torch)

Images of various sizes hold one to three shapes of different classes, so targets are ragged: a batch is a list of
images and a list of targets. Trained from scratch for a few minutes the model learns what is where only roughly.
The evaluation needs no non-maximum suppression, as each class occurs at most once in an image: of each class that
is there, the box with the highest score is compared with the true one.
"""

import functools
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torchvision import tv_tensors
from torchvision.models.detection import ssdlite320_mobilenet_v3_large
from torchvision.ops import box_iou
from torchvision.transforms import v2

from examples import flow_training
from torch_dpflow.flows import DataLoadFlow, ImagePilDecode

CLASSES = ("background", "disc", "square", "triangle")
#: Pixels along each side of what the model sees.
SIZE = 128
#: A box that overlaps a true one by this much counts as found.
FOUND_IOU = 0.5

Batch = tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]


def generate(variant: str, count: int) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
    """JPEGs with boxes (x, y, width, height) and class numbers from 1."""
    for number in range(count):
        rng = np.random.default_rng([flow_training.VARIANTS.index(variant), number])
        width, height = (int(side) for side in rng.integers(112, 160, 2))
        noise = rng.normal(110, 20, (height, width, 3)).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(noise)
        labels = rng.permutation(np.arange(1, len(CLASSES)))[: rng.integers(1, len(CLASSES))]
        boxes = [draw_shape(image, CLASSES[label], rng) for label in labels]
        data = io.BytesIO()
        image.save(data, "JPEG", quality=90)
        yield data.getvalue(), {"boxes": boxes, "labels": labels.tolist()}


def draw_shape(image: Image.Image, kind: str, rng: np.random.Generator) -> list[int]:
    """Draw a shape of a bright random colour somewhere; its box."""
    side = int(rng.integers(32, 64))
    x, y = (int(rng.integers(0, edge - side)) for edge in image.size)
    colour = tuple(int(part) for part in rng.integers(170, 256, 3))
    draw = ImageDraw.Draw(image)
    corners = (x, y, x + side - 1, y + side - 1)
    if kind == "disc":
        draw.ellipse(corners, fill=colour)
    elif kind == "square":
        draw.rectangle(corners, fill=colour)
    else:
        draw.polygon([(x, y + side - 1), (x + side - 1, y + side - 1), (x + side / 2, y)], fill=colour)
    return [x, y, side, side]


def with_boxes(sample: tuple[Image.Image, Mapping[str, Any]]) -> tuple[Image.Image, dict[str, torch.Tensor]]:
    """Annotations as tensors that torchvision's transforms know for boxes: corners, float32, (boxes, 4)."""
    image, target = sample
    found = torch.tensor(target["boxes"], dtype=torch.float32).reshape(-1, 4)
    corners = torch.cat([found[:, :2], found[:, :2] + found[:, 2:]], 1)
    boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(image.height, image.width))
    return image, {"boxes": boxes, "labels": torch.tensor(target["labels"], dtype=torch.int64)}


def describe(flow: DataLoadFlow, variant: str) -> DataLoadFlow:
    """Decode and, for training, change colours, flip, and zoom out; boxes follow."""
    flow.map_data("decode", ImagePilDecode(), cache="always")
    flow.map("transform_target", with_boxes, cache="always")
    if variant == "train":
        flow.map("photometric_distort", v2.RandomPhotometricDistort())
        flow.map("random_hflip", v2.RandomHorizontalFlip())
        flow.map("random_zoom_out", v2.RandomZoomOut(fill=110, side_range=(1.0, 1.3)))
    to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])
    return flow.map("to_tensor", to_tensor, cache="always")


def as_lists(samples: list[Any]) -> Batch:
    """Images and targets as lists: they differ in size and number."""
    images, targets = zip(*samples)
    return list(images), list(targets)


def build_model() -> nn.Module:
    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=len(CLASSES))
    model.transform.fixed_size = (SIZE, SIZE)
    return model


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    losses: dict[str, torch.Tensor] = model(*batch)
    return torch.stack(list(losses.values())).sum()


def best_boxes(model: Any, images: list[torch.Tensor]) -> list[torch.Tensor]:
    """For each image the box with the highest score of each class, (classes, 4), in pixels of the image."""
    resized, _ = model.transform(images)
    features = list(model.backbone(resized.tensors).values())
    head = model.head(features)
    scores = head["cls_logits"].softmax(-1)
    found = []
    for image, anchors, score, moves in zip(
        images, model.anchor_generator(resized, features), scores, head["bbox_regression"]
    ):
        boxes = model.box_coder.decode_single(moves, anchors)[score.argmax(0)]
        height, width = image.shape[-2:]
        found.append(boxes * torch.tensor([width, height, width, height]) / SIZE)
    return found


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """Return the share of shapes that were found, and how well boxes overlap (IoU)."""
    found = objects = 0
    overlap = 0.0
    for images, targets in batches:
        for boxes, target in zip(best_boxes(model, images), targets):
            overlaps = box_iou(boxes[target["labels"]], target["boxes"]).diagonal()
            overlap += float(overlaps.sum())
            found += int((overlaps >= FOUND_IOU).sum())
            objects += len(overlaps)
    return {"found": found / objects, "mean_iou": overlap / objects if objects else math.nan}


TASK = flow_training.Task(
    title="Detect shapes in noise with SSDlite over MobileNetV3.",
    dataset="examples/shapes",
    generate=generate,
    describe=describe,
    collate=as_lists,
    model=build_model,
    loss=loss,
    evaluate=evaluate,
    defaults={"train": 320, "val": 60, "epochs": 5, "batch_size": 8, "lr": 3e-3},
)

main = functools.partial(flow_training.main, TASK, "examples.detect_shapes")

if __name__ == "__main__":
    raise SystemExit(main())
