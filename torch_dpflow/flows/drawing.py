"""Pictures of flows, as text for Graphviz and for Mermaid."""

from __future__ import annotations

from torch_dpflow._core.checks import check_type
from torch_dpflow.flows.flow import DataLoadFlow


def to_graphviz(flow: DataLoadFlow) -> str:
    """The flow as a graph in Graphviz's language; stages whose output may be kept are filled."""
    check_type("flow", flow, DataLoadFlow, "a DataLoadFlow")
    lines = [
        f"digraph {_dot(f'{flow.name}:{flow.version}')} {{",
        "  rankdir=LR;",
        "  node [shape=box];",
        f"  n0 [shape=cylinder, label={_dot(str(flow.source.ref))}];",
    ]
    for number, stage in enumerate(flow.stages, 1):
        style = ", style=filled" if number <= flow.cacheable else ""
        lines.append(f"  n{number} [label={_dot(stage.name)}{style}];")
    lines += [f"  n{number} -> n{number + 1};" for number in range(len(flow.stages))]
    return "\n".join([*lines, "}\n"])


def to_mermaid(flow: DataLoadFlow) -> str:
    """The flow as a Mermaid flowchart; stages whose output may be kept have the class `kept`."""
    check_type("flow", flow, DataLoadFlow, "a DataLoadFlow")
    lines = ["flowchart LR", f"  n0[({_mermaid(str(flow.source.ref))})]"]
    for number, stage in enumerate(flow.stages, 1):
        kept = ":::kept" if number <= flow.cacheable else ""
        lines.append(f"  n{number - 1} --> n{number}[{_mermaid(stage.name)}]{kept}")
    return "\n".join([*lines, "  classDef kept fill:#d9ead3", ""])


def _dot(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _mermaid(text: str) -> str:
    escaped = text.replace("#", "#35;").replace('"', "#quot;")
    return f'"{escaped}"'
