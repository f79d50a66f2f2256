"""Decoding of images to tensors: JPEGs by libjpeg-turbo, other formats and unusual files by Pillow.

Results are uint8 tensors of shape (3, height, width) for `torchvision.transforms.v2`, with the channels of a pixel
next to each other in memory. torch's default collate sorts them into planes; `collate_channels_last` keeps the layout::

    ImageFolder(root, loader=load_rgb, transform=...)
    ImageFolder(root, loader=DecodeRandomResizedCrop(224), transform=...)
    DecodedImages(ImageFolder(root).samples, DecodeRandomResizedCrop(224), transform=...)  # quickest

Needs the extra `vision`. Other modules of torch_dpflow import it only on use.
"""

from torch_dpflow._core.channels_last import collate_channels_last
from torch_dpflow.vision.crops import (
    DecodeCenterCrop,
    DecodedImages,
    DecodeRandomResizedCrop,
    random_resized_crop_params,
)
from torch_dpflow.vision.encoded import DECODER, load_rgb

__all__ = [
    "DECODER",
    "DecodeCenterCrop",
    "DecodeRandomResizedCrop",
    "DecodedImages",
    "collate_channels_last",
    "load_rgb",
    "random_resized_crop_params",
]
