"""Decompression of shards, frames and samples of MosaicML's MDS and of LitData."""

from __future__ import annotations

from torch_dpflow.errors import MissingExtraError, SourceError

#: Names of compressions here, and Arrow's.
_COMPRESSIONS = {"gz": "gzip", "bz2": "bz2", "zstd": "zstd", "br": "brotli"}


def decompressed(data: bytes, compression: str, url: str, size: int = -1) -> bytes:
    """Return what was compressed; of more than `size` bytes, only one more, so that the caller sees it.

    Raises:
        SourceError: the data is damaged, or its compression is not known.
        MissingExtraError: pyarrow is not installed.
    """
    if compression == "snappy":
        import snappy

        try:
            return bytes(snappy.decompress(data))
        except Exception as error:  # of classes that differ between versions
            raise SourceError(f"{url} cannot be decompressed: {error}") from error
    if compression not in _COMPRESSIONS:
        raise SourceError(f"{url} has the compression {compression!r}, which is not read")
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "compressed shards need pyarrow; install it with: pip install 'torch_dpflow[datasets]'"
        ) from error
    try:
        stream = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), _COMPRESSIONS[compression])
        return bytes(stream.read(size + 1) if size >= 0 else stream.read())
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(f"{url} cannot be decompressed: {error}") from error
