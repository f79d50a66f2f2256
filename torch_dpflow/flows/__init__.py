"""Declarative flows: describe how samples are loaded, build the flow with a reader, and read its samples."""

from torch_dpflow.flows.cluster_reader import RemoteDataLoadFlowReader
from torch_dpflow.flows.flow import (
    DataLoadFlow,
    DataLoadFlowReader,
    describe_flow,
    load_flow,
    save_flow,
    to_mermaid,
)
from torch_dpflow.flows.read import DataLoadFlowRead, LocalDataLoadFlowReader, MappedDataset, random_split
from torch_dpflow.flows.stage import (
    DataTransform,
    ImagePilDecode,
    MapTransform,
    SampleTransform,
    Stage,
    TargetTransform,
)

__all__ = [
    "DataLoadFlow",
    "DataLoadFlowRead",
    "DataLoadFlowReader",
    "DataTransform",
    "ImagePilDecode",
    "LocalDataLoadFlowReader",
    "MapTransform",
    "MappedDataset",
    "RemoteDataLoadFlowReader",
    "SampleTransform",
    "Stage",
    "TargetTransform",
    "describe_flow",
    "load_flow",
    "random_split",
    "save_flow",
    "to_mermaid",
]
